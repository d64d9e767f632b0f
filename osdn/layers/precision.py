"""Arithmetic that half precision cannot carry: decays, gates near one, and sums of squares in norms."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
