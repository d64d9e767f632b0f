"""Statistics of a trained model's writes: how strong they are, and how much of its error each one removes.

For the delta rule, f_t(S_t) / f_t(S_{t-1}) = (1 - beta_t <w_t, k_t>)²: the value and the state cancel,
whichever rule produced the write key w_t (the paper, "Algorithmic token-local residual contraction").
"""

from typing import Any

import torch
from torch import Tensor, nn

from osdn.analysis.capture import capture
from osdn.analysis.residuals import FLOOR, scale_trajectory
from osdn.layers import OperatorInputs, TokenMixer
from osdn.layers.mixers import write_keys


@torch.no_grad()
def write_statistics(model: nn.Module, input_ids: Tensor) -> dict[str, Any]:
    """Means over heads, prompts and tokens, for each layer (`writes`) and over all layers.

    `q_geo` is the geometric mean of the residual ratio and `log_q` its mean logarithm by position.  `beta` is
    the mean write strength; if keys are not normalised it is multiplied by their squared norm, which gives
    the equivalent strength for unit keys.  `key_scale` is the mean <w, k> / <k, k>, and `decay` the share of
    the state that is left after a token.  Statistics that an update does not have are left out
    (`Update.measured`): GDN-2 has no single write strength, and a write of Comba does not shrink the error it
    was computed from.  The result is empty for a model without a delta rule.
    """
    inputs: list[OperatorInputs] = []
    layers = [module for module in model.modules() if isinstance(module, TokenMixer)]
    if not layers:
        return {}
    hooks = [x.recurrence.register_forward_hook(lambda _, args, __: inputs.append(args[0])) for x in layers]
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    writes, log_q = [], []
    for mixer, layer in zip(layers, inputs):
        k = layer.k.repeat_interleave(layer.v.shape[2] // layer.k.shape[2], 2).double()
        along = (write_keys(layer)[0].double() * k).sum(-1)  # <w, k>, [B, T, HV]
        q = (1 - layer.beta * along).square().clamp_min(FLOOR).log()
        log_q.append(q.mean((0, 2)).unflatten(0, (-1, mixer.writes)).mean(1))
        decay = 1.0 if layer.log_decay is None else layer.log_decay.exp().mean().item()
        scale = (along / k.square().sum(-1).clamp_min(1e-6)).mean().item()
        strength = layer.beta if mixer.update is None or mixer.update.unit_keys else layer.beta * along
        row = {"beta": strength.mean().item(), "key_scale": scale, "decay": decay}
        row["q_geo"] = q.mean().exp().item()
        known = row if mixer.update is None else mixer.update.measured
        writes.append({name: row[name] for name in known})
    by_position = torch.stack(log_q).mean(0)
    means = {name: sum(row[name] for row in writes) / len(writes) for name in writes[0] if name != "q_geo"}
    if "q_geo" not in writes[0]:
        return {**means, "writes": writes}
    q_geo = by_position.mean().exp().item()
    return {"q_geo": q_geo, **means, "writes": writes, "log_q": by_position.tolist()}


def scales(model: nn.Module, input_ids: Tensor) -> Tensor:
    """The scale d_t that every token of one prompt `[1, T]` was written with, `[layers, T, HV, K]`."""
    return torch.cat([scale_trajectory(x) for x in capture(model, input_ids=input_ids, use_cache=False)])
