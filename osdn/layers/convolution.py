"""The short convolution that queries, keys and values pass through: causal, depthwise, then SiLU.

On a CPU it is a compiled kernel (`osdn/ops/cpu/convolution.h`).  Elsewhere four taps are four multiply-adds
of a shifted copy.  Sequences that are packed into one row, or that continue, need nothing more: it is the
same convolution over a row in which every sequence is preceded by its last inputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdn.layers.precision import widen
from osdn.ops import tracing
from osdn.ops.cpu.convolution import short_convolution, usable


class ShortConvolution(nn.Conv1d):
    """`silu(sum_i weight[W - 1 - i] * x[t - i])` for every channel; `weight` is `[channels, 1, W]`.

    >>> y, _ = ShortConvolution(8, width=4)(torch.randn(2, 5, 8))
    >>> y.shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=False)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        tail: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve `x` `[B, T, D]`; `tail` `[N, W - 1, D]` holds the inputs before it, None is zeros.

        Returns the outputs `[B, T, D]`, and the tail that continues them if asked for.
        """
        past = self.kernel_size[0] - 1
        if tail is not None:
            tail = tail.to(x.dtype)  # it may come from another precision, as from autocast
        if x.shape[1] > 1 and usable(x):
            y = short_convolution(x, self.weight[:, 0], tail=tail, cu_seqlens=cu_seqlens)
            return y, _last_inputs(x, tail, cu_seqlens, past) if output_final_state else None
        if cu_seqlens is not None:
            return self._packed(x, tail, cu_seqlens, output_final_state)
        if tail is None and not output_final_state:
            return _convolution(x, self.weight), None
        B, T, D = x.shape
        rows = torch.cat([x.new_zeros(B, past, D) if tail is None else tail, x], 1)  # [B, W - 1 + T, D]
        if T == 1:  # one product instead of W shifted ones: decoding is bound by the number of calls
            y = F.silu((widen(rows) * widen(self.weight[:, 0].t())).sum(1, keepdim=True))
            return y.to(x.dtype), rows[:, 1:] if output_final_state else None
        y = _convolution(rows, self.weight)[:, past:]
        return y, rows[:, T:].clone() if output_final_state else None

    def _packed(
        self, x: Tensor, tail: Tensor | None, cu_seqlens: Tensor, output_final_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        past, T = self.kernel_size[0] - 1, x.shape[1]
        cuts = cu_seqlens.to(x.device, torch.int64)  # [N + 1]
        sequence = torch.arange(len(cuts) - 1, device=x.device)  # [N]
        lags = torch.arange(past, device=x.device)
        # In the longer row sequence n starts n * past later, and its tokens follow `past` rows of history.
        token_row = torch.arange(T, device=x.device)
        token_row = token_row + past * (1 + sequence.repeat_interleave(cuts.diff(), output_size=T))  # [T]
        rows = x.new_zeros(T + past * len(sequence), x.shape[2]).index_copy(0, token_row, x[0])
        if tail is not None:
            tail_row = (cuts[:-1] + past * sequence)[:, None] + lags  # [N, past]
            rows = rows.index_copy(0, tail_row.flatten(), tail.flatten(0, 1))
        y = _convolution(rows[None], self.weight)[:, token_row]
        last_row = (cuts[1:] + past * sequence)[:, None] + lags
        return y, rows[last_row] if output_final_state else None  # [1, T, D], [N, past, D]


def _last_inputs(x: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None, past: int) -> Tensor:
    """The tail `[N, past, D]` that continues every sequence."""
    B, T, D = x.shape
    if cu_seqlens is None:
        if past <= T:
            return x[:, T - past :].clone()
        return torch.cat([x.new_zeros(B, past, D) if tail is None else tail, x], 1)[:, T:]
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    token = ends - past + torch.arange(past, device=x.device)  # [N, past]
    last = x[0, token.clamp(min=0)]
    if tail is None:
        return last.masked_fill((token < starts)[..., None], 0)  # not times 0: a neighbour may be NaN
    before = (token - starts + past).clamp(max=past - 1)  # its place in the old tail
    return torch.where((token >= starts)[..., None], last, tail.take_along_dim(before[..., None], 1))


def _convolution(x: Tensor, weight: Tensor) -> Tensor:  # [B, T, D], [D, 1, W]
    """The convolution of rows that start from zeros, in float32 at least."""
    if not tracing.in_transform():
        return _CausalConvolution.apply(x, weight)
    padded = F.pad(widen(x).mT, (weight.shape[2] - 1, 0))
    return F.silu(F.conv1d(padded, widen(weight), groups=len(weight)).mT).to(x.dtype)


class _CausalConvolution(torch.autograd.Function):
    """The same, keeping only its inputs for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.silu(_convolve(widen(x), _taps(weight))).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        wide, taps, T = widen(x), _taps(weight), x.shape[1]
        grad = torch.ops.aten.silu_backward(widen(grad), _convolve(wide, taps))
        grad_x = grad * taps[0]
        grad_taps = [(grad * wide).sum((0, 1))]
        for lag in range(1, len(taps)):
            later, earlier = grad[:, lag:], slice(0, max(T - lag, 0))
            grad_x[:, earlier].addcmul_(later, taps[lag])
            grad_taps.append((later * wide[:, earlier]).sum((0, 1)))
        return grad_x.to(x.dtype), torch.stack(grad_taps[::-1], 1)[:, None].to(weight.dtype)


def _convolve(x: Tensor, taps: Tensor) -> Tensor:  # [B, T, D], [W, D]
    y = x * taps[0]
    for lag in range(1, len(taps)):
        y[:, lag:].addcmul_(x[:, : max(x.shape[1] - lag, 0)], taps[lag])
    return y


def _taps(weight: Tensor) -> Tensor:
    return widen(weight[:, 0].flip(1).t()).contiguous()  # [W, D], the newest input first
