"""Our kernels in the registry of flash-linear-attention, for tensors on a CPU, where its own cannot run.

The registry asks each backend in turn whether it handles a call.  Ours handles calls whose tensors are all on
a CPU: the gated delta rule, Kimi Delta Attention, and what their layers call around them, such as the short
convolution and the gated norm.  A backend cannot be unregistered, but it can report that it is disabled.

One function for single tokens is not in the registry: `fused_recurrent_gated_delta_rule_fwd`.  Its name is
replaced like those in `transformers`.
"""

import inspect
import sys
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from osdn.hosts.functions import ACTIVATIONS, GATES, Function, channel_decay, on_cpu, prepared
from osdn.layers.precision import widen
from osdn.ops import delta_rule
from osdn.ops.cpu.convolution import short_convolution, usable
from osdn.ops.cpu.gated_norm import gated_rms_norm

PACKAGE = "fla"
RECURRENT = "fla.ops.gated_delta_rule.fused_recurrent"  # where the function without a registry is
# arguments that our kernels do not support: several devices, several results, states in a pool
BEYOND = (
    *("cp_context", "return_intermediate_states", "transpose_state_layout", "gv"),
    *("ssm_state_indices", "num_accepted_tokens", "dresidual", "has_residual"),
)

enabled = False  # whether the registered backend handles calls
_registered: ModuleType | None = None  # the `fla.backends` in which we are registered


def enable() -> bool:
    """Handle calls of flash-linear-attention if it is imported and has a registry; return whether it does."""
    global enabled, _registered
    backends = sys.modules.get("fla.backends")
    if not hasattr(backends, "register") or any(x not in sys.modules for x, _ in IMPLEMENTATIONS.values()):
        return False
    if _registered is not backends:
        _register(backends)
        _registered = backends
    enabled = True
    return True


def disable() -> None:
    """Stop handling calls."""
    global enabled
    enabled = False


def _register(backends: Any) -> None:
    class Backend(backends.BaseBackend):
        """Handles the functions that it has a method for, by name."""

        backend_type = "osdn"
        priority = -1  # come first: other backends do not check the device of the tensors

        def is_enabled(self) -> bool:
            return enabled

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            if not hasattr(self, function_name):
                return False, "osdn does not implement it"
            return _handles([*args, *kwargs.values()], kwargs), "osdn handles plain calls on a CPU"

    for implementation, (module, operation) in IMPLEMENTATIONS.items():
        entry = getattr(sys.modules[module], implementation.__name__)
        setattr(Backend, implementation.__name__, staticmethod(_by_name(implementation, entry)))
        backends.register(operation or entry)(Backend)


def _by_name(implementation: Function, entry: Function) -> Function:
    """Turn the positional arguments of a call of `entry` into keyword arguments."""
    names = list(inspect.signature(entry).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        return implementation(**dict(zip(names, args)), **kwargs)

    return call


def _handles(arguments: list[Any], named: dict[str, Any]) -> bool:
    plain = all(named.get(name) is None or named[name] is False for name in BEYOND)
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    return plain and on_cpu(*tensors) and usable(tensors[0])


# ------------------------------------------------------------------------------------------- the recurrence
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    if settings.get("use_gate_in_kernel"):
        g = channel_decay(g, settings["A_log"], settings.get("dt_bias"), None)
    return _delta_rule(q, k, v, g, beta, scale, **settings)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    if settings.get("use_gate_in_kernel"):
        g = channel_decay(g, *(settings.get(name) for name in ("A_log", "dt_bias", "lower_bound")))
    return _delta_rule(q, k, v, g, beta, scale, **settings)


def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor | None = None,
    inplace_final_state: bool = True,
    initial_state: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    settings["output_final_state"] = settings.get("output_final_state") or inplace_final_state
    o, state = chunk_kda(q, k, v, g, beta, initial_state=initial_state, **settings)
    if inplace_final_state and initial_state is not None and state is not None:
        state = initial_state.copy_(state)
    return o if out is None else out.copy_(o), state


def fused_recurrent_forward(original: Function) -> Function:
    """`fused_recurrent_gated_delta_rule_fwd`, whose arguments are all given by name."""

    @wraps(original)
    def replacement(**kwargs: Any) -> Any:
        g, gk, beta = kwargs["g"], kwargs["gk"], kwargs["beta"]
        if not _handles(list(kwargs.values()), kwargs) or beta.ndim != 3 or (g is None) == (gk is None):
            return original(**kwargs)
        settings = {name: x for name, x in kwargs.items() if name not in ("g", "gk", "gv")}
        decay = {"g": gk} if g is None else {"g": g, "use_gate_in_kernel": kwargs["A_log"] is not None}
        return chunk_gated_delta_rule(**settings, **decay)

    return replacement


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    scale: float | None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,  # settings for GPUs
) -> tuple[Tensor, Tensor | None]:
    if use_beta_sigmoid_in_kernel:
        beta = widen(beta).sigmoid() * (2 if allow_neg_eigval else 1)
    if initial_state is not None and state_v_first:
        initial_state = initial_state.mT
    unit = use_qk_l2norm_in_kernel
    out, state = delta_rule(
        prepared(q, unit),
        prepared(k, unit),
        prepared(v, False),
        beta,
        log_decay=log_decay,
        scale=scale,
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens,
    )
    if state is not None and state_v_first:
        state = state.mT.contiguous()
    return out.to(q.dtype), state


def _gradients(
    function: Function, tensors: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors that are not None, from the gradients of the function's results."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        outputs = [y for y, grad in zip(function(*leaves), grads) if grad is not None]
    inputs, incoming = [x for x in leaves if x is not None], [x for x in grads if x is not None]
    input_grads = iter(torch.autograd.grad(outputs, inputs, incoming))
    return tuple(None if x is None else next(input_grads) for x in leaves)


# ----------------------------------------------------------------------------------------- the convolution
def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The outputs, and the last W inputs of every sequence `[N, D, W]`."""
    rows = x.flatten(2)
    assert activation in ACTIVATIONS
    tail = None if initial_state is None else initial_state[:, :, 1:].mT
    y = short_convolution(
        rows, weight, bias, tail=tail, cu_seqlens=cu_seqlens, silu=activation is not None
    ).view(x.shape)
    y = y if residual is None else y + residual
    if not output_final_state:
        return y, None
    return y, causal_conv1d_update_states(rows, weight.shape[1], initial_state, cu_seqlens)


def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias, residual and initial_state."""

    def forward(x: Any, weight: Any, bias: Any, residual: Any, initial_state: Any) -> Any:
        state = (initial_state, dht is not None)
        return causal_conv1d_fwd(x, weight, bias, residual, *state, activation, cu_seqlens)

    return _gradients(forward, (x, weight, bias, residual, initial_state), (dy, dht))


def causal_conv1d_update_states(
    x: Tensor, state_len: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    rows = x if x.ndim == 3 else x[None]
    pieces = rows.unbind(0) if cu_seqlens is None else rows[0].split(cu_seqlens.diff().tolist())
    before = rows.new_zeros(len(pieces), rows.shape[2], state_len) if initial_state is None else initial_state
    return torch.stack([torch.cat([s, p.t()], 1)[:, -state_len:] for s, p in zip(before, pieces)])


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One more token per sequence; updates `cache` `[N, D, W]` in place."""
    assert weight is not None
    rows = x.reshape(-1, 1, weight.shape[0])  # [N, 1, D]
    y, state = causal_conv1d_fwd(rows, weight, bias, None, cache, True, activation)
    assert state is not None
    cache.copy_(state)
    y = y.view(x.shape)
    return y if residual is None else y + residual, cache


# ------------------------------------------------------------------------------------------------ the norm
def layer_norm_gated_fwd(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, **settings: Any
) -> tuple[Tensor, None, None, Tensor]:
    return _norm(x, g, weight, bias, **settings), None, None, x


def layer_norm_gated_bwd(
    dy: Tensor, x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, **settings: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of x, g, weight, bias and a residual."""
    return *_gradients(lambda *leaves: (_norm(*leaves, **settings),), (x, g, weight, bias), (dy,)), None


def _norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    is_rms_norm: bool = False,
    **_: Any,
) -> Tensor:
    if is_rms_norm and weight is not None and bias is None and residual is None and g.dtype == x.dtype:
        return gated_rms_norm(x, weight, g, activation=GATES[activation], eps=eps)
    raise NotImplementedError(
        "osdn only implements the gated RMS norm with a weight and without a bias or residual"
    )


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The last part of a model's gated MLP, which otherwise cannot run on a CPU."""
    return F.linear(F.silu(x) * y, weight, bias)


# the module of flash-linear-attention that defines each function, and the operation it is registered under,
# if not under its own name
IMPLEMENTATIONS: dict[Function, tuple[str, str | None]] = {
    chunk_gated_delta_rule: ("fla.ops.gated_delta_rule", "gated_delta_rule"),
    chunk_kda: ("fla.ops.kda", None),
    fused_recurrent_kda_fwd: ("fla.ops.kda.fused_recurrent", "kda"),
    **dict.fromkeys(
        (causal_conv1d_fwd, causal_conv1d_bwd, causal_conv1d_update_states, causal_conv1d_update),
        ("fla.modules.causal_conv1d", None),
    ),
    **dict.fromkeys((layer_norm_gated_fwd, layer_norm_gated_bwd), ("fla.modules.norm.fused_norm_gate", None)),
    swiglu_linear: ("fla.modules.activations", None),
}
