"""One prompt under the lens: every layer's and head's residual ratios and scale, packed for a page.

Numbers are in base64: float32 for q and beta, one byte per channel for the scale, whose columns are at most
`COLUMNS` so that a page stays small enough to mail.
"""

import base64
from typing import Any

import torch
from torch import Tensor, nn

from osdn.analysis.capture import LayerCapture, attention_layers, capturing
from osdn.analysis.prompts import Prompt
from osdn.analysis.residuals import residuals, scale_trajectory

COLUMNS = 256  # of the scale's heat map; longer prompts show every n-th token's scale


@torch.no_grad()
def inspect_prompt(model: nn.Module, prompt: Prompt, texts: list[str], title: str) -> dict[str, Any]:
    """What the page shows of one prompt, whose tokens read `texts`."""
    q: list[Tensor] = []
    beta: list[Tensor] = []
    scales: list[Tensor] = []
    boxes: list[tuple[float, float] | None] = []
    T = len(prompt.ids)
    columns = min(T, COLUMNS)
    shown = (torch.arange(columns) + 0.5) * T / columns  # the token in the middle of each column

    def measure(layer: LayerCapture) -> None:
        r = residuals(layer)
        # where the residual is too small to measure, the closed form is what the write did
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
