"""The short convolution as a PyTorch operator around its compiled kernel: convolution.h.

It reads its inputs as they lie in memory, so that a transposed view costs no copy, sums in float32 (float64
for float64 inputs), and returns `[B, T, D]` with the channels side by side.
"""

import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from osdn.ops import checks, tracing
from osdn.ops.cpu import _host_boundaries, _refuse_double_backward, compiled
from osdn.ops.cpu.binding import Kernel, bind, element, run, wide

SEGMENT = 1024  # tokens, as in convolution.h
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# `struct Convolution` in convolution.h: these pointers, then integers.
POINTERS = (
    *("x", "taps", "bias", "tail", "cu_seqlens", "segments", "out"),
    *("grad_out", "grad_x", "grad_taps", "grad_tail", "state"),
)
INTEGERS = (
    *("x_batch", "x_token", "x_channel", "grad_batch", "grad_token", "grad_channel"),
    *("N", "T", "D", "W", "S", "state_length", "element", "silu", "threads"),
)
LAYOUT = struct.Struct(f"{len(POINTERS) + len(INTEGERS)}q")


def usable(x: Tensor) -> bool:
    """Whether the kernel can take this tensor."""
    return (
        x.device.type == "cpu"
        and x.dtype in DTYPES
        and not tracing.in_transform()
        and compiled(wide(x.dtype))
    )


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """`silu(bias + sum_i weight[:, W - 1 - i] * x[:, t - i])` for every channel.

    Args:
        x: inputs `[B, T, D]` on a CPU, in any layout.
        weight: `[D, W]`.
        bias: `[D]`.
        tail: the inputs before the first, `[N, W - 1, D]`; None is zeros.
        cu_seqlens: `[N + 1]` boundaries of sequences packed into one row.
        silu: whether SiLU follows.

    Returns:
        outputs `[B, T, D]` in x's dtype.
    """
    checks.dense("x", x, "[B, T, D]")
    if x.ndim != 3 or x.dtype not in DTYPES or x.device.type != "cpu":
        raise ValueError(
            f"x is {x.dtype}, {list(x.shape)}, on {x.device}; it must be [B, T, D] on a CPU, in float32, "
            "bfloat16, float16 or float64"
        )
    B, _, D = x.shape
    if weight.ndim != 2 or len(weight) != D or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {list(weight.shape)}; it must be [D, W] with D = {D}, W >= 1")
    W = weight.shape[1]
    N = checks.sequence_count(cu_seqlens, B)
    checks.tensor("weight", weight, (D, W), "[D, W]", x.device, "x")
    if bias is not None:
        checks.tensor("bias", bias, (D,), "[D]", x.device, "x")
    if tail is not None:
        checks.tensor("tail", tail, (N, W - 1, D), "[N, W - 1, D]", x.device, "x")
    dtype = wide(x.dtype)
    taps = weight.flip(1).t().to(dtype).contiguous()  # [W, D], the newest input's first
    bias = None if bias is None else bias.to(dtype)
    tail = None if tail is None else tail.to(dtype)
    arguments = (x, taps, bias, tail, cu_seqlens, silu)
    if tracing.needs_gradient(arguments) or tracing.is_traced(arguments):
        return _convolution(*arguments)
    return _forward(*arguments)


def convolution_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """One more input per sequence: `x` `[B, D, 1]` moves `state` `[B, D, L]` on in place, L >= W.

    Everything has one dtype, and there is no gradient.  Returns the outputs `[B, D, 1]`.
    """
    B, D, L = state.shape
    if x.shape != (B, D, 1) or len(weight) != D or weight.shape[1] > L or not state.is_contiguous():
        raise ValueError(
            f"x {list(x.shape)}, state {list(state.shape)} and weight {list(weight.shape)} do not fit"
        )
    out = x.new_empty(B, D, 1)
    tensors = {"x": x, "taps": weight.contiguous(), "bias": bias, "out": out, "state": state}
    sizes = {"N": B, "T": 1, "D": D, "W": weight.shape[1], "state_length": L}
    _run("step", tensors, x.dtype, {"x_batch": x.stride(0), "x_channel": x.stride(1), "silu": silu, **sizes})
    return out


@cache
def _kernels(dtype: torch.dtype) -> dict[str, Kernel]:
    names = [f"osdn_convolution{suffix}" for suffix in ("", "_back", "_step")]
    kernels = bind(dtype, "osdn_convolution", (*POINTERS, *INTEGERS), LAYOUT.size, names)
    return dict(zip(("forward", "backward", "step"), kernels))


def _run(
    kernel: str, tensors: dict[str, Tensor | None], dtype: torch.dtype, integers: dict[str, int]
) -> None:
    integers |= {"element": element(dtype), "threads": torch.get_num_threads()}
    fields = [*(tensors.get(name) for name in POINTERS), *(integers.get(name) for name in INTEGERS)]
    run(_kernels(wide(dtype))[kernel], LAYOUT, fields)


def _geometry(x: Tensor, taps: Tensor, cuts: Tensor | None, silu: bool) -> tuple[dict[str, int], Tensor]:
    """The integers that forward and backward share, and the segments the work is divided into."""
    B, T, D = x.shape
    lengths = [T] * B if cuts is None else cuts.diff().tolist()
    segments = [(n, t) for n, length in enumerate(lengths) for t in range(0, length, SEGMENT)]
    integers = dict(zip(("x_batch", "x_token", "x_channel"), x.stride()))
    integers |= {"N": len(lengths), "T": T, "D": D, "W": len(taps), "S": len(segments), "silu": silu}
    return integers, torch.tensor(segments, dtype=torch.int64, device="cpu").view(-1, 2)


def _forward(
    x: Tensor, taps: Tensor, bias: Tensor | None, tail: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> Tensor:
    x, cuts = x.resolve_neg(), _host_boundaries(cu_seqlens, x.shape[1])
    integers, segments = _geometry(x, taps, cuts, silu)
    out = x.new_empty(x.shape)
    tensors = {"x": x, "out": out, **_constants(taps, bias, tail, cuts, segments)}
    _run("forward", tensors, x.dtype, integers)
    return out


def _constants(
    taps: Tensor, bias: Tensor | None, tail: Tensor | None, cuts: Tensor | None, segments: Tensor
) -> dict[str, Tensor | None]:
    tensors = {"taps": taps, "bias": bias, "tail": tail}
    contiguous = {name: None if x is None else x.resolve_neg().contiguous() for name, x in tensors.items()}
    return contiguous | {"cu_seqlens": cuts, "segments": segments}


_convolution = torch.library.custom_op(
    "osdn::cpu_short_convolution", _forward, mutates_args=(), device_types="cpu"
)


@_convolution.register_fake
def _(x, taps, bias, tail, cu_seqlens, silu):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@torch.library.custom_op("osdn::cpu_short_convolution_backward", mutates_args=(), device_types="cpu")
def _convolution_backward(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    cu_seqlens: Tensor | None,
    grad_out: Tensor,
    silu: bool,
) -> list[Tensor]:
    """Gradients of the inputs, the taps, the bias and the tail."""
    x, grad_out, cuts = x.resolve_neg(), grad_out.resolve_neg(), _host_boundaries(cu_seqlens, x.shape[1])
    integers, segments = _geometry(x, taps, cuts, silu)
    integers |= dict(zip(("grad_batch", "grad_token", "grad_channel"), grad_out.stride()))
    grad_x = x.new_empty(x.shape)
    sums = taps.new_empty(len(segments), len(taps) + 1, taps.shape[1])  # the bias comes last
    grad_tail = taps.new_zeros(0 if tail is None else tail.shape)  # of an empty sequence it is zero
    tensors = {
        **_constants(taps, bias, tail, cuts, segments),
        "x": x,
        "grad_out": grad_out,
        "grad_x": grad_x,
        "grad_taps": sums,
        "grad_tail": None if tail is None else grad_tail,
    }
    _run("backward", tensors, x.dtype, integers)
    grad_bias = sums[:, -1].sum(0) if bias is not None else taps.new_empty(0)
    return [grad_x, sums[:, :-1].sum(0), grad_bias, grad_tail]


@_convolution_backward.register_fake
def _(x, taps, bias, tail, cu_seqlens, grad_out, silu):  # type: ignore[no-untyped-def]
    optional = [taps.new_empty(0 if y is None else y.shape) for y in (bias, tail)]
    return [x.new_empty(x.shape), taps.new_empty(taps.shape), *optional]


_convolution_backward.register_autograd(_refuse_double_backward)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tracing.reject_batched_gradients("cpu", [grad])
    saved = ctx.saved_tensors
    input_grads = _convolution_backward(*saved, grad, ctx.silu)
    return *(g if x is not None else None for g, x in zip(input_grads, saved)), None, None


_convolution.register_autograd(_backward, setup_context=_save_for_backward)
