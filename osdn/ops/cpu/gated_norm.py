"""The RMS norm of a layer's outputs with the gate on it, as a PyTorch operator around gated_norm.h.

In PyTorch these are a cast, a square, a mean, four products, an activation and a cast back, each a pass over
memory; here they are one, and the result is rounded once.
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

ROWS_PER_ITEM = 128  # as in gated_norm.h
ACTIVATIONS = {None: 0, "silu": 1, "sigmoid": 2}  # as in gated_norm.h

# `struct GatedNorm` in gated_norm.h
FIELDS = (
    *("x", "gate", "weight", "grad_out", "out", "grad_x", "grad_gate", "grad_weight"),
    *("x_row", "gate_row", "grad_row", "rows", "D", "element", "activation", "threads", "eps"),
)
LAYOUT = struct.Struct(f"{len(FIELDS) - 1}qd")


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None = None,
    *,
    activation: str | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight * activation(gate)` over the last dimension.

    Args:
        x: `[..., D]` on a CPU.
        weight: `[D]`, in any precision.
        gate: `[..., D]` in x's dtype, or None.
        activation: "silu" or "sigmoid" with a gate, None without.
        eps: added to the mean of the squares.

    Returns:
        `[..., D]` in x's dtype.
    """
    if x.dtype not in DTYPES or x.device.type != "cpu" or not x.ndim:
        raise ValueError(
            f"x is {x.dtype}, {list(x.shape)}, on {x.device}; it must be [..., D] on a CPU, in float32, "
            "bfloat16, float16 or float64"
        )
    if activation not in ACTIVATIONS or (activation is None) != (gate is None):
        raise ValueError(
            f"activation is {activation!r}; it must be 'silu' or 'sigmoid' with a gate, and None without"
        )
    checks.tensor("weight", weight, (x.shape[-1],), "[D]", x.device, "x")
    if gate is not None and (gate.shape, gate.dtype, gate.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"gate is {gate.dtype}, {list(gate.shape)}, on {gate.device}; it must be like x, {x.dtype}, "
            f"{list(x.shape)}, on {x.device}"
        )
    weight = weight.to(wide(x.dtype)).view(-1)  # a parameter is no plain tensor, a view of one is
    arguments = (x, weight, gate, ACTIVATIONS[activation], float(eps))
    if tracing.needs_gradient(arguments) or tracing.is_traced(arguments):
        return _norm(*arguments)
    return _forward(*arguments)


@cache
def _kernels(dtype: torch.dtype) -> list[Kernel]:
    names = ("osdn_gated_norm", "osdn_gated_norm_back")
    return bind(dtype, "osdn_gated_norm", FIELDS, LAYOUT.size, names)


def _rows(x: Tensor) -> Tensor:
    """`[rows, D]` whose elements lie side by side."""
    x = x.resolve_neg().reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _run(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    grad: Tensor | None,
    results: tuple[Tensor | None, ...],  # out, or the gradients
    activation: int,
    eps: float,
) -> None:
    rows, D = _rows(x), x.shape[-1]
    gates = None if gate is None else _rows(gate)
    grads = None if grad is None else _rows(grad)
    strides = (0 if y is None else y.stride(0) for y in (rows, gates, grads))
    sizes = (len(rows), D, element(x.dtype), activation, torch.get_num_threads(), eps)
    inputs = (rows, gates, weight.resolve_neg().contiguous(), grads)
    run(_kernels(wide(x.dtype))[grad is not None], LAYOUT, (*inputs, *results, *strides, *sizes))


def _forward(x: Tensor, weight: Tensor, gate: Tensor | None, activation: int, eps: float) -> Tensor:
    out = x.new_empty(x.shape)
    if out.numel():
        _run(x, weight, gate, None, (out, None, None, None), activation, eps)
    return out


_norm = torch.library.custom_op("osdn::cpu_gated_norm", _forward, mutates_args=(), device_types="cpu")


@_norm.register_fake
def _(x, weight, gate, activation, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@torch.library.custom_op("osdn::cpu_gated_norm_backward", mutates_args=(), device_types="cpu")
def _norm_backward(
    x: Tensor, weight: Tensor, gate: Tensor | None, grad: Tensor, activation: int, eps: float
) -> list[Tensor]:
    """Gradients of x, the weight and the gate."""
    grad_x, grad_gate = x.new_empty(x.shape), x.new_empty(0 if gate is None else gate.shape)
    items = -(-x.numel() // x.shape[-1] // ROWS_PER_ITEM) if x.numel() else 0
    sums = weight.new_empty(items, *weight.shape)
    if items:
        _run(x, weight, gate, grad, (None, grad_x, grad_gate, sums), activation, eps)
    return [grad_x, sums.sum(0), grad_gate]


@_norm_backward.register_fake
def _(x, weight, gate, grad, activation, eps):  # type: ignore[no-untyped-def]
    return [y.new_empty(y.shape) for y in (x, weight)] + [x.new_empty(0 if gate is None else gate.shape)]


_norm_backward.register_autograd(_refuse_double_backward)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tracing.reject_batched_gradients("cpu", [grad])
    x, weight, gate = ctx.saved_tensors
    grad_x, grad_weight, grad_gate = _norm_backward(x, weight, gate, grad, ctx.activation, ctx.eps)
    return grad_x, grad_weight, None if gate is None else grad_gate, None, None


_norm.register_autograd(_backward, setup_context=_save_for_backward)
