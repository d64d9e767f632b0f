"""Phase 2, backward: the gradient of the state goes back from chunk to chunk, then all chunks at once.

The forward is recomputed but for its outputs: what it keeps a chunk (its first state, its errors, the solved
triangular system) is exactly what the chain rule asks for.  `scan_back` carries the gradient of the state
and finds that of the writes u = beta e, `errors_back` pulls it through the triangular system, `keys_back`
collects what reaches queries, keys and decays.  A decay's gradient is summed over the pairs of tokens it lies
between, never as a difference of larger sums, so it keeps its digits where decay is strong.  docs/gpu.md has
the derivation.
"""
# mypy: allow-untyped-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from osdn.ops.triton import blocks, launch
from osdn.ops.triton.blocks import CHANNEL_DECAY, HEAD_DECAY, NO_DECAY
from osdn.ops.triton.phase2 import Inputs, load_state, recurrence, store_state


@triton.jit
def scan_back_kernel(
    decayed_queries,
    decayed_write_keys,
    solved_keys,
    scores,
    beta,
    chunk_decay,
    chunks,
    sequences,
    grad_o,
    grad_final_state,
    grad_states,
    grad_writes,
    grad_initial_state,
    scale,
    HQ: tl.constexpr,
    HW: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """From the last chunk to the first: the gradients of the state at each chunk's end and of its writes."""
    first, sequence, head = blocks.columns_of_sequence(V, BV)
    dS = tl.zeros((KP, BV), tl.float32)
    if grad_final_state is not None:
        dS += load_state(grad_final_state, sequence * HV + head, first, K, V, KP, BV)
    rows = tl.arange(0, KP)
    begin, end = tl.load(sequences + sequence), tl.load(sequences + sequence + 1)
    for back in range(end - begin):
        chunk = end - 1 - back
        start, size = blocks.chunk_at(chunks, chunk)
        store_state(grad_states, dS, chunk * HV + head, first, K, V, KP, BV)
        b_w = blocks.load_rows(decayed_write_keys, start, size, head // (HV // HW), HW, 0, K, C, KP)
        b_o = blocks.load_rows(grad_o, start, size, head, HV, first, V, C, BV).to(tl.float32) * scale
        M = blocks.load_square(scores, chunk, head, HV, C)
        du = blocks.dot(tl.trans(M), b_o, DOT, PRECISION) + blocks.dot(b_w, dS, DOT, PRECISION)
        blocks.store_rows(grad_writes, du, start, size, head, HV, first, V, C, BV)
        if chunk_decay is not None:
            dS *= tl.load(chunk_decay + blocks.row_at(chunk * HV + head, K, rows), mask=rows < K, other=0.0)[
                :, None
            ]
        b_q = blocks.load_rows(decayed_queries, start, size, head // (HV // HQ), HQ, 0, K, C, KP)
        dS += blocks.dot(tl.trans(b_q), b_o, DOT, PRECISION)
        de = du * blocks.load_scalars(beta, start, size, head, HV, C)[:, None]
        b_k = blocks.load_rows(solved_keys, start, size, head, HV, 0, K, C, KP)
        dS -= blocks.dot(tl.trans(b_k), de, DOT, PRECISION)
    if grad_initial_state is not None:
        store_state(grad_initial_state, dS, sequence * HV + head, first, K, V, KP, BV)


@triton.jit
def errors_back_kernel(
    scores,
    gram,
    solve,
    errors,
    beta,
    chunks,
    grad_o,
    grad_writes,
    grad_v,
    grad_beta,
    grad_g,
    grad_scores,
    grad_gram,
    scale,
    HV: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Through the triangular system of one chunk and head, to values, betas and the two matrices."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, size = blocks.chunk_at(chunks, chunk)
    rows = tl.arange(0, C)
    b = blocks.load_scalars(beta, start, size, head, HV, C)
    T = tl.trans(blocks.load_square(solve, chunk, head, HV, C))
    Z = tl.zeros((C, C), tl.float32)
    dM = tl.zeros((C, C), tl.float32)
    db = tl.zeros((C,), tl.float32)
    for first in range(0, V, BV):
        e = blocks.load_rows(errors, start, size, head, HV, first, V, C, BV)
        du = blocks.load_rows(grad_writes, start, size, head, HV, first, V, C, BV)
        db += tl.sum(du.to(tl.float32) * e.to(tl.float32), 1)
        dv = blocks.dot(T, du * b[:, None], DOT, PRECISION)
        blocks.store_rows(grad_v, dv, start, size, head, HV, first, V, C, BV)
        Z += blocks.dot(dv, tl.trans(e), DOT, PRECISION)
        b_o = blocks.load_rows(grad_o, start, size, head, HV, first, V, C, BV).to(tl.float32) * scale
        dM += blocks.dot(b_o, tl.trans(e), DOT, PRECISION)
    dM = tl.where(rows[:, None] >= rows[None, :], dM * b[None, :], 0.0)
    blocks.store_square(grad_scores, dM, chunk, head, HV, C)
    P = blocks.load_square(gram, chunk, head, HV, C).to(tl.float32)
    dP = tl.where(rows[:, None] > rows[None, :], -Z * b[None, :], 0.0)
    blocks.store_square(grad_gram, dP, chunk, head, HV, C)
    inside = rows < size
    place = start * HV + head + rows * HV
    tl.store(grad_beta + place, db - tl.sum(P * Z, 0), mask=inside)
    if DECAY == HEAD_DECAY:
        # Row l: the pairs (i, j) with j < l <= i, whose product holds the decay at l.
        M = blocks.load_square(scores, chunk, head, HV, C)
        below = tl.where(rows[:, None] > rows[None, :], dP * P + dM * M, 0.0)
        reaching = tl.where(rows[:, None] > rows[None, :], tl.cumsum(below, 0, reverse=True), 0.0)
        tl.store(grad_g + place, tl.sum(reaching, 1), mask=inside)


@triton.jit
def keys_back_kernel(
    q,
    k,
    w,
    g,
    beta,
    states,
    errors,
    chunks,
    grad_o,
    grad_v,
    grad_states,
    grad_scores,
    grad_gram,
    grad_q,
    grad_k,
    grad_w,
    grad_g,
    tokens_in_all,
    scale,
    H: tl.constexpr,
    HW: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    DECAY: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """To queries, keys and decays, of one chunk, head and block of key channels."""
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, size = blocks.chunk_at(chunks, chunk)
    row = block * BK
    rows = tl.arange(0, C)
    # What came from the chunk's first state, and what its last state sends back.
    dq = tl.zeros((C, BK), tl.float32)
    dk = tl.zeros((C, BK), tl.float32)
    dw = tl.zeros((C, BK), tl.float32)
    through = tl.zeros((BK,), tl.float32)
    b = blocks.load_scalars(beta, start, size, head, HV, C)[:, None]
    for first in range(0, V, BV):
        S = load_state(states, chunk * HV + head, first, K, V, BK, BV, row)
        dS = load_state(grad_states, chunk * HV + head, first, K, V, BK, BV, row)
        b_o = blocks.load_rows(grad_o, start, size, head, HV, first, V, C, BV).to(tl.float32) * scale
        dv = blocks.load_rows(grad_v, start, size, head, HV, first, V, C, BV)
        u = blocks.load_rows(errors, start, size, head, HV, first, V, C, BV) * b
        dq += blocks.dot(b_o, tl.trans(S), DOT, PRECISION)
        dk -= blocks.dot(dv, tl.trans(S), DOT, PRECISION)
        dw += blocks.dot(u, tl.trans(dS), DOT, PRECISION)
        if DECAY != NO_DECAY:
            through += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)

    b_q = blocks.load_rows(q, start, size, head // (HV // H), H, row, K, C, BK)
    b_k = blocks.load_rows(k, start, size, head // (HV // H), H, row, K, C, BK)
    b_w = blocks.load_rows(w, start, size, head // (HV // HW), HW, row, K, C, BK)
    dM = blocks.load_square(grad_scores, chunk, head, HV, C)
    dP = blocks.load_square(grad_gram, chunk, head, HV, C)
    if DECAY == HEAD_DECAY:
        b_g = blocks.log_decays(blocks.load_scalars(g, start, size, head, HV, C))
        inner, outer = blocks.head_sums(b_g, C)
        dq *= tl.exp(inner)[:, None]
        dk *= tl.exp(inner)[:, None]
        dw *= tl.exp(outer)[:, None]
        before = tl.sum(b_q * dq + b_k * dk, 1)  # of the pairs that reach back before the chunk
        beyond = tl.sum(b_w * dw, 1)  # of those that reach beyond it
        until = rows[:, None] <= rows[None, :]
        dg = tl.sum(tl.where(until, before[None, :], 0.0) + tl.where(until, 0.0, beyond[None, :]), 1)
        dg += tl.sum(through, 0) * tl.exp(tl.sum(b_g, 0))
        tl.store(
            grad_g + (block.to(tl.int64) * tokens_in_all + start) * HV + head + rows * HV,
            dg,
            mask=rows < size,
        )
        D = blocks.head_decays(b_g, C)
        dM = dM * D
        dP = dP * D
    if DECAY == CHANNEL_DECAY:
        b_g = blocks.log_decays(blocks.load_rows(g, start, size, head, HV, row, K, C, BK))
        inner, outer = blocks.channel_sums(b_g, LEVELS, C, BK)
        dq *= tl.exp(inner)
        dk *= tl.exp(inner)
        dw *= tl.exp(outer)
        dw_within = tl.zeros((C, BK), tl.float32)
        inner = b_g
        outer = tl.zeros((C, BK), tl.float32)
        for level in range(LEVELS):
            x = tl.exp(tl.where(blocks.later(level, C), inner, outer))
            dM_l = tl.where(blocks.across(level, C), dM, 0.0).to(DOT)
            dP_l = tl.where(blocks.across(level, C), dP, 0.0).to(DOT)
            dq += x * blocks.dot(dM_l, b_w * x, DOT, PRECISION)
            dk += x * blocks.dot(dP_l, b_w * x, DOT, PRECISION)
            dw_within += x * blocks.dot(tl.trans(dM_l), b_q * x, DOT, PRECISION)
            dw_within += x * blocks.dot(tl.trans(dP_l), b_k * x, DOT, PRECISION)
            inner, outer = blocks.grow(inner, outer, level, C, BK)
        # Pairs that end at a row or later, less those that also begin there; those that begin before it.
        until = tl.where(rows[:, None] <= rows[None, :], 1.0, 0.0)
        dg = tl.dot(until, b_q * dq + b_k * dk - b_w * dw_within, input_precision=PRECISION)
        dg += tl.dot(1.0 - until, b_w * dw, input_precision=PRECISION)
        dg += (through * tl.exp(tl.sum(b_g, 0)))[None, :]
        blocks.store_rows(grad_g, dg, start, size, head, HV, row, K, C, BK)
        # A token's own product has no decay in it.
        own = tl.sum(tl.where(rows[:, None] == rows[None, :], dM.to(tl.float32), 0.0), 1)[:, None]
        dq += own * b_w
        dw += dw_within + own * b_q
    else:
        dq += blocks.dot(dM, b_w, DOT, PRECISION)
        dk += blocks.dot(dP, b_w, DOT, PRECISION)
        dw += blocks.dot(tl.trans(dM), b_q, DOT, PRECISION) + blocks.dot(tl.trans(dP), b_k, DOT, PRECISION)
    blocks.store_rows(grad_q, dq, start, size, head, HV, row, K, C, BK)
    if grad_w is None:  # the plain delta rule writes with k
        dk += dw
    else:
        blocks.store_rows(grad_w, dw, start, size, head, HV, row, K, C, BK)
    blocks.store_rows(grad_k, dk, start, size, head, HV, row, K, C, BK)


class Gradients(NamedTuple):
    """Of phase 2's inputs; those of q and k with one head per value head, as the kernels leave them."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    w: Tensor | None
    g: Tensor | None
    initial_state: Tensor | None


def backward(
    x: Inputs, scale: float, grad_o: Tensor, grad_final_state: Tensor | None, plain: bool
) -> Gradients:
    """`plain`: the write keys are k, and their gradient is added to its."""
    q, k, v, beta, w, g, initial_state, at = x
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    r = recurrence(x, keep_gram=True)
    common = {"beta": beta, "chunks": at.table, "grad_o": grad_o, "scale": scale}

    grad_states, grad_writes = torch.empty_like(r.states), torch.empty_like(v)
    grad_initial_state = None if initial_state is None else torch.empty_like(r.final_state)
    launch.run(
        scan_back_kernel,
        launch.over_columns(V, at.N, HV),
        k,
        r.sizes(x),
        **common,
        decayed_queries=r.decayed_queries,
        decayed_write_keys=r.decayed_write_keys,
        solved_keys=r.solved_keys,
        scores=r.scores,
        chunk_decay=r.chunk_decay,
        sequences=at.sequences,
        grad_final_state=grad_final_state,
        grad_states=grad_states,
        grad_writes=grad_writes,
        grad_initial_state=grad_initial_state,
    )

    grad_v, grad_beta = torch.empty_like(v), beta.new_empty(beta.shape, dtype=torch.float32)
    grad_scores, grad_gram = torch.empty_like(r.scores), torch.empty_like(r.scores)
    grad_pairs = torch.empty_like(grad_beta) if g is not None and g.ndim == 3 else None
    launch.run(
        errors_back_kernel,
        lambda o: (at.count, HV),
        k,
        r.sizes(x),
        **common,
        scores=r.scores,
        gram=r.gram,
        solve=r.solve,
        errors=r.errors,
        grad_writes=grad_writes,
        grad_v=grad_v,
        grad_beta=grad_beta,
        grad_g=grad_pairs,
        grad_scores=grad_scores,
        grad_gram=grad_gram,
    )

    # Value heads that share a key head have their gradients added up, in float32.
    dtype = k.dtype if H == HV else torch.float32
    grad_q = k.new_empty(B, T, HV, K, dtype=dtype)
    grad_k = torch.empty_like(grad_q)
    grad_w = None if plain else k.new_empty(B, T, HV, K)
    grad_g = None
    if g is not None:
        # One decay a head: what each block of channels contributes, to be added up.
        parts = (triton.cdiv(K, 16), B, T, HV) if g.ndim == 3 else (B, T, HV, K)
        grad_g = g.new_zeros(parts, dtype=torch.float32)
    launch.run(
        keys_back_kernel,
        lambda o: (at.count, HV, triton.cdiv(K, o["BK"])),
        k,
        x.sizes(),
        **common,
        q=q,
        k=k,
        w=w,
        g=g,
        states=r.states,
        errors=r.errors,
        grad_v=grad_v,
        grad_states=grad_states,
        grad_scores=grad_scores,
        grad_gram=grad_gram,
        grad_q=grad_q,
        grad_k=grad_k,
        grad_w=grad_w,
        grad_g=grad_g,
        tokens_in_all=B * T,
    )
    if grad_g is not None and grad_pairs is not None:
        grad_g = grad_g.sum(0) + grad_pairs
    return Gradients(grad_q, grad_k, grad_v, grad_beta, grad_w, grad_g, grad_initial_state)
