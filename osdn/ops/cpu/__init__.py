"""The `cpu` backend: PyTorch operators around the compiled kernels.

Each of the two kernels, phase 1 alone and phase 2 with or without phase 1, is a custom operator with a fake
implementation and a registered backward, so that autograd and `torch.compile` see through it.  Where neither
needs to see the call, as in decoding, the kernel is called directly.
"""

import math
import struct
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from osdn.ops import checks, tracing
from osdn.ops.checks import Newton, Phase1, Phase2, Squash
from osdn.ops.cpu.binding import Kernel, bind, call, element, wide
from osdn.ops.cpu.build import BuildError

SPAN = 64  # tokens between two checkpoints, as in kernels.cpp

# `struct Call` in heads.h: these pointers, then integers, then numbers.  What phase 1 carries from token to
# token is called the scale, whatever the rule.
POINTERS = (
    *("q", "k", "v", "beta", "write_keys", "log_decay", "retention", "initial_scale", "initial_state"),
    *("gain", "center", "cu_seqlens", "out", "final_state", "final_scale"),
    *("errors", "state_checkpoints", "scale_checkpoints"),
    *("grad_out", "grad_final_state", "grad_final_scale"),
    *("grad_q", "grad_k", "grad_v", "grad_beta", "grad_write_keys", "grad_log_decay", "grad_retention"),
    *("grad_initial_scale", "grad_initial_state", "grad_gain", "grad_center"),
)
INTEGERS = (
    *("N", "T", "H", "HV", "K", "V"),
    *("decay_kind", "retention_kind", "rule", "block", "beta_aware", "threads"),
    *("element", "write_element", "grad_element"),
)
NUMBERS = ("eta", "low", "high", "eps", "prior", "log_squash", "constant_retention", "scale")
CALL = struct.Struct(f"{len(POINTERS) + len(INTEGERS)}q{len(NUMBERS)}d")


@cache
def available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels for a dtype are compiled or can be; a warning says once why not."""
    try:
        _kernels(dtype)
    except BuildError as error:
        warnings.warn(f"osdn's CPU kernels are not available, using 'chunkwise': {error}", stacklevel=3)
        return False
    return True


@tracing.constant_in_graphs  # it may run a compiler, which must not be traced
def compiled(dtype: torch.dtype = torch.float32) -> bool:
    """`available`, for code that `torch.compile` may trace."""
    return available(dtype)


@cache
def _kernels(dtype: torch.dtype) -> dict[str, Kernel]:
    names = ("forward", "backward", "precondition", "precondition_back")
    fields = (*POINTERS, *INTEGERS, *NUMBERS)
    return dict(zip(names, bind(dtype, "osdn", fields, CALL.size, [f"osdn_{name}" for name in names])))


class Numbers(NamedTuple):
    """The arguments of an operator that are not tensors; its schema allows a flat list of floats."""

    rule: float = 0  # as in heads.h: none, scaling, Newton, squash
    block: float = 1
    beta_aware: float = 0
    eta: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    eps: float = 1.0
    prior: float = 1.0
    log_squash: float = 0.0
    retention: float = 1.0
    scale: float = 1.0

    def width(self, K: int) -> int:
        """Elements of the state that phase 1 carries, per head."""
        return K * int(self.block) if self.rule else 0


def _numbers(phase1: Phase1, scale: float = 1.0) -> list[float]:
    rule, constant = phase1.rule, phase1.retention if isinstance(phase1.retention, float) else 1.0
    common = {"retention": constant, "scale": scale}
    if isinstance(rule, Newton):
        return list(Numbers(rule=2, block=rule.block_size, prior=rule.prior, **common))
    if isinstance(rule, Squash):
        return list(Numbers(rule=3, eps=rule.eps, log_squash=math.log(rule.bound), **common))
    low, high = rule.bounds or (-math.inf, math.inf)
    return list(Numbers(1, 1, rule.beta_aware, rule.eta, low, high, rule.eps, **common))


def _run(
    kernel: str,
    tensors: dict[str, Tensor | None],  # by their names in POINTERS
    N: int,
    HV: int,
    numbers: list[float],
) -> None:
    """Packs a call and runs it: tensors on the CPU, their shapes and boundaries checked.

    Queries, keys, values, write keys, outputs and their gradients may have 16 bits; all else is `wide`.
    """
    contiguous = {name: x.resolve_neg().contiguous() for name, x in tensors.items() if x is not None}
    k, v = contiguous["k"], contiguous.get("v")
    _, T, H, K = k.shape
    V = v.shape[3] if v is not None else 0
    kinds = (_kind(contiguous.get("log_decay")), _kind(contiguous.get("retention")))
    rule, block, beta_aware, *reals = numbers
    integers = (int(rule), int(block), int(beta_aware), torch.get_num_threads())
    pointers = [contiguous[name].data_ptr() if name in contiguous else 0 for name in POINTERS]
    elements = [element(contiguous.get(name, k).dtype) for name in ("k", "write_keys", "grad_k")]
    packed = CALL.pack(*pointers, N, T, H, HV, K, V, *kinds, *integers, *elements, *reals)
    call(_kernels(wide(k.dtype))[kernel], packed)


def _kind(x: Tensor | None) -> int:
    return 0 if x is None else x.ndim - 2


def _host_boundaries(cu_seqlens: Tensor | None, T: int) -> Tensor | None:
    if cu_seqlens is None:
        return None
    checks.boundaries(cu_seqlens, T)
    return cu_seqlens.to("cpu", torch.int64).contiguous()


def _refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError('backend="cpu" has no second derivatives; use backend="chunkwise" for them')


def _per_value_head(k: Tensor, HV: int) -> Tensor:
    """An empty gradient of queries or keys `[B, T, HV, K]`; wide if it must still be summed over groups."""
    B, T, H, K = k.shape
    return k.new_empty(B, T, HV, K, dtype=k.dtype if HV == H else wide(k.dtype))


def _sum_groups(grad: Tensor, k: Tensor) -> Tensor:
    """Add up the gradients of value heads that share a key head: [B, T, HV, K] to [B, T, H, K]."""
    HV, H = grad.shape[2], k.shape[2]
    return grad if HV == H else grad.unflatten(2, (H, HV // H)).sum(3).to(k.dtype)


# ------------------------------------------------------------------------------------- phase 2, or both
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_keys: Tensor | None,
    log_decay: Tensor | None,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    initial_state: Tensor | None,
    gain: Tensor | None,
    center: Tensor | None,
    cu_seqlens: Tensor | None,
    numbers: list[float],
    save: bool,
) -> list[Tensor]:
    """Outputs, final state, final scale; with `save` also the errors and the checkpoints of both states."""
    outputs = _forward_outputs(k, v, cu_seqlens, numbers, save)
    cuts = _host_boundaries(cu_seqlens, k.shape[1])
    phase1 = (retention, initial_scale, initial_state, gain, center)
    tensors = dict(zip(POINTERS, (q, k, v, beta, write_keys, log_decay, *phase1, cuts, *outputs)))
    _run("forward", tensors, outputs[1].shape[0], v.shape[2], numbers)
    return outputs


def _forward_outputs(
    k: Tensor, v: Tensor, cu_seqlens: Tensor | None, numbers: list[float], save: bool
) -> list[Tensor]:
    B, T, _, K = k.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    spans, width = B * T // SPAN, Numbers(*numbers).width(K)
    shapes = [(N, HV, K, V), (N, HV, width)]
    if save:
        shapes += [(B, T, HV, V), (spans, HV, K, V), (spans, HV, width)]
    return [v.new_empty(v.shape), *(v.new_empty(shape, dtype=wide(v.dtype)) for shape in shapes)]


_delta_rule = torch.library.custom_op("osdn::cpu_delta_rule", _forward, mutates_args=(), device_types="cpu")


@_delta_rule.register_fake
def _(q, k, v, beta, w, g, r, d0, S0, gain, c, cu_seqlens, numbers, save):  # type: ignore[no-untyped-def]
    return _forward_outputs(k, v, cu_seqlens, numbers, save)


@torch.library.custom_op("osdn::cpu_delta_rule_backward", mutates_args=(), device_types="cpu")
def _delta_rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_keys: Tensor | None,
    log_decay: Tensor | None,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    initial_state: Tensor | None,
    gain: Tensor | None,
    center: Tensor | None,
    cu_seqlens: Tensor | None,
    errors: Tensor,
    state_checkpoints: Tensor,
    scale_checkpoints: Tensor,
    grad_out: Tensor,
    grad_final_state: Tensor | None,
    grad_final_scale: Tensor | None,
    numbers: list[float],
) -> list[Tensor]:
    """Gradients of the first eleven arguments; of q and k per value head, of center per sequence too."""
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    optional = (write_keys, log_decay, retention, initial_scale, initial_state, gain)
    grads = _gradients(k, v, beta, *optional, _per_sequence(center, N))
    cuts = _host_boundaries(cu_seqlens, k.shape[1])
    inputs = (q, k, v, beta, *optional, center, cuts)
    saved = (errors, state_checkpoints, scale_checkpoints)
    incoming = (grad_out.to(v.dtype), grad_final_state, grad_final_scale)
    tensors = dict(zip(POINTERS, (*inputs, None, None, None, *saved, *incoming, *grads)))
    _run("backward", tensors, N, v.shape[2], numbers)
    return grads


def _gradients(k: Tensor, v: Tensor, beta: Tensor, *optional: Tensor | None) -> list[Tensor]:
    keys = [_per_value_head(k, v.shape[2]) for _ in range(2)]
    return [*keys, v.new_empty(v.shape), beta.new_empty(beta.shape), *_like(beta, optional)]


def _like(beta: Tensor, optional: Iterable[Tensor | None]) -> list[Tensor]:
    return [beta.new_empty(0) if x is None else x.new_empty(x.shape) for x in optional]


def _per_sequence(center: Tensor | None, N: int) -> Tensor | None:
    return None if center is None else center.expand(N, -1)


@_delta_rule_backward.register_fake
def _(q, k, v, beta, w, g, r, d0, S0, gain, c, cu_seqlens, *others):  # type: ignore[no-untyped-def]
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _gradients(k, v, beta, w, g, r, d0, S0, gain, _per_sequence(c, N))


_delta_rule_backward.register_autograd(_refuse_double_backward)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.numbers, save = inputs
    ctx.save_for_backward(*tensors, *(output[3:] if save else ()))
    ctx.set_materialize_grads(False)


def _symmetric(grad: Tensor | None, block: int) -> Tensor | None:
    """The kernels' gradient of a covariance `[N, HV, K * b]` is that of a symmetric matrix."""
    if grad is None or block == 1:
        return grad
    blocks = grad.unflatten(2, (-1, block, block))
    return ((blocks + blocks.mT) / 2).flatten(2)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    tracing.reject_batched_gradients("cpu", grads)
    grad_out, grad_final_state, grad_final_scale = grads[:3]
    grad_final_scale = _symmetric(grad_final_scale, int(ctx.numbers[1]))
    # What the loss does not depend on gets no gradient: zero times an overflow would be NaN.
    if grad_out is None and grad_final_state is None:
        return _scale_backward(ctx, grad_final_scale)
    q, k, v, *others = ctx.saved_tensors
    unread = grad_out is None
    if unread:
        q, grad_out = torch.zeros_like(q), torch.zeros_like(v)
    saved = (q, k, v, *others)
    input_grads = _delta_rule_backward(*saved, grad_out, grad_final_state, grad_final_scale, ctx.numbers)
    result: list[Tensor | None] = [g if x is not None else None for g, x in zip(input_grads, saved)]
    result[0] = None if unread else _sum_groups(input_grads[0], k)
    result[1] = _sum_groups(input_grads[1], k)
    if result[10] is not None:
        result[10] = result[10].sum(0)
    return (*result, None, None, None)


def _scale_backward(ctx: Any, grad_final_scale: Tensor | None) -> tuple[Tensor | None, ...]:
    """The backward of a loss that sees phase 1's final state alone."""
    if grad_final_scale is None or not ctx.numbers[0]:  # no gradient arrives, or there is no phase 1
        return (None,) * 14
    _, k, _, beta, _, _, retention, initial, _, gain, center, cu_seqlens, _, _, checkpoints = (
        ctx.saved_tensors
    )
    inputs = (k, beta if gain is None else gain, retention, initial)
    saved = (*inputs, center, cu_seqlens, checkpoints)
    input_grads = _precondition_keys_backward(*saved, None, grad_final_scale, ctx.numbers)
    _, gate, grad_retention, grad_initial = (None if x is None else g for g, x in zip(input_grads, inputs))
    grad_beta, grad_gain = (gate, None) if gain is None else (None, gate)
    phase1 = (grad_retention, grad_initial, None, grad_gain, None)  # the center is in the write keys alone
    return (None, _sum_groups(input_grads[0], k), None, grad_beta, None, None, *phase1, None, None, None)


_delta_rule.register_autograd(_backward, setup_context=_save_for_backward)


def _call(operator: Any, plain: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
    """Through the dispatcher where autograd or a tracer must see the call, else directly."""
    differentiate = tracing.needs_gradient(arguments)
    if differentiate or tracing.is_traced(arguments):
        return operator(*arguments, differentiate)
    return plain(*arguments, False)


def delta_rule(x: Phase2, write_keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    tensors = (x.q, x.k, x.v, x.beta, write_keys, x.log_decay, None, None, x.initial_state, None, None)
    o, final_state, *_ = _call(_delta_rule, _forward, *tensors, x.cu_seqlens, list(Numbers(scale=x.scale)))
    return o, final_state


def preconditioned_delta_rule(x: Phase2, phase1: Phase1) -> tuple[Tensor, Tensor, Tensor]:
    r, initial, gain = _tensors(phase1)
    tensors = (x.q, x.k, x.v, x.beta, None, x.log_decay, r, initial, x.initial_state, gain, phase1.center)
    o, final_state, final, *_ = _call(
        _delta_rule, _forward, *tensors, x.cu_seqlens, _numbers(phase1, x.scale)
    )
    return o, final_state, _shaped(final, phase1, x.k.shape[3])


def _tensors(phase1: Phase1) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Retention, initial state as rows `[N, HV, ...]`, and gain, where they are tensors of their own."""
    rule, gate, retention, initial, _ = phase1
    return (
        retention if isinstance(retention, Tensor) else None,
        None if initial is None else initial.flatten(2),
        gate if isinstance(rule, Squash) else None,
    )


def _shaped(final: Tensor, phase1: Phase1, K: int) -> Tensor:
    """A final state as rows, in the shape that it has outside."""
    return final.unflatten(2, checks.state_shape(phase1.rule, K))


# ---------------------------------------------------------------------------------------- phase 1 alone
def _precondition(
    k: Tensor,
    gate: Tensor,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    center: Tensor | None,
    cu_seqlens: Tensor | None,
    numbers: list[float],
    save: bool,
) -> list[Tensor]:
    """Write keys and the final scale; with `save` also checkpoints of the scale."""
    outputs = _precondition_outputs(k, gate, cu_seqlens, numbers, save)
    write_keys, final_scale, checkpoints = outputs
    tensors = {
        **_precondition_inputs(k, gate, retention, initial_scale, center, cu_seqlens),
        "out": write_keys,
        "final_scale": final_scale,
        "scale_checkpoints": checkpoints if save else None,
    }
    _run("precondition", tensors, final_scale.shape[0], gate.shape[2], numbers)
    return outputs


def _gate(center: Tensor | None) -> str:
    """What a rule calls the gate that it sees."""
    return "beta" if center is None else "gain"


def _precondition_inputs(
    k: Tensor,
    gate: Tensor,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    center: Tensor | None,
    cu_seqlens: Tensor | None,
) -> dict[str, Tensor | None]:
    return {
        "k": k,
        _gate(center): gate,
        "retention": retention,
        "initial_scale": initial_scale,
        "center": center,
        "cu_seqlens": _host_boundaries(cu_seqlens, k.shape[1]),
    }


def _precondition_outputs(
    k: Tensor, gate: Tensor, cu_seqlens: Tensor | None, numbers: list[float], save: bool
) -> list[Tensor]:
    B, T, _, K = k.shape
    HV, width = gate.shape[2], Numbers(*numbers).width(K)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    spans = B * T // SPAN if save else 0
    states = [k.new_empty(n, HV, width, dtype=wide(k.dtype)) for n in (N, spans)]
    return [k.new_empty(B, T, HV, K), *states]


_precondition_keys = torch.library.custom_op(
    "osdn::cpu_precondition_keys", _precondition, mutates_args=(), device_types="cpu"
)


@_precondition_keys.register_fake
def _(k, gate, retention, initial_scale, center, cu_seqlens, numbers, save):  # type: ignore[no-untyped-def]
    return _precondition_outputs(k, gate, cu_seqlens, numbers, save)


@torch.library.custom_op("osdn::cpu_precondition_keys_backward", mutates_args=(), device_types="cpu")
def _precondition_keys_backward(
    k: Tensor,
    gate: Tensor,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    center: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor,
    grad_write_keys: Tensor | None,
    grad_final_scale: Tensor | None,
    numbers: list[float],
) -> list[Tensor]:
    """Gradients of the first five arguments; of k per value head, of center per sequence too."""
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    grads = _precondition_gradients(k, gate, retention, initial_scale, _per_sequence(center, N))
    names = ("grad_k", f"grad_{_gate(center)}", "grad_retention", "grad_initial_scale", "grad_center")
    tensors = {
        **_precondition_inputs(k, gate, retention, initial_scale, center, cu_seqlens),
        **{name: grad for name, grad in zip(names, grads) if grad.numel()},
        "scale_checkpoints": checkpoints,
        "grad_out": None if grad_write_keys is None else grad_write_keys.to(k.dtype),
        "grad_final_scale": grad_final_scale,
    }
    _run("precondition_back", tensors, N, gate.shape[2], numbers)
    return grads


def _precondition_gradients(k: Tensor, gate: Tensor, *optional: Tensor | None) -> list[Tensor]:
    return [_per_value_head(k, gate.shape[2]), gate.new_empty(gate.shape), *_like(gate, optional)]


@_precondition_keys_backward.register_fake
def _(k, gate, retention, initial_scale, center, cu_seqlens, *others):  # type: ignore[no-untyped-def]
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _precondition_gradients(k, gate, retention, initial_scale, _per_sequence(center, N))


_precondition_keys_backward.register_autograd(_refuse_double_backward)


def _save_precondition(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.numbers, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _precondition_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    tracing.reject_batched_gradients("cpu", grads)
    saved = ctx.saved_tensors
    grad_w, grad_final_scale = grads[:2]
    grad_final_scale = _symmetric(grad_final_scale, int(ctx.numbers[1]))
    input_grads = _precondition_keys_backward(*saved, grad_w, grad_final_scale, ctx.numbers)
    result: list[Tensor | None] = [g if x is not None else None for g, x in zip(input_grads, saved)]
    result[0] = _sum_groups(input_grads[0], saved[0])
    if result[4] is not None:  # the center is in the write keys alone
        result[4] = None if grad_w is None else result[4].sum(0)
    return (*result, None, None, None)


_precondition_keys.register_autograd(_precondition_backward, setup_context=_save_precondition)


def precondition_keys(k: Tensor, phase1: Phase1, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    r, initial, _ = _tensors(phase1)
    tensors = (k, phase1.gate, r, initial, phase1.center, cu_seqlens)
    w, final, _ = _call(_precondition_keys, _precondition, *tensors, _numbers(phase1))
    return w, _shaped(final, phase1, k.shape[3])
