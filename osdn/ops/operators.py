"""The public operators: arguments are checked and normalised here, then handed to a backend.

A backend is a module with `precondition_keys` (phase 1, by any rule) and `delta_rule` (phase 2), and
`preconditioned_delta_rule` where it has one fused pass, over tensors of one floating dtype; `cpu` and
`triton` take queries, keys and values of 16 bits too.
"""

import inspect
import warnings
from functools import cache
from numbers import Real
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from osdn.ops import checks, chunkwise, cpu, reference, tracing, triton
from osdn.ops.checks import Phase1, Phase2, Rule
from osdn.ops.cpu.binding import HALVES

BACKENDS: dict[str, ModuleType] = {
    "reference": reference,
    "chunkwise": chunkwise,
    "cpu": cpu,
    "triton": triton,
}


def available_backends(device: str | torch.device = "cpu") -> list[str]:
    """The backends that run on `device` here, the one `auto` would take first.

    >>> "reference" in available_backends()
    True
    """
    kind = torch.device(device).type
    backends = ["chunkwise", "reference"]
    if kind == "cpu" and cpu.compiled():
        backends.insert(0, "cpu")
    if kind == "cuda" and _launchable(kind):
        backends.insert(0, "triton")
    return backends


def precondition_keys(
    k: Tensor,
    beta: Tensor,
    *,
    eta: float = 0.003,
    bounds: tuple[float, float] | None = (0.5, 2.0),
    retention: float | Tensor | None = None,
    initial_scale: Tensor | None = None,
    beta_aware: bool = True,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Phase 1: the write keys `d * k`, where the scale `d` follows the keys by online gradient descent.

    Args:
        k: keys `[B, T, H, K]`, normalised by the caller.
        beta: write strengths `[B, T, HV]`; HV is a multiple of H.
        eta: step size of the online gradient.
        bounds: the box the scale is projected into after every token; None leaves it free.
        retention: what the scale keeps of itself at each token: None (all of it), a number,
            `[B, T, HV]` or `[B, T, HV, K]`.
        initial_scale: `[HV, K]` or `[N, HV, K]`; None is ones.
        beta_aware: whether the inner loss sees `beta`; False puts 1 in its place.
        eps: floor of the squared key norm.
        cu_seqlens: `[N + 1]` boundaries of sequences packed into one row; the scale restarts at each.
        backend: "auto" or one of `available_backends()`.

    Returns:
        write_keys `[B, T, HV, K]` in k's dtype, and the final scale `[N, HV, K]` in float32 (float64 for
        float64 keys).
    """
    settings = checks.scaling(eta, bounds, beta_aware, eps)
    return _write_keys(
        settings, k, {"beta": beta}, retention, {"initial_scale": initial_scale}, None, cu_seqlens, backend
    )


def newton_keys(
    k: Tensor,
    beta: Tensor,
    *,
    prior: float = 1.0,
    block_size: int = 1,
    retention: float | Tensor | None = None,
    initial_covariance: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Phase 1 by Newton's method: `w = P k / (1 + beta k . P k)`, with no step size and no box.

    The covariance `P` is block-diagonal and follows the keys as in recursive least squares.  With one block
    for all channels and no retention, the delta rule with these write keys solves the ridge regression
    `argmin_S sum_i beta_i |S' k_i - v_i|^2 + |S|^2 / prior` exactly.  For every `beta >= 0`, `P` stays
    between zero and `prior`, and `beta w . k` below one.

    Args:
        k: keys `[B, T, H, K]`.
        beta: write strengths `[B, T, HV]`; HV is a multiple of H.
        prior: the covariance starts at `prior` times the identity, and retention draws it back there.
        block_size: channels per block of the covariance, b; it divides K.  1 is a diagonal.
        retention: what the covariance keeps of itself at each token: None (all of it), a number up to 1,
            `[B, T, HV]`, or one per block, `[B, T, HV, K / b]`.
        initial_covariance: `[N, HV, K / b, b, b]` or `[HV, K / b, b, b]`, of which the symmetric part counts.
        cu_seqlens: `[N + 1]` boundaries of sequences packed into one row; the covariance restarts at each.
        backend: "auto" or one of `available_backends()`.

    Returns:
        write_keys `[B, T, HV, K]` in k's dtype, and the final covariance `[N, HV, K / b, b, b]` in float32
        (float64 for float64 keys).
    """
    settings = checks.newton(prior, block_size, checks.keys(k)[3])
    initial = {"initial_covariance": initial_covariance}
    return _write_keys(settings, k, {"beta": beta}, retention, initial, None, cu_seqlens, backend)


def pgdn_keys(
    k: Tensor,
    gain: Tensor,
    *,
    squash: float = 1.5,
    center: float | Tensor = -0.2,
    retention: float | Tensor | None = None,
    initial_gram: Tensor | None = None,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Phase 1 of Preconditioned Gated DeltaNet (Tumma et al. 2026, https://arxiv.org/abs/2604.21100).

    `gram = retention gram + gain k^2` is the diagonal of the keys' decayed Gram matrix, this token included,
    and `w = squash ** -softsign(log(gram + eps) - center) k`.

    Args:
        k: keys `[B, T, H, K]`.
        gain: how much of each key is added, `[B, T, HV]`; HV is a multiple of H.
        squash: write keys are between `k / squash` and `squash k`.
        center: the logarithm of the Gram diagonal at which a key is left as it is; a number or `[HV]`.
        retention: what the Gram diagonal keeps of itself at each token: None (all of it), a number,
            `[B, T, HV]` or `[B, T, HV, K]`.
        initial_gram: `[HV, K]` or `[N, HV, K]`; None is zeros.
        eps: added to the Gram diagonal before its logarithm.
        cu_seqlens: `[N + 1]` boundaries of sequences packed into one row; the Gram diagonal restarts at each.
        backend: "auto" or one of `available_backends()`.

    Returns:
        write_keys `[B, T, HV, K]` in k's dtype, and the final Gram diagonal `[N, HV, K]` in float32 (float64
        for float64 keys).
    """
    settings, initial = checks.squash(squash, eps), {"initial_gram": initial_gram}
    return _write_keys(settings, k, {"gain": gain}, retention, initial, center, cu_seqlens, backend)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    write_keys: Tensor | None = None,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Phase 2: the delta rule, reading with `k` and writing with `write_keys`.

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`; HV is a multiple of H.
        beta: write strengths `[B, T, HV]`.
        write_keys: `[B, T, HV, K]`; None is `k`, the plain delta rule.
        log_decay: None (DeltaNet), `[B, T, HV]` (Gated DeltaNet) or `[B, T, HV, K]` (KDA); not above zero,
            since a state that grows loses its digits: see docs/reliability.md.
        scale: factor of the output; None is `K ** -0.5`.
        initial_state: `[N, HV, K, V]`; None is zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: `[N + 1]` boundaries of sequences packed into one row; the state restarts at each.
        backend: "auto" or one of `available_backends()`.

    Returns:
        outputs `[B, T, HV, V]` in v's dtype, and the final state `[N, HV, K, V]` in float32 (float64 for
        float64 inputs) or None.
    """
    checks.flag("output_final_state", output_final_state)
    x, module = _phase2(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, backend)
    if write_keys is not None:
        checks.tensor("write_keys", write_keys, (*beta.shape, k.shape[3]), "[B, T, HV, K]", k.device)
        write_keys = _operand(write_keys, module, k)
    o, final_state = module.delta_rule(x, write_keys)
    return _cast(o, v.dtype), final_state if output_final_state else None


def online_scaled_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    eta: float = 0.003,
    bounds: tuple[float, float] | None = (0.5, 2.0),
    retention: float | Tensor | None = None,
    initial_scale: Tensor | None = None,
    beta_aware: bool = True,
    eps: float = 1e-6,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Both phases: `delta_rule` with the write keys of `precondition_keys`, in one pass where there is one.

    The arguments are those of the two functions.  Returns the outputs, the final state (None unless asked
    for) and the final scale.

    >>> q, k, v = (torch.nn.functional.normalize(torch.randn(2, 5, 4, 8), dim=-1) for _ in range(3))
    >>> o, state, scale = online_scaled_delta_rule(q, k, v, torch.rand(2, 5, 4), output_final_state=True)
    >>> o.shape, state.shape, scale.shape
    (torch.Size([2, 5, 4, 8]), torch.Size([2, 4, 8, 8]), torch.Size([2, 4, 8]))
    """
    rule = checks.scaling(eta, bounds, beta_aware, eps)
    x, module = _phase2(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, backend)
    phase1 = _phase1(rule, k, {"beta": beta}, retention, {"initial_scale": initial_scale}, None, cu_seqlens)
    return _both_phases(module, x, phase1, v.dtype, output_final_state)


def newton_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    prior: float = 1.0,
    block_size: int = 1,
    retention: float | Tensor | None = None,
    initial_covariance: Tensor | None = None,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Both phases: `delta_rule` with the write keys of `newton_keys`, in one pass where there is one.

    The arguments are those of the two functions.  Returns the outputs, the final state (None unless asked
    for) and the final covariance.
    """
    rule = checks.newton(prior, block_size, checks.keys(k)[3])
    x, module = _phase2(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, backend)
    phase1 = _phase1(
        rule, k, {"beta": beta}, retention, {"initial_covariance": initial_covariance}, None, cu_seqlens
    )
    return _both_phases(module, x, phase1, v.dtype, output_final_state)


def pgdn_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gain: Tensor,
    *,
    squash: float = 1.5,
    center: float | Tensor = -0.2,
    retention: float | Tensor | None = None,
    initial_gram: Tensor | None = None,
    eps: float = 1e-6,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Both phases: `delta_rule` with the write keys of `pgdn_keys`, in one pass where there is one.

    The arguments are those of the two functions.  Returns the outputs, the final state (None unless asked
    for) and the final Gram diagonal.
    """
    rule = checks.squash(squash, eps)
    x, module = _phase2(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, backend)
    checks.tensor("gain", gain, tuple(beta.shape), "[B, T, HV]", k.device)
    phase1 = _phase1(rule, k, {"gain": gain}, retention, {"initial_gram": initial_gram}, center, cu_seqlens)
    return _both_phases(module, x, phase1, v.dtype, output_final_state)


def _write_keys(
    rule: Rule,
    k: Tensor,
    gate: dict[str, Any],  # one entry: its name and the tensor
    retention: Any,
    initial: dict[str, Any],
    center: Any,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Phase 1 by any rule."""
    phase1 = _phase1(rule, k, gate, retention, initial, center, cu_seqlens)
    module = _select(backend, k)
    w, final = module.precondition_keys(_operand(k, module, k), phase1, cu_seqlens)
    return _cast(w, k.dtype), final


def _both_phases(
    module: ModuleType, x: Phase2, phase1: Phase1, dtype: torch.dtype, output_final_state: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    checks.flag("output_final_state", output_final_state)
    if hasattr(module, "preconditioned_delta_rule"):
        o, final_state, final = module.preconditioned_delta_rule(x, phase1)
    else:
        w, final = module.precondition_keys(x.k, phase1, x.cu_seqlens)
        o, final_state = module.delta_rule(x, w)
    return _cast(o, dtype), final_state if output_final_state else None, final


def _phase1(
    rule: Rule,
    k: Tensor,
    gate: dict[str, Any],  # one entry: its name and the tensor
    retention: Any,
    initial: dict[str, Any],
    center: Any,
    cu_seqlens: Tensor | None,
) -> Phase1:
    """What a backend is given of phase 1, checked and in one dtype."""
    B, T, H, K = checks.keys(k)
    ((name, x),) = gate.items()
    HV = checks.value_heads(name, x, 3, "[B, T, HV]", H)
    checks.tensor(name, x, (B, T, HV), "[B, T, HV]", k.device)
    N, dtype = checks.sequence_count(cu_seqlens, B), _compute_dtype(k)
    shape, channels, most = (B, T, HV, K), "K", None
    if isinstance(rule, checks.Newton):
        shape, channels, most = (B, T, HV, K // rule.block_size), "K / b", 1
    return Phase1(
        rule,
        _cast(x, dtype),
        _retention(retention, shape, k.device, dtype, channels, most),
        _initial(rule, initial, (N, HV, K), k.device, dtype),
        _center(center, HV, k.device, dtype) if isinstance(rule, checks.Squash) else None,
    )


def _phase2(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    log_decay: Any,
    scale: Any,
    initial_state: Any,
    cu_seqlens: Any,
    backend: str,
) -> tuple[Phase2, ModuleType]:
    """What a backend is given of phase 2, checked and in its dtypes, and that backend."""
    B, T, H, K = checks.keys(k)
    checks.tensor("q", q, (B, T, H, K), "[B, T, H, K]", k.device)
    HV = checks.value_heads("v", v, 4, "[B, T, HV, V]", H)
    V = v.shape[3]
    if V < 1:
        raise ValueError(f"v has shape {list(v.shape)}; it needs at least one channel")
    checks.tensor("v", v, (B, T, HV, V), "[B, T, HV, V]", k.device)
    checks.same_dtype(q=q, k=k, v=v)
    checks.tensor("beta", beta, (B, T, HV), "[B, T, HV]", k.device)
    N = checks.sequence_count(cu_seqlens, B)
    if initial_state is not None:
        checks.tensor("initial_state", initial_state, (N, HV, K, V), "[N, HV, K, V]", k.device)
    module, dtype = _select(backend, k), _compute_dtype(k)
    inputs = Phase2(
        q=_operand(q, module, k),
        k=_operand(k, module, k),
        v=_operand(v, module, k),
        beta=_cast(beta, dtype),
        log_decay=_log_decay(log_decay, (B, T, HV, K), k.device, dtype),
        initial_state=None if initial_state is None else _cast(initial_state, dtype),
        scale=K**-0.5 if scale is None else checks.number("scale", scale),
        cu_seqlens=cu_seqlens,
    )
    return inputs, module


def check_backend(backend: Any) -> None:
    """Refuse what is no backend's name."""
    if not isinstance(backend, str) or backend not in ("auto", *BACKENDS):
        raise ValueError(f'backend is {backend!r}; it must be "auto" or one of {", ".join(BACKENDS)}')


@tracing.constant_in_graphs
def _launchable(kind: str) -> bool:
    return triton.available(kind)


def _select(backend: str, k: Tensor) -> ModuleType:
    device, transformed = k.device, tracing.in_transform()
    if backend == "auto":
        backend = "chunkwise"
        if device.type == "cpu" and not transformed and cpu.compiled(_compute_dtype(k)):
            backend = "cpu"
        elif (
            device.type == "cuda"
            and not transformed
            and k.dtype != torch.float64
            and _launchable(device.type)
        ):
            backend = "triton"
    check_backend(backend)
    if transformed and backend in ("cpu", "triton"):
        raise ValueError(
            f'backend="{backend}" knows neither torch.func nor forward-mode differentiation; '
            'use backend="auto" or backend="chunkwise" there'
        )
    if backend == "cpu":
        if device.type != "cpu":
            raise ValueError(f'backend="cpu" needs tensors on the CPU; they are on {device}')
        if not cpu.compiled(_compute_dtype(k)):
            backend = "chunkwise"  # the reason was given when the compilation was tried
    if backend == "triton" and not _launchable(device.type):
        raise ValueError(
            f'backend="triton" needs the package triton and tensors on a GPU; they are on {device}'
        )
    return BACKENDS[backend]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # Tensor.to costs a microsecond even when it does nothing


def _compute_dtype(k: Tensor) -> torch.dtype:
    return torch.float64 if k.dtype == torch.float64 else torch.float32


def _operand(x: Tensor, module: ModuleType, k: Tensor) -> Tensor:
    """Queries, keys and values: compiled kernels take 16 bits as they come and sum in float32."""
    if module is triton:
        return _cast(x, k.dtype)
    if module is cpu and x.dtype in HALVES and k.dtype != torch.float64:
        return x
    return _cast(x, _compute_dtype(k))


def _log_decay(x: Any, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor | None:
    if x is None:
        return None
    _per_head_or_channel("log_decay", x, shape, device)
    # Not in decoding, where a look costs a tenth of the call, nor where it would wait for a GPU or be traced.
    looks = shape[1] > 1 and x.device.type == "cpu" and x.numel() > 0
    if looks and not tracing.is_traced([x]) and not tracing.in_transform() and x.detach().amax() > 0:
        _warn_of_growth()
    return _cast(x, dtype)


@cache
def _warn_of_growth() -> None:
    stack = inspect.stack(0)
    depth = next(i for i, frame in enumerate(stack, start=1) if frame.filename != stack[0].filename)
    warnings.warn(
        "log_decay has elements above 0, so the state grows instead of decaying; is a minus sign missing? "
        "Growth beyond exp(88) within 64 tokens overflows float32.",
        stacklevel=depth,
    )


def _retention(
    x: Any,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    channels: str = "K",
    most: float | None = None,
) -> float | Tensor:
    if x is None:
        return 1.0
    if isinstance(x, (int, float, Real)):
        x = checks.number("retention", x, 0)
        if most is not None and x > most:
            raise ValueError(f"retention is {x}; it must be between 0 and {most}")
        return x
    _per_head_or_channel("retention", x, shape, device, channels)
    return _cast(x, dtype)


def _per_head_or_channel(
    name: str, x: Any, shape: tuple[int, ...], device: torch.device, channels: str = "K"
) -> None:
    if isinstance(x, Tensor) and x.ndim == 3:
        checks.tensor(name, x, shape[:3], "[B, T, HV]", device)
    else:
        checks.tensor(name, x, shape, f"[B, T, HV] or [B, T, HV, {channels}]", device)


def _initial(
    rule: Rule, initial: dict[str, Any], sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """The state that phase 1 starts from; one that all sequences share has no first dimension."""
    ((name, x),) = initial.items()
    if x is None:
        return None
    N, HV, K = sizes
    shape = (N, HV, *checks.state_shape(rule, K))
    layout = "HV, K / b, b, b" if isinstance(rule, checks.Newton) else "HV, K"
    if isinstance(x, Tensor) and x.ndim == len(shape) - 1:
        checks.tensor(name, x, shape[1:], f"[{layout}]", device)
        x = x.expand(shape)
    checks.tensor(name, x, shape, f"[{layout}] or [N, {layout}]", device)
    x = _cast(x, dtype)
    return (x + x.mT) / 2 if isinstance(rule, checks.Newton) and rule.block_size > 1 else x


def _center(x: Any, HV: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(x, (int, float, Real)):
        return torch.full((HV,), checks.number("center", x), dtype=dtype, device=device)
    checks.tensor("center", x, (HV,), "a number or [HV]", device)
    return _cast(x, dtype)
