"""The `cpu` backend: PyTorch operators around the compiled kernels.

Each of the two kernels, phase 1 alone and phase 2 with or without phase 1, is a custom operator with a fake
implementation and a registered backward, so that autograd and `torch.compile` see through it.  Where neither
is watching, as in decoding, the kernel is called directly.
"""

import ctypes
import math
import re
import struct
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from osdn.ops import checks, watched
from osdn.ops.checks import Scaling
from osdn.ops.cpu.build import BuildError, library

SPAN = 64  # tokens between two checkpoints, as in kernels.cpp

# `struct Call` in heads.h: these pointers, then integers, then numbers.
POINTERS = (
    *("q", "k", "v", "beta", "write_keys", "log_decay", "retention", "initial_scale", "initial_state"),
    *("cu_seqlens", "out", "final_state", "final_scale"),
    *("errors", "state_checkpoints", "scale_checkpoints"),
    *("grad_out", "grad_final_state", "grad_final_scale"),
    *("grad_q", "grad_k", "grad_v", "grad_beta", "grad_write_keys", "grad_log_decay", "grad_retention"),
    *("grad_initial_scale", "grad_initial_state"),
)
INTEGERS = (
    *("N", "T", "H", "HV", "K", "V"),
    *("decay_kind", "retention_kind", "online", "beta_aware", "threads"),
)
NUMBERS = ("eta", "low", "high", "eps", "constant_retention", "scale")
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


@cache
def _kernels(dtype: torch.dtype) -> dict[str, Callable[[bytes], int]]:
    compiled = library("double" if dtype == torch.float64 else "float")
    _check_layout(compiled)
    functions = {}
    for name in ("forward", "backward", "precondition", "precondition_back"):
        function = getattr(compiled, f"osdn_{name}")
        function.argtypes = [ctypes.c_char_p]
        functions[name] = function
    return functions


def _check_layout(compiled: ctypes.CDLL) -> None:
    """A call is packed as the library reads it; a field out of place would be a wild pointer."""
    size = ctypes.c_int64.in_dll(compiled, "osdn_call_size").value
    declaration = ctypes.c_char_p(ctypes.addressof(ctypes.c_char.in_dll(compiled, "osdn_call"))).value
    fields = re.findall(r"(\w+)\s*[,;]", (declaration or b"").decode())
    if (size, fields) != (CALL.size, [*POINTERS, *INTEGERS, *NUMBERS]):
        raise RuntimeError("struct Call in osdn/ops/cpu/heads.h and the fields in osdn/ops/cpu differ")


# What an operator takes beside tensors: eta, low, high, eps, the constant retention, the output's scale, and
# whether the scale's feedback sees beta.  A flat list, because that is what an operator's schema can hold.
def _numbers(settings: Scaling, retention: float | Tensor, scale: float) -> list[float]:
    low, high = settings.bounds or (-math.inf, math.inf)
    constant = retention if isinstance(retention, float) else 1.0
    return [settings.eta, low, high, settings.eps, constant, scale, float(settings.beta_aware)]


def _run(
    kernel: str,
    tensors: dict[str, Tensor | None],  # by their names in POINTERS
    N: int,
    HV: int,
    numbers: list[float],
    online: bool = True,
) -> None:
    """Packs a call and runs it: tensors on the CPU, of one dtype, their shapes and boundaries checked."""
    given = {name: x.resolve_neg().contiguous() for name, x in tensors.items() if x is not None}
    k, v = given["k"], given.get("v")
    _, T, H, K = k.shape
    V = v.shape[3] if v is not None else 0
    kinds = (_kind(given.get("log_decay")), _kind(given.get("retention")))
    *reals, beta_aware = numbers
    pointers = [given[name].data_ptr() if name in given else 0 for name in POINTERS]
    threads = torch.get_num_threads()
    call = CALL.pack(*pointers, N, T, H, HV, K, V, *kinds, online, int(beta_aware), threads, *reals)
    if _kernels(k.dtype)[kernel](call):
        raise MemoryError("out of memory in osdn's CPU kernels")


def _kind(x: Tensor | None) -> int:
    return 0 if x is None else x.ndim - 2


def _host_boundaries(cu_seqlens: Tensor | None, T: int) -> Tensor | None:
    if cu_seqlens is None:
        return None
    checks.boundaries(cu_seqlens, T)
    return cu_seqlens.to("cpu", torch.int64).contiguous()


def _refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError('backend="cpu" has no second derivatives; use backend="chunkwise" for them')


def _sum_groups(grad: Tensor, H: int) -> Tensor:
    """Value heads [B, T, HV, K] that share a key head add their gradients: [B, T, H, K]."""
    B, T, HV, K = grad.shape
    return grad if HV == H else grad.view(B, T, H, HV // H, K).sum(3)


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
    cu_seqlens: Tensor | None,
    numbers: list[float],
    online: bool,
    save: bool,
) -> list[Tensor]:
    """Outputs, final state, final scale; with `save` also the errors and the checkpoints of both states."""
    outputs = _forward_outputs(k, v, cu_seqlens, online, save)
    cuts = _host_boundaries(cu_seqlens, k.shape[1])
    inputs = (q, k, v, beta, write_keys, log_decay, retention, initial_scale, initial_state, cuts)
    tensors = dict(zip(POINTERS, (*inputs, *outputs)))
    _run("forward", tensors, outputs[1].shape[0], v.shape[2], numbers, online)
    return outputs


def _forward_outputs(
    k: Tensor, v: Tensor, cu_seqlens: Tensor | None, online: bool, save: bool
) -> list[Tensor]:
    B, T, _, K = k.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    spans = B * T // SPAN
    shapes = [(B, T, HV, V), (N, HV, K, V), (N if online else 0, HV, K)]
    if save:
        shapes += [(B, T, HV, V), (spans, HV, K, V), (spans if online else 0, HV, K)]
    return [v.new_empty(shape) for shape in shapes]


_delta_rule = torch.library.custom_op("osdn::cpu_delta_rule", _forward, mutates_args=(), device_types="cpu")


@_delta_rule.register_fake
def _(q, k, v, beta, w, g, r, d0, S0, cu_seqlens, numbers, online, save):  # type: ignore[no-untyped-def]
    return _forward_outputs(k, v, cu_seqlens, online, save)


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
    cu_seqlens: Tensor | None,
    errors: Tensor,
    state_checkpoints: Tensor,
    scale_checkpoints: Tensor,
    grad_out: Tensor,
    grad_final_state: Tensor | None,
    grad_final_scale: Tensor | None,
    numbers: list[float],
    online: bool,
) -> list[Tensor]:
    """Gradients of the first nine arguments; those of q and k have one head per value head."""
    grads = _gradients(k, v, beta, write_keys, log_decay, retention, initial_scale, initial_state)
    cuts = _host_boundaries(cu_seqlens, k.shape[1])
    inputs = (q, k, v, beta, write_keys, log_decay, retention, initial_scale, initial_state, cuts)
    saved = (errors, state_checkpoints, scale_checkpoints)
    incoming = (grad_out, grad_final_state, grad_final_scale)
    tensors = dict(zip(POINTERS, (*inputs, None, None, None, *saved, *incoming, *grads)))
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _run("backward", tensors, N, v.shape[2], numbers, online)
    return grads


def _gradients(k: Tensor, v: Tensor, beta: Tensor, *optional: Tensor | None) -> list[Tensor]:
    B, T, _, K = k.shape
    per_head = (B, T, v.shape[2], K)
    required = [k.new_empty(per_head), k.new_empty(per_head), k.new_empty(v.shape), k.new_empty(beta.shape)]
    return required + [k.new_empty(0 if x is None else x.shape) for x in optional]


@_delta_rule_backward.register_fake
def _(q, k, v, beta, w, g, r, d0, S0, *others):  # type: ignore[no-untyped-def]
    return _gradients(k, v, beta, w, g, r, d0, S0)


_delta_rule_backward.register_autograd(_refuse_double_backward)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.numbers, ctx.online, save = inputs
    ctx.save_for_backward(*tensors, *(output[3:] if save else ()))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    watched.refuse_batched("cpu", grads)
    grad_out, grad_final_state, grad_final_scale = grads[:3]
    # What the loss does not depend on gets no gradient: zero times an overflow would be NaN.
    if grad_out is None and grad_final_state is None:
        return _scale_backward(ctx, grad_final_scale)
    q, k, v, *others = ctx.saved_tensors
    unread = grad_out is None
    if unread:
        q, grad_out = torch.zeros_like(q), torch.zeros_like(v)
    saved = (q, k, v, *others)
    made = _delta_rule_backward(*saved, grad_out, grad_final_state, grad_final_scale, ctx.numbers, ctx.online)
    result: list[Tensor | None] = [g if x is not None else None for g, x in zip(made, saved)]
    result[0] = None if unread else _sum_groups(made[0], k.shape[2])
    result[1] = _sum_groups(made[1], k.shape[2])
    return (*result, None, None, None, None)


def _scale_backward(ctx: Any, grad_final_scale: Tensor | None) -> tuple[Tensor | None, ...]:
    """The backward of a loss that sees the final scale alone: phase 1's."""
    _, k, _, beta, _, _, retention, initial_scale, _, cu_seqlens, _, _, checkpoints = ctx.saved_tensors
    inputs = (k, beta, retention, initial_scale)
    made = _precondition_keys_backward(*inputs, cu_seqlens, checkpoints, None, grad_final_scale, ctx.numbers)
    grads = [g if x is not None else None for g, x in zip(made, inputs)]
    grad_k, grad_beta, grad_retention, grad_initial_scale = _sum_groups(made[0], k.shape[2]), *grads[1:]
    return (None, grad_k, None, grad_beta, None, None, grad_retention, grad_initial_scale, *[None] * 5)


_delta_rule.register_autograd(_backward, setup_context=_save_for_backward)


def _call(operator: Any, plain: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
    """Through the dispatcher when somebody is watching, else directly."""
    differentiate = watched.by_autograd(arguments)
    if differentiate or watched.by_others(arguments):
        return operator(*arguments, differentiate)
    return plain(*arguments, False)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    write_keys: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    numbers = [0.0, 0.0, 0.0, 1.0, 1.0, scale, 0.0]
    tensors = (q, k, v, beta, write_keys, log_decay, None, None, initial_state, cu_seqlens)
    o, final_state, *_ = _call(_delta_rule, _forward, *tensors, numbers, False)
    return o, final_state


def online_scaled_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    retention: float | Tensor,
    initial_scale: Tensor | None,
    settings: Scaling,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    numbers = _numbers(settings, retention, scale)
    r = retention if isinstance(retention, Tensor) else None
    tensors = (q, k, v, beta, None, log_decay, r, initial_scale, initial_state, cu_seqlens)
    o, final_state, final_scale, *_ = _call(_delta_rule, _forward, *tensors, numbers, True)
    return o, final_state, final_scale


# ---------------------------------------------------------------------------------------- phase 1 alone
def _precondition(
    k: Tensor,
    beta: Tensor,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    cu_seqlens: Tensor | None,
    numbers: list[float],
    save: bool,
) -> list[Tensor]:
    """Write keys and the final scale; with `save` also checkpoints of the scale."""
    outputs = _precondition_outputs(k, beta, cu_seqlens, save)
    write_keys, final_scale, checkpoints = outputs
    tensors = {
        **_precondition_inputs(k, beta, retention, initial_scale, cu_seqlens),
        "out": write_keys,
        "final_scale": final_scale,
        "scale_checkpoints": checkpoints,
    }
    _run("precondition", tensors, final_scale.shape[0], beta.shape[2], numbers)
    return outputs


def _precondition_inputs(
    k: Tensor, beta: Tensor, retention: Tensor | None, initial_scale: Tensor | None, cu_seqlens: Tensor | None
) -> dict[str, Tensor | None]:
    return {
        "k": k,
        "beta": beta,
        "retention": retention,
        "initial_scale": initial_scale,
        "cu_seqlens": _host_boundaries(cu_seqlens, k.shape[1]),
    }


def _precondition_outputs(k: Tensor, beta: Tensor, cu_seqlens: Tensor | None, save: bool) -> list[Tensor]:
    B, T, _, K = k.shape
    HV = beta.shape[2]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    spans = B * T // SPAN if save else 0
    return [k.new_empty(B, T, HV, K), k.new_empty(N, HV, K), k.new_empty(spans, HV, K)]


_precondition_keys = torch.library.custom_op(
    "osdn::cpu_precondition_keys", _precondition, mutates_args=(), device_types="cpu"
)


@_precondition_keys.register_fake
def _(k, beta, retention, initial_scale, cu_seqlens, numbers, save):  # type: ignore[no-untyped-def]
    return _precondition_outputs(k, beta, cu_seqlens, save)


@torch.library.custom_op("osdn::cpu_precondition_keys_backward", mutates_args=(), device_types="cpu")
def _precondition_keys_backward(
    k: Tensor,
    beta: Tensor,
    retention: Tensor | None,
    initial_scale: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor,
    grad_write_keys: Tensor | None,
    grad_final_scale: Tensor | None,
    numbers: list[float],
) -> list[Tensor]:
    """Gradients of the first four arguments; that of k has one head per value head."""
    grads = _precondition_gradients(k, beta, retention, initial_scale)
    names = ("grad_k", "grad_beta", "grad_retention", "grad_initial_scale")
    tensors = {
        **_precondition_inputs(k, beta, retention, initial_scale, cu_seqlens),
        **dict(zip(names, grads)),
        "scale_checkpoints": checkpoints,
        "grad_out": grad_write_keys,
        "grad_final_scale": grad_final_scale,
    }
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _run("precondition_back", tensors, N, beta.shape[2], numbers)
    return grads


def _precondition_gradients(k: Tensor, beta: Tensor, *optional: Tensor | None) -> list[Tensor]:
    B, T, _, K = k.shape
    required = [k.new_empty(B, T, beta.shape[2], K), k.new_empty(beta.shape)]
    return required + [k.new_empty(0 if x is None else x.shape) for x in optional]


@_precondition_keys_backward.register_fake
def _(k, beta, retention, initial_scale, *others):  # type: ignore[no-untyped-def]
    return _precondition_gradients(k, beta, retention, initial_scale)


_precondition_keys_backward.register_autograd(_refuse_double_backward)


def _save_precondition(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.numbers, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _precondition_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    watched.refuse_batched("cpu", grads)
    saved = ctx.saved_tensors
    made = _precondition_keys_backward(*saved, *grads[:2], ctx.numbers)
    result: list[Tensor | None] = [g if x is not None else None for g, x in zip(made, saved)]
    result[0] = _sum_groups(made[0], saved[0].shape[2])
    return (*result, None, None, None)


_precondition_keys.register_autograd(_precondition_backward, setup_context=_save_precondition)


def precondition_keys(
    k: Tensor,
    beta: Tensor,
    retention: float | Tensor,
    initial_scale: Tensor | None,
    settings: Scaling,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    numbers = _numbers(settings, retention, 1.0)
    r = retention if isinstance(retention, Tensor) else None
    w, final_scale, _ = _call(
        _precondition_keys, _precondition, k, beta, r, initial_scale, cu_seqlens, numbers
    )
    return w, final_scale
