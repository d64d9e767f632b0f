"""Queries, keys and values as the recurrence wants them, as a PyTorch operator around normalize.h.

Layers hand over views of one tensor, often in 16 bits.  The recurrence wants rows side by side in float32,
those of queries and keys at unit length.  In PyTorch that is a copy, a cast, a square, a sum and a product;
here it is one pass.
"""

import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from osdn.ops import tracing
from osdn.ops.cpu import _refuse_double_backward
from osdn.ops.cpu.binding import Kernel, bind, element, run, wide

# `struct Rows` in normalize.h
FIELDS = (
    *("x", "grad_out", "out", "grad_x", "x_batch", "x_token", "x_head"),
    *("B", "T", "H", "K", "element", "unit", "threads", "eps"),
)
LAYOUT = struct.Struct(f"{len(FIELDS) - 1}qd")


@cache
def _kernels(dtype: torch.dtype) -> list[Kernel]:
    return bind(dtype, "osdn_rows", FIELDS, LAYOUT.size, ("osdn_rows", "osdn_rows_back"))


def widened(x: Tensor, unit: bool, eps: float = 1e-6) -> Tensor:
    """`x` `[B, T, H, K]` in float32 (float64 stays), and with `unit` as `x / sqrt(sum(x ** 2) + eps)`."""
    if not unit and x.dtype in (torch.float32, torch.float64):
        return x
    if tracing.needs_gradient([x]) or tracing.is_traced([x]):
        return _normalize(x, unit, eps)
    return _forward(x, unit, eps)


def _run(back: bool, x: Tensor, grad: Tensor | None, out: Tensor, unit: bool, eps: float) -> None:
    results = (None, out) if back else (out, None)
    threads = torch.get_num_threads()
    fields = (x, grad, *results, *x.stride()[:3], *x.shape, element(x.dtype), unit, threads, eps)
    run(_kernels(wide(x.dtype))[back], LAYOUT, fields)


def _rows(x: Tensor) -> Tensor:
    x = x.resolve_neg()
    return x if x.stride(3) == 1 else x.contiguous()


def _forward(x: Tensor, unit: bool, eps: float) -> Tensor:
    out = x.new_empty(x.shape, dtype=wide(x.dtype))
    _run(False, _rows(x), None, out, unit, eps)
    return out


_normalize = torch.library.custom_op("osdn::cpu_normalize", _forward, mutates_args=(), device_types="cpu")


@_normalize.register_fake
def _(x, unit, eps):  # type: ignore[no-untyped-def]
    return torch.empty(x.shape, dtype=wide(x.dtype), device=x.device)


@torch.library.custom_op("osdn::cpu_normalize_backward", mutates_args=(), device_types="cpu")
def _normalize_backward(x: Tensor, grad: Tensor, unit: bool, eps: float) -> Tensor:
    out = x.new_empty(x.shape)
    _run(True, _rows(x), grad.resolve_neg().contiguous(), out, unit, eps)
    return out


@_normalize_backward.register_fake
def _(x, grad, unit, eps):  # type: ignore[no-untyped-def]
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_normalize_backward.register_autograd(_refuse_double_backward)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.unit, ctx.eps = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    tracing.reject_batched_gradients("cpu", [grad])
    return _normalize_backward(*ctx.saved_tensors, grad, ctx.unit, ctx.eps), None, None


_normalize.register_autograd(_backward, setup_context=_save_for_backward)
