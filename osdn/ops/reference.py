"""The two phases as they are defined, token by token: the oracle every other backend is compared with.

`scan_state` and, for each rule of phase 1, `scan_scale`, `scan_covariance` or `scan_gram` are the definition;
autograd differentiates them as they stand.  The two functions below them fill in defaults and run the loops
once for every packed sequence.
"""

from itertools import pairwise

import torch
from torch import Tensor

from osdn.ops.checks import Newton, Phase1, Phase2, Scaling, Squash, boundaries, first_state


def scan_scale(
    k: Tensor,  # [B, T, H, K]
    beta: Tensor,  # [B, T, H]
    retention: float | Tensor,  # a number, [B, T, H] or [B, T, H, K]
    d: Tensor,  # [B, H, K], the initial scale
    settings: Scaling,
) -> tuple[Tensor, Tensor]:
    """Phase 1: online gradient descent on the scale `d`, from the keys alone."""
    eta, bounds, beta_aware, eps = settings
    write_keys = []
    for t in range(k.shape[1]):
        k_t = k[:, t]  # [B, H, K]
        write_keys.append(d * k_t)
        k2 = k_t.square()
        b = beta[:, t, :, None] if beta_aware else 1.0
        n = k2.sum(-1, keepdim=True).clamp_min(eps)
        r = retention if isinstance(retention, float) else _per_channel(retention[:, t], d)
        d = r * d + eta * b * (1 - b * (d * k2).sum(-1, keepdim=True)) / n * k2
        if bounds is not None:
            d = d.clamp(*bounds)
    if not write_keys:
        return torch.zeros_like(k), d.clone()
    return torch.stack(write_keys, 1), d


def scan_covariance(
    k: Tensor,  # [B, T, H, K]
    beta: Tensor,  # [B, T, H]
    retention: float | Tensor,  # a number, [B, T, H] or [B, T, H, K / b]
    P: Tensor,  # [B, H, K / b, b, b], the initial covariance
    settings: Newton,
) -> tuple[Tensor, Tensor]:
    """Phase 1 by Newton's method: recursive least squares on the blocks of the covariance `P`."""
    prior, b = settings
    prior_covariance = prior * torch.eye(b, dtype=P.dtype, device=P.device)
    write_keys = []
    for t in range(k.shape[1]):
        k_t = k[:, t].unflatten(-1, (-1, b))  # [B, H, K / b, b]
        beta_t = beta[:, t, :, None, None]
        y = (P * k_t[..., None, :]).sum(-1)
        n = 1 + beta_t * (k_t * y).sum((-2, -1), keepdim=True)
        write_keys.append((y / n).flatten(-2))
        P = P - (beta_t / n)[..., None] * (y[..., :, None] * y[..., None, :])
        if isinstance(retention, float):
            r: float | Tensor = retention
        else:
            r = _per_channel(retention[:, t], k[:, t])[..., None, None]
        P = r * P + (1 - r) * prior_covariance
    if not write_keys:
        return torch.zeros_like(k), P.clone()
    return torch.stack(write_keys, 1), P


def scan_gram(
    k: Tensor,  # [B, T, H, K]
    gain: Tensor,  # [B, T, H]
    retention: float | Tensor,  # a number, [B, T, H] or [B, T, H, K]
    A: Tensor,  # [B, H, K], the initial diagonal of the keys' Gram matrix
    settings: Squash,
    center: Tensor,  # [H]
) -> tuple[Tensor, Tensor]:
    """Phase 1 of Preconditioned Gated DeltaNet: keys divided by how often their channels were written."""
    write_keys = []
    for t in range(k.shape[1]):
        r = retention if isinstance(retention, float) else _per_channel(retention[:, t], A)
        A = r * A + gain[:, t, :, None] * k[:, t].square()
        often = (A + settings.eps).log() - center[:, None]
        write_keys.append(settings.bound ** -(often / (1 + often.abs())) * k[:, t])
    if not write_keys:
        return torch.zeros_like(k), A.clone()
    return torch.stack(write_keys, 1), A


def scan_state(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, H, V]
    beta: Tensor,  # [B, T, H]
    write_keys: Tensor,  # [B, T, H, K]
    log_decay: Tensor | None,  # [B, T, H] or [B, T, H, K]
    S: Tensor,  # [B, H, K, V], the initial state
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Phase 2: decay the state, read it with k, write the error with the write key, read it with q."""
    outputs = []
    for t in range(k.shape[1]):
        if log_decay is not None:
            S = _per_channel(log_decay[:, t], k[:, t])[..., None].exp() * S
        u = beta[:, t, :, None] * (v[:, t] - _read(S, k[:, t]))  # [B, H, V]
        S = S + write_keys[:, t, :, :, None] * u[:, :, None, :]
        outputs.append(scale * _read(S, q[:, t]))
    if not outputs:
        return torch.zeros_like(v), S.clone()
    return torch.stack(outputs, 1), S


def precondition_keys(k: Tensor, phase1: Phase1, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    rule, gate, r, state, center = phase1
    (B, T, _, K), HV = k.shape, gate.shape[2]
    k = _per_value_head(k, HV)
    if state is None:
        state = first_state(rule, k, B if cu_seqlens is None else len(cu_seqlens) - 1, HV, K)
    if cu_seqlens is None:
        return _scan(k, Phase1(rule, gate, r, state, center))
    pieces = []
    for s, state_n in zip(_slices(cu_seqlens, T), state.split(1)):
        r_n = r if isinstance(r, float) else r[:, s]
        pieces.append(_scan(k[:, s], Phase1(rule, gate[:, s], r_n, state_n, center)))
    return torch.cat([w for w, _ in pieces], 1), torch.cat([state for _, state in pieces])


def _scan(k: Tensor, phase1: Phase1) -> tuple[Tensor, Tensor]:
    rule, gate, retention, state, center = phase1
    assert state is not None
    if isinstance(rule, Scaling):
        return scan_scale(k, gate, retention, state, rule)
    if isinstance(rule, Newton):
        return scan_covariance(k, gate, retention, state, rule)
    assert center is not None
    return scan_gram(k, gate, retention, state, rule, center)


def delta_rule(x: Phase2, write_keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    v, beta, g, scale, cu_seqlens = x.v, x.beta, x.log_decay, x.scale, x.cu_seqlens
    q, k = _per_value_head(x.q, v.shape[2]), _per_value_head(x.k, v.shape[2])
    w = k if write_keys is None else write_keys
    S = x.initial_state
    if S is None:
        N = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
        S = v.new_zeros(N, *k.shape[2:], v.shape[3])
    if cu_seqlens is None:
        return scan_state(q, k, v, beta, w, g, S, scale)
    pieces = [
        scan_state(q[:, s], k[:, s], v[:, s], beta[:, s], w[:, s], None if g is None else g[:, s], S_n, scale)
        for s, S_n in zip(_slices(cu_seqlens, k.shape[1]), S.split(1))
    ]
    return torch.cat([o for o, _ in pieces], 1), torch.cat([S for _, S in pieces])


def _read(S: Tensor, key: Tensor) -> Tensor:
    return (key[..., None] * S).sum(-2)  # [B, H, V]


def _per_channel(x: Tensor, like: Tensor) -> Tensor:
    return x if x.ndim == like.ndim else x[..., None]


def _per_value_head(x: Tensor, HV: int) -> Tensor:
    return x.repeat_interleave(HV // x.shape[2], 2) if x.shape[2] != HV else x


def _slices(cu_seqlens: Tensor, T: int) -> list[slice]:
    cuts = boundaries(cu_seqlens, T)
    return [slice(a, b) for a, b in pairwise(cuts)]
