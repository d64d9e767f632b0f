"""Phase 2, forward: the delta rule over chunks, as matrix products on tensor cores.

Within a chunk that starts from the state S, with decays D_ij between tokens, read keys k and write keys w,

    e_i = v_i - S' k_i D_i - sum_{j<i} (k_i D_ij w_j) beta_j e_j         the error token i is written with
    o_i = scale (S' q_i D_i + sum_{j<=i} (q_i D_ij w_j) beta_j e_j)

so the errors solve a triangular system whose inverse is small and is found for all chunks at once (`gram`,
`solve`).  Only the state itself goes from chunk to chunk (`scan`); outputs follow for all chunks at once
(`read`).  The system is (I + P diag(beta)) e = ..., with beta inside, so that nothing divides by beta.
docs/gpu.md derives this and the backward.
"""
# mypy: allow-untyped-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from osdn.ops.triton import blocks, launch
from osdn.ops.triton.blocks import CHANNEL_DECAY, HEAD_DECAY, NO_DECAY
from osdn.ops.triton.chunks import Chunks


@triton.jit
def gram_kernel(
    q,
    k,
    w,
    beta,
    g,
    chunks,
    scores,
    gram,
    solve,
    H: tl.constexpr,
    HW: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    DECAY: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
    ROUGH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P_ij = k_i D_ij w_j, M_ij = q_i D_ij w_j and (I + P diag(beta))^-1, of one chunk and head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, size = blocks.chunk_at(chunks, chunk)
    rows = tl.arange(0, C)
    P = tl.zeros((C, C), tl.float32)
    M = tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        b_q = blocks.load_rows(q, start, size, head // (HV // H), H, first, K, C, BK)
        b_k = blocks.load_rows(k, start, size, head // (HV // H), H, first, K, C, BK)
        b_w = blocks.load_rows(w, start, size, head // (HV // HW), HW, first, K, C, BK)
        if DECAY == CHANNEL_DECAY:
            M += tl.where(rows[:, None] == rows[None, :], blocks.dot(b_q, tl.trans(b_w), DOT, PRECISION), 0.0)
            inner = blocks.log_decays(blocks.load_rows(g, start, size, head, HV, first, K, C, BK))
            outer = tl.zeros((C, BK), tl.float32)
            for level in range(LEVELS):
                # From a row of the later half back to the boundary, from there to one of the earlier half.
                x = tl.exp(tl.where(blocks.later(level, C), inner, outer))
                t_w = tl.trans((b_w * x).to(DOT))
                P += tl.where(blocks.across(level, C), blocks.dot(b_k * x, t_w, DOT, PRECISION), 0.0)
                M += tl.where(blocks.across(level, C), blocks.dot(b_q * x, t_w, DOT, PRECISION), 0.0)
                inner, outer = blocks.grow(inner, outer, level, C, BK)
        else:
            P += blocks.dot(b_k, tl.trans(b_w), DOT, PRECISION)
            M += blocks.dot(b_q, tl.trans(b_w), DOT, PRECISION)
    if DECAY == HEAD_DECAY:
        D = blocks.head_decays(blocks.log_decays(blocks.load_scalars(g, start, size, head, HV, C)), C)
        P *= D
        M *= D
    M = tl.where(rows[:, None] >= rows[None, :], M, 0.0)
    blocks.store_square(scores, M, chunk, head, HV, C)
    P = tl.where(rows[:, None] > rows[None, :], P, 0.0)
    if gram is not None:
        blocks.store_square(gram, P, chunk, head, HV, C)
    P = tl.where(
        rows[:, None] > rows[None, :], P * blocks.load_scalars(beta, start, size, head, HV, C)[None, :], 0.0
    )
    blocks.store_square(solve, blocks.inverse(P, LEVELS, C, ROUGH, PRECISION), chunk, head, HV, C)


@triton.jit
def solve_kernel(
    q,
    k,
    w,
    v,
    g,
    chunks,
    solve,
    solved_keys,
    solved_values,
    decayed_queries,
    decayed_write_keys,
    chunk_decay,
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
    """The inverse applied to keys and values, and a chunk's decays to all that meets its state."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, size = blocks.chunk_at(chunks, chunk)
    T = blocks.load_square(solve, chunk, head, HV, C)
    if DECAY == HEAD_DECAY:
        inner, outer = blocks.head_sums(
            blocks.log_decays(blocks.load_scalars(g, start, size, head, HV, C)), C
        )
        inner, outer = tl.exp(inner)[:, None], tl.exp(outer)[:, None]
    for first in range(0, K, BK):
        b_k = blocks.load_rows(k, start, size, head // (HV // H), H, first, K, C, BK)
        if DECAY != NO_DECAY:
            b_q = blocks.load_rows(q, start, size, head // (HV // H), H, first, K, C, BK)
            b_w = blocks.load_rows(w, start, size, head // (HV // HW), HW, first, K, C, BK)
            if DECAY == CHANNEL_DECAY:
                b_g = blocks.log_decays(blocks.load_rows(g, start, size, head, HV, first, K, C, BK))
                inner, outer = blocks.channel_sums(b_g, LEVELS, C, BK)
                inner, outer = tl.exp(inner), tl.exp(outer)
            blocks.store_rows(decayed_queries, b_q * inner, start, size, head, HV, first, K, C, BK)
            blocks.store_rows(decayed_write_keys, b_w * outer, start, size, head, HV, first, K, C, BK)
            b_k = b_k * inner
            columns = first + tl.arange(0, BK)
            # Rows beyond the chunk's tokens decay by nothing, so the last row's decay is the chunk's.
            total_decay = tl.sum(
                tl.where((tl.arange(0, C) == C - 1)[:, None], inner, 0.0) + tl.zeros((C, BK), tl.float32), 0
            )
            tl.store(
                chunk_decay + blocks.row_at(chunk * HV + head, K, columns), total_decay, mask=columns < K
            )
        blocks.store_rows(
            solved_keys, blocks.lower_dot(T, b_k, C, DOT, PRECISION), start, size, head, HV, first, K, C, BK
        )
    for first in range(0, V, BV):
        b_v = blocks.load_rows(v, start, size, head, HV, first, V, C, BV)
        blocks.store_rows(
            solved_values, blocks.lower_dot(T, b_v, C, DOT, PRECISION), start, size, head, HV, first, V, C, BV
        )


@triton.jit
def load_state(x, index, first, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, row=0):
    """x[index, row : row + BK, first : first + BV] of x [..., K, V]; zeros beyond K and V."""
    rows = row + tl.arange(0, BK)[:, None]
    columns = first + tl.arange(0, BV)[None, :]
    return tl.load(
        x + index.to(tl.int64) * (K * V) + rows * V + columns, mask=(rows < K) & (columns < V), other=0.0
    )


@triton.jit
def store_state(x, value, index, first, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    rows = tl.arange(0, BK)[:, None]
    columns = first + tl.arange(0, BV)[None, :]
    place = x + index.to(tl.int64) * (K * V) + rows * V + columns
    tl.store(place, value.to(x.dtype.element_ty), mask=(rows < K) & (columns < V))


@triton.jit
def scan_kernel(
    decayed_write_keys,
    solved_keys,
    solved_values,
    beta,
    chunk_decay,
    initial_state,
    chunks,
    sequences,
    states,
    errors,
    final_state,
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
    """From chunk to chunk of one sequence, head and block of value columns: the state, and the errors."""
    first, sequence, head = blocks.columns_of_sequence(V, BV)
    S = tl.zeros((KP, BV), tl.float32)
    if initial_state is not None:
        S += load_state(initial_state, sequence * HV + head, first, K, V, KP, BV).to(tl.float32)
    rows = tl.arange(0, KP)
    for chunk in range(tl.load(sequences + sequence), tl.load(sequences + sequence + 1)):
        start, size = blocks.chunk_at(chunks, chunk)
        store_state(states, S, chunk * HV + head, first, K, V, KP, BV)
        b_k = blocks.load_rows(solved_keys, start, size, head, HV, 0, K, C, KP)
        b_v = blocks.load_rows(solved_values, start, size, head, HV, first, V, C, BV)
        b_w = blocks.load_rows(decayed_write_keys, start, size, head // (HV // HW), HW, 0, K, C, KP)
        e = b_v - blocks.dot(b_k, S, DOT, PRECISION)
        blocks.store_rows(errors, e, start, size, head, HV, first, V, C, BV)
        if chunk_decay is not None:
            S *= tl.load(chunk_decay + blocks.row_at(chunk * HV + head, K, rows), mask=rows < K, other=0.0)[
                :, None
            ]
        u = e * blocks.load_scalars(beta, start, size, head, HV, C)[:, None]
        S += blocks.dot(tl.trans(b_w), u, DOT, PRECISION)
    store_state(final_state, S, sequence * HV + head, first, K, V, KP, BV)


@triton.jit
def read_kernel(
    decayed_queries,
    scores,
    states,
    errors,
    beta,
    chunks,
    o,
    scale,
    HQ: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of one chunk, head and block of value columns: from its first state, and its own writes."""
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = block * BV
    start, size = blocks.chunk_at(chunks, chunk)
    b_o = tl.zeros((C, BV), tl.float32)
    for row in range(0, K, BK):
        b_q = blocks.load_rows(decayed_queries, start, size, head // (HV // HQ), HQ, row, K, C, BK)
        b_o += blocks.dot(
            b_q, load_state(states, chunk * HV + head, first, K, V, BK, BV, row), DOT, PRECISION
        )
    u = blocks.load_rows(errors, start, size, head, HV, first, V, C, BV)
    u = u * blocks.load_scalars(beta, start, size, head, HV, C)[:, None]
    b_o += blocks.lower_dot(blocks.load_square(scores, chunk, head, HV, C), u, C, DOT, PRECISION)
    blocks.store_rows(o, b_o * scale, start, size, head, HV, first, V, C, BV)


class Inputs(NamedTuple):
    """What phase 2 is given; `w` is `k` for the plain delta rule."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    beta: Tensor  # [B, T, HV]
    w: Tensor  # [B, T, H or HV, K]
    g: Tensor | None  # [B, T, HV] or [B, T, HV, K]
    initial_state: Tensor | None  # [N, HV, K, V]
    at: Chunks

    def sizes(self) -> dict[str, int]:
        (H, K), (HV, V) = self.k.shape[2:], self.v.shape[2:]
        decay = 0 if self.g is None else self.g.ndim - 2
        sizes = {"H": H, "HW": self.w.shape[2], "HV": HV, "K": K, "V": V, "DECAY": decay}
        return sizes | self.at.sizes()


class Recurrence(NamedTuple):
    """All that a chunk is, but for its outputs."""

    scores: Tensor  # [chunks, HV, C, C], q_i D_ij w_j
    gram: Tensor | None  # [chunks, HV, C, C], k_i D_ij w_j; the backward's
    solve: Tensor  # [chunks, HV, C, C], the inverse
    solved_keys: Tensor  # [B, T, HV, K], the inverse times the decayed keys
    decayed_queries: Tensor  # [B, T, HV, K], from the chunk's start to the token; q where there is no decay
    decayed_write_keys: Tensor  # [B, T, HV, K], from the token to the chunk's end; w where there is no decay
    chunk_decay: Tensor | None  # [chunks, HV, K]
    states: Tensor  # [chunks, HV, K, V], at the chunk's start
    errors: Tensor  # [B, T, HV, V]
    final_state: Tensor  # [N, HV, K, V], float32

    def sizes(self, x: Inputs) -> dict[str, int]:
        heads = {"HQ": self.decayed_queries.shape[2], "HW": self.decayed_write_keys.shape[2]}
        return {**x.sizes(), **heads, "KP": max(16, triton.next_power_of_2(x.k.shape[3]))}


def recurrence(x: Inputs, keep_gram: bool) -> Recurrence:
    """The triangular systems of all chunks, then the states and errors from chunk to chunk."""
    q, k, v, beta, w, g, initial_state, at = x
    B, T, _, K = k.shape
    HV, V = v.shape[2:]
    scores, solve = k.new_empty(2, at.count, HV, at.size, at.size)
    gram = torch.empty_like(scores) if keep_gram else None
    per_chunk = lambda o: (at.count, HV)  # noqa: E731
    inputs = {"k": k, "g": g, "chunks": at.table, "solve": solve}
    launch.run(gram_kernel, per_chunk, k, x.sizes(), **inputs, q=q, w=w, beta=beta, scores=scores, gram=gram)

    solved_keys, solved_values = k.new_empty(B, T, HV, K), torch.empty_like(v)
    queries, write_keys, chunk_decay = q, w, None
    decayed: dict[str, Tensor | None] = dict.fromkeys(("q", "w", "decayed_queries", "decayed_write_keys"))
    if g is not None:
        queries, write_keys = torch.empty_like(solved_keys), torch.empty_like(solved_keys)
        chunk_decay = k.new_empty(at.count, HV, K, dtype=torch.float32)
        decayed = {"q": q, "w": w, "decayed_queries": queries, "decayed_write_keys": write_keys}
    solved = {"solved_keys": solved_keys, "solved_values": solved_values}
    decayed["chunk_decay"] = chunk_decay
    launch.run(solve_kernel, per_chunk, k, x.sizes(), **inputs, **decayed, v=v, **solved)

    states, errors = k.new_empty(at.count, HV, K, V), torch.empty_like(v)
    final_state = k.new_empty(at.N, HV, K, V, dtype=torch.float32)
    results = Recurrence(
        scores, gram, solve, solved_keys, queries, write_keys, chunk_decay, states, errors, final_state
    )
    launch.run(
        scan_kernel,
        launch.over_columns(V, at.N, HV),
        k,
        results.sizes(x),
        decayed_write_keys=write_keys,
        **solved,
        beta=beta,
        chunk_decay=chunk_decay,
        initial_state=initial_state,
        chunks=at.table,
        sequences=at.sequences,
        states=states,
        errors=errors,
        final_state=final_state,
    )
    return results


def forward(x: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HV, V] and the final state [N, HV, K, V] in float32."""
    r = recurrence(x, keep_gram=False)
    HV, V = x.v.shape[2:]
    o = torch.empty_like(x.v)
    launch.run(
        read_kernel,
        lambda c: (x.at.count, HV, triton.cdiv(V, c["BV"])),
        x.k,
        r.sizes(x),
        decayed_queries=r.decayed_queries,
        scores=r.scores,
        states=r.states,
        errors=r.errors,
        beta=x.beta,
        chunks=x.at.table,
        o=o,
        scale=scale,
    )
    return o, r.final_state
