"""Both phases token by token in one launch, for decoding: a program holds a block of the state's columns.

A token needs the whole scale but each column of the state only for itself, so every program advances the
scale on its own, which costs K multiplications, and the first one writes it.
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from osdn.ops.checks import Scaling
from osdn.ops.triton import blocks, launch, phase1, phase2
from osdn.ops.triton.blocks import CHANNEL_DECAY, HEAD_DECAY
from osdn.ops.triton.phase1 import (
    CHANNEL_RETENTION,
    HEAD_RETENTION,
    load_center,
    load_row,
    load_scale,
    step,
)
from osdn.ops.triton.phase2 import load_state, store_state


@triton.jit
def recurrent_kernel(
    q,
    k,
    v,
    beta,
    gate,
    w,
    g,
    retention,
    initial_scale,
    center,
    initial_state,
    tokens,
    o,
    final_state,
    final_scale,
    scale,
    constant,
    first_scale,
    eta,
    eps,
    low,
    high,
    H: tl.constexpr,
    HW: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    ONLINE: tl.constexpr,
    RULE: tl.constexpr,
    RETENTION: tl.constexpr,
    BETA_AWARE: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """One sequence, head and block of value columns; `final_state` may be `initial_state`."""
    first, sequence, head = blocks.columns_of_sequence(V, BV)
    rows, columns = tl.arange(0, KP), first + tl.arange(0, BV)
    S = tl.zeros((KP, BV), tl.float32)
    if initial_state is not None:
        S += load_state(initial_state, sequence * HV + head, first, K, V, KP, BV).to(tl.float32)
    if ONLINE:
        d = load_scale(initial_scale, first_scale, sequence * HV + head, K, KP)
        c = load_center(center, head)
    for t in range(tl.load(tokens + sequence), tl.load(tokens + sequence + 1)):
        token = tl.cast(t, tl.int64)
        b_k = load_row(k, token, head // (HV // H), H, K, rows)
        b = tl.load(beta + token * HV + head).to(tl.float32)
        if ONLINE:
            r = constant
            if RETENTION == HEAD_RETENTION:
                r = tl.load(retention + token * HV + head).to(tl.float32)
            if RETENTION == CHANNEL_RETENTION:
                r = load_row(retention, token, head, HV, K, rows)
            seen = tl.load(gate + token * HV + head).to(tl.float32) if BETA_AWARE else 1.0
            b_w, d = step(d, b_k, seen, r, c, eta, eps, low, high, RULE, BOUNDED)
        else:
            b_w = load_row(w, token, head // (HV // HW), HW, K, rows)
        if DECAY == HEAD_DECAY:
            S *= tl.exp(tl.load(g + token * HV + head).to(tl.float32))
        if DECAY == CHANNEL_DECAY:
            S *= tl.exp(load_row(g, token, head, HV, K, rows))[:, None]
        e = load_row(v, token, head, HV, V, columns) - tl.sum(S * b_k[:, None], 0)
        S += b_w[:, None] * (b * e)[None, :]
        b_q = load_row(q, token, head // (HV // H), H, K, rows)
        b_o = scale * tl.sum(S * b_q[:, None], 0)
        tl.store(o + (token * HV + head) * V + columns, b_o.to(o.dtype.element_ty), mask=columns < V)
    store_state(final_state, S, sequence * HV + head, first, K, V, KP, BV)
    if ONLINE:  # noqa: SIM102  (a constant of the compilation, `first` is none)
        if first == 0:
            tl.store(final_scale + blocks.row_at(sequence * HV + head, K, rows), d, mask=rows < K)


def forward(
    x: phase2.Inputs, scaling: phase1.Inputs | None, scale: float, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, T, HV, V], final state [N, HV, K, V], final scale [N, HV, K]; no phase 1 without `scaling`.

    With `in_place` the final state is written over the initial one, which must be float32.
    """
    K, (HV, V), N = x.k.shape[3], x.v.shape[2:], x.at.N
    o = torch.empty_like(x.v)
    final_state = x.initial_state
    if final_state is None or not in_place:
        final_state = x.k.new_empty(N, HV, K, V, dtype=torch.float32)
    final_scale = x.k.new_empty(N if scaling else 0, HV, K, dtype=torch.float32)
    off = phase1.Inputs(x.k, x.beta, 1.0, None, Scaling(0.0, None, False, 1.0), x.at)
    p = scaling or off
    launch.run(
        recurrent_kernel,
        launch.over_columns(V, N, HV),
        x.k,
        {**p.sizes(), **x.sizes(), "ONLINE": scaling is not None},
        q=x.q,
        k=x.k,
        v=x.v,
        beta=x.beta,
        gate=p.beta,
        w=x.w,
        g=x.g,
        initial_scale=p.initial_scale,
        center=p.center,
        first_scale=p.first,
        initial_state=x.initial_state,
        tokens=x.at.tokens,
        o=o,
        final_state=final_state,
        final_scale=final_scale,
        scale=scale,
        **p.retention_args(),
        **p.numbers(),
    )
    return o, final_state, final_scale
