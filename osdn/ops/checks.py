"""What the operators accept.  Every error names the argument, what it was and what it must be.

Only shapes, dtypes, devices and plain numbers are checked here, so that `torch.compile` can trace it;
the values in `cu_seqlens` are checked by `boundaries` when a backend runs.
"""

from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


class Scaling(NamedTuple):
    """Phase 1 by online gradient descent on a scale per channel."""

    eta: float
    bounds: tuple[float, float] | None
    beta_aware: bool
    eps: float


class Newton(NamedTuple):
    """Phase 1 by recursive least squares on blocks of the keys' covariance."""

    prior: float
    block_size: int


class Squash(NamedTuple):
    """Phase 1 of Preconditioned Gated DeltaNet: a squashed inverse of the squared keys' decayed sum."""

    bound: float
    eps: float


Rule = Scaling | Newton | Squash


class Phase1(NamedTuple):
    """A rule that turns keys into write keys, and the state it carries from token to token."""

    rule: Rule
    gate: Tensor  # [B, T, HV]: beta, or the gain of `Squash`
    retention: float | Tensor  # a number, [B, T, HV] or [B, T, HV, K]; of `Newton`, [B, T, HV, K / b]
    initial: Tensor | None  # [N, HV, K]; of `Newton`, [N, HV, K / b, b, b] and symmetric
    center: Tensor | None  # [HV], of `Squash` alone


class Phase2(NamedTuple):
    """The delta rule's inputs; queries, keys and values share a dtype, and H divides HV."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    beta: Tensor  # [B, T, HV]
    log_decay: Tensor | None  # [B, T, HV] or [B, T, HV, K]
    initial_state: Tensor | None  # [N, HV, K, V]
    scale: float  # of the output
    cu_seqlens: Tensor | None  # [N + 1]


def state_shape(rule: Rule, K: int) -> tuple[int, ...]:
    """Of one sequence and head."""
    return (K // rule.block_size, rule.block_size, rule.block_size) if isinstance(rule, Newton) else (K,)


def first_state(rule: Rule, like: Tensor, N: int, HV: int, K: int) -> Tensor:
    """What a sequence starts from unless told otherwise, in the dtype of `like`."""
    shape = (N, HV, *state_shape(rule, K))
    if isinstance(rule, Newton):
        prior = torch.eye(rule.block_size, dtype=like.dtype, device=like.device) * rule.prior
        return prior.expand(shape)
    return like.new_full(shape, 1.0 if isinstance(rule, Scaling) else 0.0)


def dense(name: str, x: Any, layout: str) -> None:
    """`x` is a tensor with one stride per dimension; `layout` is the shape it should have, in words."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {layout}, got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        raise ValueError(f"{name} is a sparse or nested tensor; it must be a dense one of shape {layout}")


def tensor(
    name: str, x: Any, shape: tuple[int, ...], layout: str, device: torch.device, other: str = "k"
) -> None:
    """`x` is a floating tensor of this shape on this device, where `other` is."""
    dense(name, x, layout)
    if x.shape != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be {layout} = {list(shape)}")
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} has dtype {x.dtype}; it must be float32, bfloat16, float16 or float64")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} but {other} is on {device}; move them to one device")


def keys(k: Any) -> tuple[int, int, int, int]:
    """The sizes (B, T, H, K) of the keys, from which every other shape follows."""
    dense("k", k, "[B, T, H, K]")
    if k.ndim != 4:
        raise ValueError(f"k has {k.ndim} dimensions, shape {list(k.shape)}; it must be [B, T, H, K]")
    B, T, H, K = k.shape
    if H < 1 or K < 1:
        raise ValueError(f"k has shape {list(k.shape)}; it needs at least one head and one channel")
    tensor("k", k, (B, T, H, K), "[B, T, H, K]", k.device)
    return B, T, H, K


def value_heads(name: str, x: Any, ndim: int, layout: str, H: int) -> int:
    """HV, the number of value heads, read off the third dimension of `x`."""
    dense(name, x, layout)
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


def number(name: str, x: Any, least: float = -LARGEST) -> float:
    """`x` as a float that float32 can hold, whatever dtype will meet it."""
    if type(x) is float and least <= x <= LARGEST:
        return x
    if isinstance(x, bool) or not isinstance(x, (int, float, Real)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if not least <= x <= LARGEST:  # type: ignore[operator]
        raise ValueError(f"{name} is {x}; it must be between {least:g} and {LARGEST:g}")
    return float(x)


def size(name: str, x: Any) -> None:
    if isinstance(x, bool) or not isinstance(x, int) or x < 1:
        raise ValueError(f"{name} is {x!r}; it must be a positive whole number")


def flag(name: str, x: Any) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False, got {x!r}")


def scaling(eta: Any, bounds: Any, beta_aware: Any, eps: Any) -> Scaling:
    flag("beta_aware", beta_aware)
    eta = number("eta", eta, 0)
    eps = number("eps", eps, SMALLEST)  # a key of zeros is divided by it
    if bounds is not None:
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise ValueError(f"bounds is {bounds!r}; it must be None or a pair (low, high)")
        low, high = (number("bounds", x) for x in bounds)
        if low > high:
            raise ValueError(f"bounds is {bounds!r}; the lower bound must not exceed the upper one")
        bounds = (low, high)
    return Scaling(eta, bounds, beta_aware, eps)


def newton(prior: Any, block_size: Any, K: int) -> Newton:
    size("block_size", block_size)
    if K % block_size:
        raise ValueError(f"block_size is {block_size}; it must divide the {K} channels of k")
    return Newton(number("prior", prior, SMALLEST), block_size)


def squash(bound: Any, eps: Any) -> Squash:
    return Squash(number("squash", bound, 1), number("eps", eps, SMALLEST))


def sequence_count(cu_seqlens: Any, B: int) -> int:
    """N: the batch size, or the number of sequences packed into one row."""
    if cu_seqlens is None:
        return B
    dense("cu_seqlens", cu_seqlens, "[N + 1]")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [N + 1] with N >= 1")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens has dtype {cu_seqlens.dtype}; it must be int32 or int64")
    if B != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, so B must be 1; it is {B}")
    return cu_seqlens.shape[0] - 1


_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def boundaries(cu_seqlens: Tensor, T: int) -> tuple[int, ...]:
    """The values of `cu_seqlens`, checked: from 0 to T, never decreasing."""
    if cu_seqlens.is_meta:
        raise ValueError("cu_seqlens is on the meta device; it must be where its values can be read")
    # Reading waits for a GPU, and every layer of a model passes the same tensor.  A tensor made in inference
    # mode has no version counter, so its values cannot be cached.
    cached = _reading_waits(cu_seqlens) and not cu_seqlens.is_inference()
    version, cuts = _read.get(cu_seqlens, (None, [])) if cached else (None, [])
    if version is None or version != cu_seqlens._version:
        cuts = cu_seqlens.tolist()
        if cached:
            _read[cu_seqlens] = (cu_seqlens._version, cuts)
    if cuts[0] != 0:
        raise ValueError(f"cu_seqlens starts at {cuts[0]}; it must start at 0")
    if cuts[-1] != T:
        raise ValueError(f"cu_seqlens ends at {cuts[-1]}; it must end at the number of tokens, {T}")
    for a, b in pairwise(cuts):
        if b < a:
            raise ValueError(f"cu_seqlens decreases from {a} to {b}; sequence lengths cannot be negative")
    return tuple(cuts)


def _reading_waits(x: Tensor) -> bool:
    return x.device.type != "cpu"
