"""Fast forms of the rows that are delta rules in disguise: one call of the operator each.

The functions take and return what the step functions do, but for all tokens at once: the state first, then
the inputs and weights by name, in the operators' layout `[B, T, H, axes]`.  A matrix state is always
`[B, H, K, V]`, even if the row's own is transposed.  The algebra lives in `osdn.layers.updates`.
"""

from typing import Any

import torch
from torch import Tensor

from osdn.layers.updates import (
    among_writes,
    efla_step,
    in_a_row,
    kaczmarz_step,
    longhorn_step,
    undo_decay,
)
from osdn.ops import delta_rule, online_scaled_delta_rule

Tensors = tuple[Tensor, ...]


def delta_net(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **settings: Any) -> Tensors:
    o, state = delta_rule(
        q, k, v, beta[..., 0], scale=1.0, initial_state=S, output_final_state=True, **settings
    )
    assert state is not None
    return state, o


def gdn(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensors:
    return delta_net(S, q, k, v, beta, log_decay=_log(alpha))


def osdn(
    S: Tensor,
    d: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor | None = None,
    r: Tensor | None = None,
) -> Tensors:
    o, state, scale = online_scaled_delta_rule(
        q,
        k,
        v,
        beta[..., 0],
        retention=None if r is None else r[..., 0],
        initial_scale=d,
        log_decay=None if alpha is None else _log(alpha),
        scale=1.0,
        initial_state=S,
        output_final_state=True,
    )
    assert state is not None
    return state, scale, o


def longhorn(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensors:
    """One write strength per value channel: each channel becomes a value head, and all share a key head."""
    B, T, H, V = v.shape
    step = longhorn_step(beta, _square(k)).reshape(B, T, H * V, 1)
    S = S.mT.reshape(B, H * V, k.shape[-1], 1)
    S, o = delta_net(S, q, k, v.reshape(B, T, H * V, 1), step)
    return S.reshape(B, H, V, k.shape[-1]).mT, o.reshape(B, T, H, V)


def efla(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensors:
    return delta_net(S, q, k, v, efla_step(beta, _square(k)))


def kaczmarz(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensors:
    return gdn(S, q, k, v, kaczmarz_step(beta, _square(k)), alpha)


def comba(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor, b: Tensor, D: Tensor
) -> Tensors:
    read, log_decay = undo_decay(b * k, _log(alpha))
    return delta_net(S, q - D * k, read, v, beta, write_keys=k, log_decay=log_decay)


def gdn2(S: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor, w: Tensor, alpha: Tensor) -> Tensors:
    ones = torch.ones_like(b[..., :1])
    return delta_net(S, q, b * k, w * v, ones, write_keys=k, log_decay=_log(alpha))


def delta_product(
    S: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    k2: Tensor,
    v2: Tensor,
    beta2: Tensor,
    alpha: Tensor,
) -> Tensors:
    keys, values, gates = (in_a_row(torch.cat(x, 2), 2) for x in ((k, k2), (v, v2), (beta, beta2)))
    log_decay = among_writes(_log(alpha), 2, last=False)
    S, o = delta_net(S, among_writes(q, 2, last=True), keys, values, gates, log_decay=log_decay)
    return S, o[:, 1::2]


def _square(k: Tensor) -> Tensor:
    return k.square().sum(-1, keepdim=True)


def _log(alpha: Tensor) -> Tensor:
    """The logarithm of the decay: `[B, T, H]` if it is per head, `[B, T, H, K]` if per channel."""
    log = alpha.clamp_min(torch.finfo(alpha.dtype).tiny).log()
    return log[..., 0] if log.shape[-1] == 1 else log
