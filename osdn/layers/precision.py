"""Arithmetic that half precision cannot carry: decays, gates near one, and sums of squares in norms."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdn.ops.cpu.convolution import usable
from osdn.ops.cpu.gated_norm import gated_rms_norm

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is wider."""
    return x if x.dtype == torch.float64 else x.float()


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x ** 2) + eps)` over the last dimension."""
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """PyTorch's, for weights in float32 and inputs in half precision too, as they meet under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        # In training a forward that is recomputed with gradients must give the same.
        if self.eps is not None and not self.training and not torch.is_grad_enabled() and usable(x):
            return gated_rms_norm(x, self.weight, eps=self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GatedRMSNorm(RMSNorm):
    """`norm(x) * activation(gate)`; in one pass where the compiled kernel can take it.

    >>> GatedRMSNorm(8, 1e-6, "silu")(torch.randn(2, 8), torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, size: int, eps: float, activation: str | None) -> None:
        super().__init__(size, eps)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if usable(x) and (gate is None or gate.dtype == x.dtype):
            assert self.eps is not None  # the constructor wants one
            return gated_rms_norm(x, self.weight, gate, activation=self.activation, eps=self.eps)
        y = super().forward(x)
        return y if self.activation is None or gate is None else y * GATES[self.activation](gate)
