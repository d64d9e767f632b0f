"""One token of a mixer between its projections, as a PyTorch operator around its kernel: decode_step.h.

A decoding step is dozens of small PyTorch calls per layer, each of which takes longer to make than to
compute.  Here they are one.  It has no gradient.
"""

import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from osdn.ops import checks, tracing
from osdn.ops.cpu import compiled
from osdn.ops.cpu.binding import Kernel, bind, call, element, readable, wide

# `struct Step` in decode_step.h: these pointers, then integers, then numbers.
INPUTS = (
    *("q", "k", "v", "q_taps", "k_taps", "v_taps", "q_tail", "k_tail", "v_tail"),
    *("beta", "norm", "state", "scale", "decay", "retention", "A_log", "dt_bias", "gate"),
)
OUTPUTS = ("out", "next_q_tail", "next_k_tail", "next_v_tail", "final_state", "final_scale")
INTEGERS = (
    *("N", "H", "HV", "K", "V", "W", "decay_kind", "retention_kind", "gate_kind"),
    *("rule", "block", "beta_aware", "element", "decay_element", "norm_element", "threads"),
)
NUMBERS = (
    *("eta", "low", "high", "eps", "prior", "constant_retention"),
    *("write_scale", "norm_eps", "output_scale"),
)
LAYOUT = struct.Struct(f"{len(INPUTS) + len(OUTPUTS) + len(INTEGERS)}q{len(NUMBERS)}d")
GATES = {None: 0, "silu": 1, "sigmoid": 2}


class StepInputs(NamedTuple):
    """The tensors of a step of N sequences.

    They have one dtype, except that parameters (`norm`; `A_log` and `dt_bias`) may be in float32 or 16 bits
    if it is not float64.  `decay` and `retention` have one number per head or per key channel.
    """

    q: Tensor  # [N, H * K], the projections, before their convolutions
    k: Tensor  # [N, H * K]
    v: Tensor  # [N, HV * V]
    q_taps: Tensor  # [H * K, W], the newest input's last
    k_taps: Tensor
    v_taps: Tensor
    q_tail: Tensor  # [N, W - 1, H * K], the convolutions' last inputs
    k_tail: Tensor
    v_tail: Tensor
    beta: Tensor  # [N, HV], before its sigmoid
    norm: Tensor  # [V], the weight of the output norm
    state: Tensor  # [N, HV, K, V], float32 at least
    scale: Tensor | None = None  # [N, HV, K] or [N, HV, K / b, b, b], as state; None is the plain delta rule
    decay: Tensor | None = None  # [N, HV] or [N, HV * K], before softplus
    retention: Tensor | None = None  # [N, HV] or [N, HV * K], before its sigmoid
    A_log: Tensor | None = None  # [HV]
    dt_bias: Tensor | None = None  # [HV] or [HV * K]
    gate: Tensor | None = None  # [N, HV * V], the output gate before its activation


class StepSettings(NamedTuple):
    """The numbers of a step."""

    activation: str | None = None  # of the output gate: "silu" or "sigmoid"
    tied: bool = False  # whether the scale is retained as the state is
    eta: float = 0.003
    bounds: tuple[float, float] | None = (0.5, 2.0)
    beta_aware: bool = True
    block_size: int | None = None  # b of Newton's rule, whose covariance is the scale; None is online scaling
    prior: float = 1.0
    retention: float = 1.0  # a constant one
    write_scale: float = 1.0
    norm_eps: float = 1e-6

    def numbers(self, K: int) -> list[float]:
        """As the operator takes them: gate, tied, beta-aware, block (0: none), then those of the kernel."""
        low, high = self.bounds or (-math.inf, math.inf)
        flags = [float(x) for x in (GATES[self.activation], self.tied, self.beta_aware, self.block_size or 0)]
        rule = [self.eta, low, high, 1e-6, self.prior, self.retention]
        return [*flags, *rule, self.write_scale, self.norm_eps, K**-0.5]


class StepOutputs(NamedTuple):
    """The outputs of a step, and the states that the next one starts from."""

    out: Tensor  # [N, HV * V], normalised and gated
    q_tail: Tensor
    k_tail: Tensor
    v_tail: Tensor
    state: Tensor
    scale: Tensor  # empty without one


def usable(x: Tensor) -> bool:
    """Whether the kernel can serve inputs like `x`: on a CPU, and nobody asks for a gradient."""
    return (
        x.device.type == "cpu"
        and x.dtype in checks.FLOATS
        and not torch.is_grad_enabled()
        and not tracing.in_transform()
        and compiled(wide(x.dtype))
    )


def decode_step(inputs: StepInputs, settings: StepSettings, overwrite: bool = False) -> StepOutputs:
    """One token of N sequences, from the projections of the mixer's input to that of its output.

    With `overwrite`, the tails, the state and the scale may be updated in place.
    """
    check(inputs, settings)
    numbers = settings.numbers(inputs.state.shape[2])
    if tracing.is_traced(inputs):
        return StepOutputs(*_operator(*inputs, numbers))
    outputs = _outputs(inputs, overwrite)
    _run(inputs, numbers, outputs)
    return StepOutputs(*outputs)


def check(x: StepInputs, settings: StepSettings) -> None:
    """Sizes and dtypes: the kernel trusts them."""
    if x.state.ndim != 4 or x.q.ndim != 2 or x.q_taps.ndim != 2:
        raise ValueError(
            f"q {list(x.q.shape)}, q_taps {list(x.q_taps.shape)} and state {list(x.state.shape)} must be "
            "[N, H * K], [H * K, W] and [N, HV, K, V]"
        )
    HV = x.state.shape[1]
    per_channel = [y is not None and y.shape[-1] != HV for y in (x.decay, x.retention)]
    b = settings.block_size
    if b is not None and (x.scale is None or b < 1 or x.state.shape[2] % b):
        raise ValueError(
            f"block_size is {b}; it needs a scale, and must divide the {x.state.shape[2]} channels of a key"
        )
    if b is not None and per_channel[1]:
        raise ValueError("retention has a number per channel; with a block_size it must have one per head")
    expected = _shapes(x.q.shape[1], x.q_taps.shape[1], *x.state.shape, *per_channel, block=b)
    dtype = x.q.dtype
    states, steps = wide(dtype), dtype if x.A_log is None else x.A_log.dtype
    dtypes = (*[dtype] * 10, x.norm.dtype, states, states, dtype, dtype, steps, steps, dtype)
    for name, y, shape, expected_dtype in zip(INPUTS, x, expected, dtypes):
        if y is not None and (y.shape != shape or y.dtype != expected_dtype or y.device.type != "cpu"):
            checks.tensor(name, y, shape, "as q, q_taps and state have it", torch.device("cpu"), "the kernel")
            raise ValueError(f"{name} has dtype {y.dtype}; with q in {dtype} it must be {expected_dtype}")
    if dtype not in checks.FLOATS:
        raise ValueError(f"q is {dtype}; it must be float32, bfloat16, float16 or float64")
    for name, parameter in (("norm", x.norm), ("A_log", x.A_log)):
        if parameter is not None and not readable(parameter.dtype, dtype):
            raise ValueError(
                f"{name} is {parameter.dtype}; with q in {dtype} it must be {states}"
                + (", bfloat16 or float16" if states == torch.float32 else "")
            )
    if settings.activation not in GATES or (x.gate is None) != (settings.activation is None):
        raise ValueError(f'activation is {settings.activation!r}; a gate needs "silu" or "sigmoid"')
    if (x.decay is None) != (x.A_log is None) or (x.decay is None) != (x.dt_bias is None):
        raise ValueError("decay, A_log and dt_bias come together or not at all")
    if settings.tied and x.decay is None:
        raise ValueError("tied is True, but there is no decay to be tied to")


def _shapes(
    keys: int,
    W: int,
    N: int,
    HV: int,
    K: int,
    V: int,
    channel_decay: bool,
    channel_retention: bool,
    *,
    block: int | None,
) -> tuple[tuple[int, ...], ...]:
    """Of the fields of `StepInputs`."""
    H = keys // max(K, 1)
    if min(H, W, V) < 1 or HV < 1 or HV % H or keys != H * K:
        raise ValueError(f"q [{N}, {keys}] and state {[N, HV, K, V]} do not fit")
    values, decays, retentions = (
        HV * V,
        HV * (K if channel_decay else 1),
        HV * (K if channel_retention else 1),
    )
    widths = (keys, keys, values)
    return (
        *((N, width) for width in widths),
        *((width, W) for width in widths),
        *((N, W - 1, width) for width in widths),
        *((N, HV), (V,), (N, HV, K, V), (N, HV, *((K,) if block is None else (K // block, block, block)))),
        *((N, decays), (N, retentions), (HV,), (decays,), (N, values)),
    )


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    fields = (*INPUTS, *OUTPUTS, *INTEGERS, *NUMBERS)
    return bind(dtype, "osdn_step", fields, LAYOUT.size, ("osdn_step",))[0]


def _run(x: StepInputs, numbers: list[float], outputs: Sequence[Tensor]) -> None:
    x = StepInputs(*(None if y is None else y.resolve_neg().contiguous() for y in x))  # type: ignore[arg-type]
    call(_kernel(wide(x.q.dtype)), packed(x, numbers, outputs))


def packed(x: StepInputs, numbers: list[float], outputs: Sequence[Tensor]) -> bytes:
    """A step of contiguous tensors as the kernel takes it."""
    N, HV, K, V = x.state.shape
    activation, tied, beta_aware, block, *reals = numbers
    rule = 0 if x.scale is None else 2 if block else 1  # as in heads.h
    kinds = (_kind(x.decay, HV), 3 if tied else _kind(x.retention, HV), int(activation))
    elements = [0 if y is None else element(y.dtype) for y in (x.q, x.A_log, x.norm)]
    sizes = (N, x.q.shape[1] // K, HV, K, V, x.q_taps.shape[1])
    options = (*kinds, rule, max(1, int(block)), int(beta_aware), *elements, torch.get_num_threads(), *reals)
    pointers = (0 if y is None else y.data_ptr() for y in (*x, *outputs))
    return LAYOUT.pack(*pointers, *sizes, *options)


def _kind(x: Tensor | None, HV: int) -> int:
    """None, one per head, one per channel."""
    return 0 if x is None else 1 if x.shape[1] == HV else 2


def _outputs(x: StepInputs, overwrite: bool = False) -> list[Tensor]:
    """The fields of `StepOutputs`, to be filled; with `overwrite`, the inputs themselves where possible."""
    carried = (x.q_tail, x.k_tail, x.v_tail, x.state, x.state.new_empty(0) if x.scale is None else x.scale)
    reused = [overwrite and y.is_contiguous() and not y.is_neg() for y in carried]
    return [
        x.v.new_empty(x.v.shape),
        *(y if own else y.new_empty(y.shape) for y, own in zip(carried, reused)),
    ]


@torch.library.custom_op("osdn::cpu_decode_step", mutates_args=(), device_types="cpu")
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_taps: Tensor,
    k_taps: Tensor,
    v_taps: Tensor,
    q_tail: Tensor,
    k_tail: Tensor,
    v_tail: Tensor,
    beta: Tensor,
    norm: Tensor,
    state: Tensor,
    scale: Tensor | None,
    decay: Tensor | None,
    retention: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate: Tensor | None,
    numbers: list[float],
) -> list[Tensor]:
    tensors = (q, k, v, q_taps, k_taps, v_taps, q_tail, k_tail, v_tail, beta, norm, state, scale)
    inputs = StepInputs(*tensors, decay, retention, A_log, dt_bias, gate)
    outputs = _outputs(inputs)
    _run(inputs, numbers, outputs)
    return outputs


@_operator.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    *tensors, _ = arguments
    return _outputs(StepInputs(*tensors))
