"""What the operators accept.  Every refusal names the argument, what it was and what it must be.

Only shapes, dtypes, devices and plain numbers are looked at here, so that `torch.compile` traces through;
the values in `cu_seqlens` are checked by `boundaries` when a backend runs.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Scaling(NamedTuple):
    """The settings of phase 1 that are not tensors."""

    eta: float
    bounds: tuple[float, float] | None
    beta_aware: bool
    eps: float


def tensor(name: str, x: Any, shape: tuple[int, ...], layout: str, device: torch.device) -> None:
    """`x` is a floating tensor of this shape on this device; `layout` is the shape in words."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {layout}, got {type(x).__name__}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be {layout} = {list(shape)}")
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} has dtype {x.dtype}; it must be float32, bfloat16, float16 or float64")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} but k is on {device}; move them to one device")


def keys(k: Any) -> tuple[int, int, int, int]:
    """The sizes (B, T, H, K) of the keys, from which every other shape follows."""
    if not isinstance(k, Tensor):
        raise TypeError(f"k must be a torch.Tensor of shape [B, T, H, K], got {type(k).__name__}")
    if k.ndim != 4:
        raise ValueError(f"k has {k.ndim} dimensions, shape {list(k.shape)}; it must be [B, T, H, K]")
    B, T, H, K = k.shape
    if H < 1 or K < 1:
        raise ValueError(f"k has shape {list(k.shape)}; it needs at least one head and one channel")
    tensor("k", k, (B, T, H, K), "[B, T, H, K]", k.device)
    return B, T, H, K


def value_heads(name: str, x: Any, ndim: int, layout: str, H: int) -> int:
    """HV, the number of value heads, read off the third dimension of `x`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {layout}, got {type(x).__name__}")
    if x.ndim != ndim:
        raise ValueError(f"{name} has {x.ndim} dimensions, shape {list(x.shape)}; it must be {layout}")
    HV = x.shape[2]
    if HV < H or HV % H:
        raise ValueError(f"{name} has {HV} value heads; HV must be a multiple of the {H} heads of k")
    return HV


def same_dtype(**tensors: Tensor) -> None:
    if len({x.dtype for x in tensors.values()}) > 1:
        got = ", ".join(f"{name} is {x.dtype}" for name, x in tensors.items())
        raise ValueError(f"{', '.join(tensors)} must share one dtype; {got}")


def number(name: str, x: Any, least: float = 0.0) -> float:
    if type(x) is float and least <= x < math.inf and x > -math.inf:
        return x
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if not (math.isfinite(x) and x >= least):
        raise ValueError(f"{name} is {x}; it must be finite and at least {least:g}")
    return float(x)


def scaling(eta: Any, bounds: Any, beta_aware: Any, eps: Any) -> Scaling:
    if not isinstance(beta_aware, bool):
        raise TypeError(f"beta_aware must be True or False, got {beta_aware!r}")
    eta, eps = number("eta", eta), number("eps", eps)
    if eps == 0:
        raise ValueError("eps is 0; it must be positive, a key of zeros is divided by it")
    if bounds is not None:
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise ValueError(f"bounds is {bounds!r}; it must be None or a pair (low, high)")
        low, high = (number("bounds", x, -math.inf) for x in bounds)
        if low > high:
            raise ValueError(f"bounds is {bounds!r}; the lower bound must not exceed the upper one")
        bounds = (low, high)
    return Scaling(eta, bounds, beta_aware, eps)


def sequence_count(cu_seqlens: Any, B: int) -> int:
    """N: the batch size, or the number of sequences packed into one row."""
    if cu_seqlens is None:
        return B
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor of integers, got {type(cu_seqlens).__name__}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [N + 1] with N >= 1")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens has dtype {cu_seqlens.dtype}; it must be int32 or int64")
    if B != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, so B must be 1; it is {B}")
    return cu_seqlens.shape[0] - 1


def boundaries(cu_seqlens: Tensor, T: int) -> list[int]:
    """The values of `cu_seqlens`, checked: from 0 to T, never decreasing."""
    cuts: list[int] = cu_seqlens.tolist()
    if cuts[0] != 0:
        raise ValueError(f"cu_seqlens starts at {cuts[0]}; it must start at 0")
    if cuts[-1] != T:
        raise ValueError(f"cu_seqlens ends at {cuts[-1]}; it must end at the number of tokens, {T}")
    for a, b in pairwise(cuts):
        if b < a:
            raise ValueError(f"cu_seqlens decreases from {a} to {b}; sequence lengths cannot be negative")
    return cuts
