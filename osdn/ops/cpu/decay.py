"""The logarithm of a state's decay as a PyTorch operator around decay.h.

With a decay for every key channel this is as large as the keys.  In PyTorch it is a cast, a sum, an
exponential, a logarithm, a choice and two products, each a pass over memory; here it is one.
"""

import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from osdn.ops import checks, tracing
from osdn.ops.cpu import _refuse_double_backward
from osdn.ops.cpu.binding import Kernel, bind, element, run, wide
from osdn.ops.cpu.convolution import DTYPES

DECAYS_PER_ITEM = 64  # rows, as in decay.h

# `struct Decay` in decay.h
FIELDS = (
    *("x", "rate", "bias", "grad_out", "out", "grad_x", "sums"),
    *("x_row", "rows", "C", "element", "bounded", "threads", "bound"),
)
LAYOUT = struct.Struct(f"{len(FIELDS) - 1}qd")


def log_decay(x: Tensor, rate: Tensor, bias: Tensor | None = None, bound: float | None = None) -> Tensor:
    """`-rate * softplus(x + bias)`, or `bound * sigmoid(rate * (x + bias))` with a bound.

    Args:
        x: `[..., C]` on a CPU.
        rate: `[C]`, in any precision.
        bias: `[C]`, in any precision.
        bound: the strongest decay's logarithm.

    Returns:
        `[..., C]` in float32 (float64 for float64).
    """
    if x.dtype not in DTYPES or x.device.type != "cpu" or not x.ndim:
        raise ValueError(
            f"x is {x.dtype}, {list(x.shape)}, on {x.device}; it must be [..., C] on a CPU, in float32, "
            "bfloat16, float16 or float64"
        )
    dtype = wide(x.dtype)
    for name, y in (("rate", rate), ("bias", bias)):
        if y is not None:
            checks.tensor(name, y, (x.shape[-1],), "[C]", x.device, "x")
    rate = rate.to(dtype).view(-1)  # a parameter is no plain tensor, a view of one is
    bias = None if bias is None else bias.to(dtype).view(-1)
    arguments = (x, rate, bias, 0.0 if bound is None else float(bound), bound is not None)
    if tracing.needs_gradient(arguments) or tracing.is_traced(arguments):
        return _decay(*arguments)
    return _forward(*arguments)


@cache
def _kernels(dtype: torch.dtype) -> list[Kernel]:
    return bind(dtype, "osdn_decay", FIELDS, LAYOUT.size, ("osdn_decay", "osdn_decay_back"))


def _run(
    x: Tensor,
    rate: Tensor,
    bias: Tensor | None,
    grad: Tensor | None,
    results: tuple[Tensor | None, ...],  # out, or the gradients
    bound: float,
    bounded: bool,
) -> None:
    if not x.numel():
        return
    rows = x.resolve_neg().reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    contiguous = [None if y is None else y.resolve_neg().contiguous() for y in (rate, bias, grad)]
    sizes = (rows.stride(0), *rows.shape, element(x.dtype), bounded, torch.get_num_threads(), bound)
    run(_kernels(wide(x.dtype))[grad is not None], LAYOUT, (rows, *contiguous, *results, *sizes))


def _forward(x: Tensor, rate: Tensor, bias: Tensor | None, bound: float, bounded: bool) -> Tensor:
    out = x.new_empty(x.shape, dtype=wide(x.dtype))
    _run(x, rate, bias, None, (out, None, None), bound, bounded)
    return out


_decay = torch.library.custom_op("osdn::cpu_decay", _forward, mutates_args=(), device_types="cpu")


@_decay.register_fake
def _(x, rate, bias, bound, bounded):  # type: ignore[no-untyped-def]
    return torch.empty(x.shape, dtype=wide(x.dtype), device=x.device)


@torch.library.custom_op("osdn::cpu_decay_backward", mutates_args=(), device_types="cpu")
def _decay_backward(
    x: Tensor, rate: Tensor, bias: Tensor | None, grad: Tensor, bound: float, bounded: bool
) -> list[Tensor]:
    """Gradients of x, the rate and the bias."""
    C = x.shape[-1]
    items = -(-x.numel() // C // DECAYS_PER_ITEM) if x.numel() else 0
    grad_x, sums = x.new_empty(x.shape), rate.new_empty(items, 2, C)
    _run(x, rate, bias, grad, (None, grad_x, sums), bound, bounded)
    total = sums.sum(0)
    return [grad_x, total[0].clone(), total[1].clone()]


@_decay_backward.register_fake
def _(x, rate, bias, grad, bound, bounded):  # type: ignore[no-untyped-def]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device), *(rate.new_empty(rate.shape) for _ in "ab")]


_decay_backward.register_autograd(_refuse_double_backward)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.bound, ctx.bounded = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tracing.reject_batched_gradients("cpu", [grad])
    saved = ctx.saved_tensors
    input_grads = _decay_backward(*saved, grad, ctx.bound, ctx.bounded)
    return *(g if x is not None else None for g, x in zip(input_grads, saved)), None, None


_decay.register_autograd(_backward, setup_context=_save_for_backward)
