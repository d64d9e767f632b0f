"""One prompt in detail: the residual ratios and scales of every layer and head, packed for a web page.

Numbers are base64-encoded: float32 for q and beta, one byte per channel for the scale.  The scale has at most
`COLUMNS` columns, which keeps the page small enough to mail.
"""

import base64
from typing import Any

import torch
from torch import Tensor, nn

from osdn.analysis.capture import LayerCapture, attention_layers, capturing
from osdn.analysis.prompts import Prompt
from osdn.analysis.residuals import residuals, scale_trajectory

COLUMNS = 256  # of the scale's heat map; a longer prompt shows every n-th token


@torch.no_grad()
def inspect_prompt(model: nn.Module, prompt: Prompt, texts: list[str], title: str) -> dict[str, Any]:
    """The page's data for one prompt; `texts` are its tokens as text."""
    q: list[Tensor] = []
    beta: list[Tensor] = []
    scales: list[Tensor] = []
    boxes: list[tuple[float, float] | None] = []
    T = len(prompt.ids)
    columns = min(T, COLUMNS)
    shown = (torch.arange(columns) + 0.5) * T / columns  # the token in the middle of each column

    def measure(layer: LayerCapture) -> None:
        r = residuals(layer)
        # where the residual is too small to measure, use the closed form
        q.append(torch.where(r.negligible, r.closed, r.q)[0].T)  # [H, T]
        beta.append(layer.problem.beta[0].T)
        if layer.scaled:
            scales.append(scale_trajectory(layer)[0, shown.long()].transpose(0, 1))  # [H, columns, K]
            boxes.append(layer.problem.bounds)

    device = next(model.parameters()).device
    with capturing(model, measure):
        model(input_ids=prompt.ids[None].to(device), use_cache=False)
    left_out = attention_layers(model)
    return {
        "title": title + (f" ({left_out} attention layers left out)" if left_out else ""),
        "tokens": texts,
        "second": prompt.second_reading,
        "layers": len(q),
        "heads": len(q[0]),
        "channels": scales[0].shape[-1] if scales else 0,
        "q": _base64(torch.stack(q).float()),
        "beta": _base64(torch.stack(beta).float()),
        "scale": _scale(torch.stack(scales), boxes[0]) if scales else None,
    }


def _scale(d: Tensor, bounds: tuple[float, float] | None) -> dict[str, Any]:
    """Bytes between each head's least and greatest scale, [L, H, columns, K]."""
    low, high = d.amin((2, 3)), d.amax((2, 3))  # [L, H]
    span = (high - low).clamp_min(1e-9)[..., None, None]
    codes = ((d - low[..., None, None]) / span * 255).round().to(torch.uint8)
    ranges = torch.stack([low, high], -1).flatten(0, 1).tolist()
    return {"columns": d.shape[2], "ranges": ranges, "bounds": bounds, "codes": _base64(codes)}


def _base64(x: Tensor) -> str:
    return base64.b64encode(x.contiguous().cpu().numpy().tobytes()).decode()
