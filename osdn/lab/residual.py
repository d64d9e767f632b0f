"""How far one write contracts the error it corrects, on a trained model's own keys, gates and scales.

For the delta rule f_t(S_t) / f_t(S_{t-1}) = (1 - beta_t <d_t, k_t²>)²: the value and the state cancel (the
paper, "Algorithmic token-local residual contraction").
"""

from typing import Any

import torch
from torch import Tensor, nn

from osdn.analysis.capture import capture, recurrent_layers
from osdn.analysis.residuals import FLOOR, residuals, scale_trajectory


def residual_ratio(model: nn.Module, input_ids: Tensor) -> dict[str, Any]:
    """q_geo, the geometric mean of q_t over layers, heads and tokens, and the mean log q_t by position.

    Nothing for a model that has no delta rule.
    """
    if not recurrent_layers(model):
        return {}
    layers = capture(model, input_ids=input_ids, use_cache=False)
    log_q = torch.stack([residuals(x).closed.double().clamp_min(FLOOR).log() for x in layers])
    by_position = log_q.mean((0, 1, 3))  # of [layers, B, T, HV]
    return {"q_geo": by_position.mean().exp().item(), "log_q": by_position.tolist()}


def scales(model: nn.Module, input_ids: Tensor) -> Tensor:
    """The scale d_t that every token of one prompt `[1, T]` was written with, `[layers, T, HV, K]`."""
    return torch.cat([scale_trajectory(x) for x in capture(model, input_ids=input_ids, use_cache=False)])
