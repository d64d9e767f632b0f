"""The two phases as they are defined, token by token: the oracle every other backend is compared with.

`scan_scale` and `scan_state` are the definition; autograd differentiates them as they stand.  The two
functions below them fill in defaults and run the loops once for every packed sequence.
"""

from itertools import pairwise

import torch
from torch import Tensor

from osdn.ops.checks import Scaling, boundaries


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


def precondition_keys(
    k: Tensor,
    beta: Tensor,
    retention: float | Tensor,
    initial_scale: Tensor | None,
    settings: Scaling,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    k = _per_value_head(k, beta.shape[2])
    d = _default(initial_scale, 1.0, k, (k.shape[2], k.shape[3]), cu_seqlens)
    if cu_seqlens is None:
        return scan_scale(k, beta, retention, d, settings)
    r = retention
    pieces = [
        scan_scale(k[:, s], beta[:, s], r if isinstance(r, float) else r[:, s], d_n, settings)
        for s, d_n in zip(_slices(cu_seqlens, k.shape[1]), d.split(1))
    ]
    return torch.cat([w for w, _ in pieces], 1), torch.cat([d for _, d in pieces])


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
    q, k = _per_value_head(q, v.shape[2]), _per_value_head(k, v.shape[2])
    w = k if write_keys is None else write_keys
    S = _default(initial_state, 0.0, v, (k.shape[2], k.shape[3], v.shape[3]), cu_seqlens)
    if cu_seqlens is None:
        return scan_state(q, k, v, beta, w, log_decay, S, scale)
    g = log_decay
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


def _default(
    x: Tensor | None, fill: float, like: Tensor, shape: tuple[int, ...], cu_seqlens: Tensor | None
) -> Tensor:
    N = like.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return like.new_full((N, *shape), fill) if x is None else x


def _slices(cu_seqlens: Tensor, T: int) -> list[slice]:
    cuts = boundaries(cu_seqlens, T)
    return [slice(a, b) for a, b in pairwise(cuts)]
