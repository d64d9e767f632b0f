"""The backend's functions: PyTorch operators around the launches.

Each phase is one custom operator, opaque to `torch.compile` but for the shapes of its results, and its
backward is another.  Where neither autograd nor a tracer must see it, as in decoding, the kernels are
launched directly.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from osdn.ops import checks, tracing
from osdn.ops.checks import Newton, Phase1, Phase2, Rule, Scaling, Squash
from osdn.ops.triton import decode, phase1, phase1_backward, phase2, phase2_backward
from osdn.ops.triton.chunks import chunks_of

# Up to this many tokens one launch of the recurrence costs less than the four of the chunks.
RECURRENT_UP_TO = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def precondition_keys(k: Tensor, p: Phase1, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_dtype(k)
    tensors = (k, p.gate, _retention(p.retention), _rows(p.initial), p.center, cu_seqlens)
    w, final, *_ = _call(_precondition, _precondition_keys, *tensors, *_numbers(p.retention, p.rule))
    return w, _shaped(final, p.rule)


def delta_rule(x: Phase2, write_keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check_dtype(x.k)
    w = None if write_keys is None else write_keys.to(x.k.dtype)
    tensors = (x.q, x.k, x.v, x.beta, w, x.log_decay, x.initial_state)
    if x.k.shape[1] <= RECURRENT_UP_TO and not tracing.needs_gradient(tensors):
        arguments = (*tensors, None, None, None, None, x.cu_seqlens, x.scale, None, False)
        o, final_state, _ = _call(_recurrent, _recur, *arguments)
        return o, final_state
    o, final_state = _call(_rule, _delta_rule, *tensors, x.cu_seqlens, x.scale)
    return o, final_state


def preconditioned_delta_rule(x: Phase2, p: Phase1) -> tuple[Tensor, Tensor, Tensor]:
    _check_dtype(x.k)
    phase1 = (p.gate, _retention(p.retention), _rows(p.initial), p.center)
    tensors = (x.q, x.k, x.v, x.beta, None, x.log_decay, x.initial_state, *phase1)
    if x.k.shape[1] <= RECURRENT_UP_TO and not tracing.needs_gradient(tensors):
        numbers = _numbers(p.retention, p.rule)
        o, final_state, final = _call(_recurrent, _recur, *tensors, x.cu_seqlens, x.scale, *numbers)
        return o, final_state, _shaped(final, p.rule)
    w, final = precondition_keys(x.k, p, x.cu_seqlens)
    return *delta_rule(x, w), final


def _rows(initial: Tensor | None) -> Tensor | None:
    """A diagonal covariance `[N, HV, K, 1, 1]` is a number per channel here."""
    return initial.flatten(2) if initial is not None else None


def _shaped(final: Tensor, rule: Rule) -> Tensor:
    return final[..., None, None] if isinstance(rule, Newton) else final


def _check_dtype(k: Tensor) -> None:
    if k.dtype not in DTYPES:
        raise ValueError(
            f'k has dtype {k.dtype}; backend="triton" takes float32, bfloat16 and float16, '
            'backend="chunkwise" takes float64 on any device'
        )


def _call(operator: Any, plain: Callable[..., Any], *arguments: Any) -> Any:
    """Through the dispatcher where autograd or a tracer must see the call, else directly."""
    watched = tracing.needs_gradient(arguments) or tracing.is_traced(arguments)
    return (operator if watched else plain)(*arguments)


def _retention(retention: float | Tensor) -> Tensor | None:
    return retention if isinstance(retention, Tensor) else None


def _numbers(retention: float | Tensor, rule: Rule) -> tuple[list[float], bool]:
    """Phase 1's settings as an operator takes them, and whether it sees beta; `_rule_of` undoes it."""
    constant = 1.0 if isinstance(retention, Tensor) else retention
    if isinstance(rule, Newton):
        return [constant, 1, rule.prior], True
    if isinstance(rule, Squash):
        return [constant, 2, *rule], True
    return [constant, 0, rule.eta, rule.eps, *(rule.bounds or ())], rule.beta_aware


def _rule_of(numbers: Sequence[float], beta_aware: bool) -> tuple[float, Rule]:
    constant, kind, *settings = numbers
    if kind == 1:
        return constant, Newton(settings[0], 1)
    if kind == 2:
        return constant, Squash(*settings)
    eta, eps, *bounds = settings
    return constant, Scaling(eta, (bounds[0], bounds[1]) if bounds else None, beta_aware, eps)


def _sequences(k: Tensor, cu_seqlens: Tensor | None) -> int:
    return k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _per_key_head(grad: Tensor, k: Tensor) -> Tensor:
    """Add up the gradients of value heads that share a key head."""
    return grad if grad.shape[2] == k.shape[2] else grad.unflatten(2, (k.shape[2], -1)).sum(3).to(k.dtype)


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    """As they are in memory: a view that is negated only when read is negated here."""
    return [None if x is None else x.resolve_neg().contiguous() for x in tensors]


def _refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        'backend="triton" has no second derivatives; use backend="chunkwise" or backend="reference" for them'
    )


# ---------------------------------------------------------------------------------------------- phase 1
def _phase1_inputs(
    k: Tensor,
    beta: Tensor,
    r: Tensor | None,
    d: Tensor | None,
    center: Tensor | None,
    cu: Tensor | None,
    numbers: Sequence[float],
    aware: bool,
) -> phase1.Inputs:
    constant, settings = _rule_of(numbers, aware)
    k, beta, r, d, center = _contiguous(k, beta, r, d, center)
    at = chunks_of(k, cu)
    return phase1.Inputs(k, beta, constant if r is None else r, d, settings, at, center)


def _precondition_keys(
    k: Tensor,
    beta: Tensor,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    center: Tensor | None,
    cu_seqlens: Tensor | None,
    numbers: Sequence[float],
    beta_aware: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Write keys and final scale, and the three fields of `phase1.Steps` for the backward."""
    inputs = _phase1_inputs(k, beta, retention, initial_scale, center, cu_seqlens, numbers, beta_aware)
    w, final_scale, steps = phase1.forward(inputs)
    return w, final_scale, *steps


_precondition = torch.library.custom_op("osdn::triton_precondition_keys", _precondition_keys, mutates_args=())


@_precondition.register_fake
def _(k, beta, retention, initial_scale, center, cu_seqlens, *others):  # type: ignore[no-untyped-def]
    w, final_scale, steps = phase1.empty_outputs(k, beta, _sequences(k, cu_seqlens))
    return w, final_scale, *steps


@torch.library.custom_op("osdn::triton_precondition_keys_backward", mutates_args=())
def _precondition_backward(
    k: Tensor,
    beta: Tensor,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    center: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor,
    bound: Tensor,
    u: Tensor,
    grad_write_keys: Tensor,
    grad_final_scale: Tensor | None,
    numbers: Sequence[float],
    beta_aware: bool,
) -> list[Tensor]:
    """Gradients of the first five arguments; one of no elements for an argument that is not there."""
    inputs = _phase1_inputs(k, beta, retention, initial_scale, center, cu_seqlens, numbers, beta_aware)
    steps = phase1.Steps(checkpoints, bound, u)
    grads = phase1_backward.backward(inputs, steps, *_contiguous(grad_write_keys, grad_final_scale))
    return _as_given((k, beta, retention, initial_scale, center), (_per_key_head(grads.k, k), *grads[1:]))


def _as_given(arguments: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients in their arguments' dtypes; no two may share memory."""
    return [_empty(arguments) if x is None or g is None else g.to(x.dtype) for x, g in zip(arguments, grads)]


def _like(*arguments: Tensor | None) -> list[Tensor]:
    """Tensors shaped like the results of `_as_given`, uninitialised."""
    return [_empty(arguments) if x is None else x.new_empty(x.shape) for x in arguments]


def _empty(arguments: Sequence[Tensor | None]) -> Tensor:
    """On their device: a result on the CPU would keep a compiled graph from being replayed on the GPU."""
    return next(x.new_empty(0) for x in arguments if x is not None)


@_precondition_backward.register_fake
def _(k, beta, retention, initial_scale, center, *others):  # type: ignore[no-untyped-def]
    return _like(k, beta, retention, initial_scale, center)


_precondition_backward.register_autograd(_refuse_double_backward)


def _save_precondition(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.numbers, ctx.beta_aware = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate_precondition(
    ctx: Any, grad_w: Tensor | None, grad_d: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    tracing.reject_batched_gradients("triton", (grad_w, grad_d))
    saved = ctx.saved_tensors
    k, beta = saved[:2]
    unread = grad_w is None
    if unread:
        grad_w = k.new_zeros(*beta.shape, k.shape[3])
    input_grads = _precondition_backward(*saved, grad_w, grad_d, ctx.numbers, ctx.beta_aware)
    *grads, center = (None if x is None else g for x, g in zip(saved, input_grads))
    return (*grads, None if unread else center, None, None, None)  # the center is in the write keys alone


_precondition.register_autograd(_differentiate_precondition, setup_context=_save_precondition)


# ---------------------------------------------------------------------------------------------- phase 2
def _phase2_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    w: Tensor | None,
    g: Tensor | None,
    S: Tensor | None,
    cu: Tensor | None,
) -> phase2.Inputs:
    q, k, v, beta, w, g, S = _contiguous(q, k, v, beta, w, g, S)
    at = chunks_of(k, cu)
    return phase2.Inputs(q, k, v, beta, k if w is None else w, g, S, at)


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_keys: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Outputs and final state."""
    return phase2.forward(
        _phase2_inputs(q, k, v, beta, write_keys, log_decay, initial_state, cu_seqlens), scale
    )


_rule = torch.library.custom_op("osdn::triton_delta_rule", _delta_rule, mutates_args=())


def _outputs(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (_sequences(k, cu_seqlens), v.shape[2], k.shape[3], v.shape[3])
    return v.new_empty(v.shape), k.new_empty(shape, dtype=torch.float32)


@_rule.register_fake
def _(q, k, v, beta, write_keys, log_decay, initial_state, cu_seqlens, scale):  # type: ignore[no-untyped-def]
    return _outputs(k, v, cu_seqlens)


@torch.library.custom_op("osdn::triton_delta_rule_backward", mutates_args=())
def _rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_keys: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    scale: float,
) -> list[Tensor]:
    """Gradients of the first seven arguments; one of no elements for an argument that is not there."""
    inputs = _phase2_inputs(q, k, v, beta, write_keys, log_decay, initial_state, cu_seqlens)
    grad_o, grad_final_state = _contiguous(grad_o, grad_final_state)
    grads = phase2_backward.backward(inputs, scale, grad_o, grad_final_state, plain=write_keys is None)
    arguments = (q, k, v, beta, write_keys, log_decay, initial_state)
    return _as_given(arguments, (_per_key_head(grads.q, q), _per_key_head(grads.k, k), *grads[2:]))


@_rule_backward.register_fake
def _(q, k, v, beta, write_keys, log_decay, initial_state, *others):  # type: ignore[no-untyped-def]
    return _like(q, k, v, beta, write_keys, log_decay, initial_state)


_rule_backward.register_autograd(_refuse_double_backward)


def _save_rule(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate_rule(ctx: Any, grad_o: Tensor | None, grad_S: Tensor | None) -> tuple[Any, ...]:
    tracing.reject_batched_gradients("triton", (grad_o, grad_S))
    q, k, v, *others = ctx.saved_tensors
    unread = grad_o is None
    if unread:  # queries get no gradient: zero times one that is not finite would be NaN
        q, grad_o = torch.zeros_like(q), torch.zeros_like(v)
    saved = (q, k, v, *others)
    grads = _rule_backward(*saved, grad_o, grad_S, ctx.scale)
    grad_q, *other_grads = (None if x is None else g for x, g in zip(saved, grads))
    return (None if unread else grad_q, *other_grads, None, None)


_rule.register_autograd(_differentiate_rule, setup_context=_save_rule)


# -------------------------------------------------------------------------------- a few tokens, both phases
def _recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_keys: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    gate: Tensor | None,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    center: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    numbers: Sequence[float] | None,
    beta_aware: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state and, with `numbers`, the final scale."""
    inputs = _phase2_inputs(q, k, v, beta, write_keys, log_decay, initial_state, cu_seqlens)
    scaling = None
    if numbers is not None:
        gate = beta if gate is None else gate
        scaling = _phase1_inputs(k, gate, retention, initial_scale, center, cu_seqlens, numbers, beta_aware)
    return decode.forward(inputs, scaling, scale)


_recurrent = torch.library.custom_op("osdn::triton_recurrent", _recur, mutates_args=())


@_recurrent.register_fake
def _(q, k, v, beta, w, g, S, gate, r, d, c, cu_seqlens, scale, numbers, aware):  # type: ignore[no-untyped-def]
    o, final_state = _outputs(k, v, cu_seqlens)
    N, HV, K, _ = final_state.shape
    return o, final_state, k.new_empty(N if numbers is not None else 0, HV, K, dtype=torch.float32)


# ----------------------------------------------------------------------------------- decoding in place
def decode_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    retention: float | Tensor,
    initial_scale: Tensor | None,
    settings: Scaling | None,
    log_decay: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    _check_decoding(q, k, v, beta, retention, initial_scale, log_decay, state)
    numbers, aware = (None, False) if settings is None else _numbers(retention, settings)
    tensors = (q, k, v, beta, log_decay, state, _retention(retention), initial_scale)
    if tracing.needs_gradient(tensors):
        raise ValueError("decode_ has no gradient; call it under torch.no_grad()")
    o, final_scale = _call(_decode, _step, *tensors, scale, numbers, aware)
    return o, final_scale


def _check_decoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    retention: float | Tensor,
    initial_scale: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
) -> None:
    B, T, H, K = checks.keys(k)
    _check_dtype(k)
    HV = checks.value_heads("v", v, 4, "[B, T, HV, V]", H)
    checks.tensor("q", q, (B, T, H, K), "[B, T, H, K]", k.device)
    checks.tensor("v", v, (B, T, HV, v.shape[3]), "[B, T, HV, V]", k.device)
    checks.tensor("beta", beta, (B, T, HV), "[B, T, HV]", k.device)
    if initial_scale is not None:
        checks.tensor("initial_scale", initial_scale, (B, HV, K), "[B, HV, K]", k.device)
    for name, x in (("retention", retention), ("log_decay", log_decay)):
        if isinstance(x, Tensor):
            shape = (B, T, HV) if x.ndim == 3 else (B, T, HV, K)
            checks.tensor(name, x, shape, "[B, T, HV] or [B, T, HV, K]", k.device)
    checks.tensor("state", state, (B, HV, K, v.shape[3]), "[B, HV, K, V]", k.device)
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(
            f"state is in {state.dtype} with strides {state.stride()}; "
            "to be updated in place it must be float32 and contiguous"
        )


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    scale: float,
    numbers: Sequence[float] | None,
    beta_aware: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs and, with `numbers`, the final scale; the final state is written over `state`."""
    inputs = _phase2_inputs(q, k, v, beta, None, log_decay, state, None)
    scaling = None
    if numbers is not None:
        scaling = _phase1_inputs(k, beta, retention, initial_scale, None, None, numbers, beta_aware)
    o, _, final_scale = decode.forward(inputs, scaling, scale, in_place=True)
    return o, final_scale


_decode = torch.library.custom_op("osdn::triton_decode", _step, mutates_args=("state",))


@_decode.register_fake
def _(q, k, v, beta, log_decay, state, retention, initial_scale, scale, numbers, beta_aware):  # type: ignore[no-untyped-def]
    N, HV, K, _ = state.shape
    return v.new_empty(v.shape), k.new_empty(N if numbers is not None else 0, HV, K, dtype=torch.float32)
