"""Arithmetic that half precision cannot carry: decays, gates near one and sums of squares."""

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is wider."""
    return x if x.dtype == torch.float64 else x.float()


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x ** 2) + eps)` over the last dimension."""
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
