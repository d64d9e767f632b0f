"""Phase 1, backward: the gradient of the scale goes back through the tokens, from chunk to chunk.

With lambda the gradient of the scale after a token, zero in the channels the box held, one token is

    c = eta b (1 - b s) / n,   s = d . k2,   n = max(k2 . 1, eps),   next d = clip(r d + c k2),   w = d k
    dc = lambda . k2,   ds = -eta b**2 / n dc,   lambda before = r lambda + ds k2 + dw k

A chunk in which the box may have bound is recomputed from its checkpoint token by token into a scratch of C
scales, then swept in reverse.  Elsewhere the reverse sweep is affine in lambda: the dc of a chunk solve the
transpose of the forward's triangular system, and every token's lambda follows by a sum over those after it.
"""
# mypy: allow-untyped-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from osdn.ops.triton import blocks, launch
from osdn.ops.triton.phase1 import (
    CHANNEL_RETENTION,
    HEAD_RETENTION,
    NEWTON,
    SQUASH,
    STAGES,
    Inputs,
    Steps,
    free_step,
    load_betas,
    load_center,
    load_checkpoint,
    load_retentions,
    load_row,
    pick,
    retention_at,
    scales_within,
    squashed,
    step,
    system,
)


@triton.jit
def token_gradients(b, s, total, dc, eta, eps):
    """A token's c, and the gradients of s, n and b; numbers, or vectors of a chunk's tokens."""
    n = tl.where(total < eps, eps, total)
    c = eta * b / n * (1.0 - b * s)
    ds = -eta * b * b / n * dc
    dn = tl.where(total < eps, 0.0, -c / n * dc)
    return c, ds, dn, eta * (1.0 - 2.0 * b * s) / n * dc


@triton.jit
def key_gradient(k, d, after, dw, c, ds, dn):
    return dw * d + 2.0 * k * (c * after + ds * d + dn)


@triton.jit
def covariance_back(d, k, b, r, dw, after, prior):
    """Gradients of k, b and r [K] and of the covariance before the token (docs/cpu.md)."""
    y = d * k
    s = tl.sum(k * y, 0)
    n = 1.0 + b * s
    retained = r * after
    dc = -tl.sum(retained * y * y, 0)
    dn = -(tl.sum(dw * y, 0) + dc * b) / (n * n)
    dy = dw / n + dn * b * k - 2.0 * b / n * retained * y
    dr = after * (d - b / n * y * y - prior)
    return dn * b * y + d * dy, dc / n + dn * s, dr, retained + dy * k


@triton.jit
def gram_back(d, k, b, r, dw, after, center, eta, eps):
    """Gradients of k, b and r [K], of the Gram diagonal before the token, and of the center."""
    total = r * d + b * k * k + eps
    inverse, scale = squashed(tl.log(total) - center, eta)
    dlog = -eta * dw * k * scale * inverse * inverse
    g = after + dlog / total
    return dw * scale + 2.0 * b * k * g, tl.sum(g * k * k, 0), g * d, r * g, -tl.sum(dlog, 0)


@triton.jit
def scale_back(d, k, b, r, dw, after, eta, eps, low, high, BOUNDED: tl.constexpr):
    """Gradients of k, b and r [K] and of the scale before the token."""
    if BOUNDED:
        free = free_step(d, k, b, r, eta, eps)
        after = tl.where((free >= low) & (free <= high), after, 0.0)
    k2 = k * k
    c, ds, dn, db = token_gradients(b, tl.sum(d * k2, 0), tl.sum(k2, 0), tl.sum(after * k2, 0), eta, eps)
    return key_gradient(k, d, after, dw, c, ds, dn), db, after * d, r * after + ds * k2 + dw * k


@triton.jit
def retreat(
    after, d, k, beta, retention, grad_w, scratch, grad_k, grad_beta, grad_retention, start, size, head,
    center, constant, eta, eps, low, high,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    RULE: tl.constexpr, RETENTION: tl.constexpr, BETA_AWARE: tl.constexpr, BOUNDED: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Token by token back through a chunk that starts at the state `d`.

    Returns the gradient of the state before it, and what the chunk adds to that of the center.
    """
    columns = tl.arange(0, KP)
    betas = load_betas(beta, start, size, head, HV, BETA_AWARE, C)
    per_head = load_retentions(retention, start, size, head, HV, RETENTION, C)
    for t in tl.range(size, num_stages=STAGES):
        tl.store(scratch + t * KP + columns, d)
        b_k = load_row(k, start + t, head // (HV // H), H, K, columns)
        r = retention_at(retention, per_head, constant, start, t, head, columns, HV, K, RETENTION, C)
        _, d = step(d, b_k, pick(betas, t, C), r, center, eta, eps, low, high, RULE, BOUNDED)
    to_center = 0.0
    tl.debug_barrier()  # what one thread wrote another may read
    for back in tl.range(size, num_stages=STAGES):
        t = size - 1 - back
        d = tl.load(scratch + t * KP + columns)
        b_k = load_row(k, start + t, head // (HV // H), H, K, columns)
        dw = load_row(grad_w, start + t, head, HV, K, columns)
        r = retention_at(retention, per_head, constant, start, t, head, columns, HV, K, RETENTION, C)
        b = pick(betas, t, C)
        if RULE == NEWTON:
            dk, db, dr, after = covariance_back(d, b_k, b, r, dw, after, eta)
        elif RULE == SQUASH:
            dk, db, dr, after, dcenter = gram_back(d, b_k, b, r, dw, after, center, eta, eps)
            to_center += dcenter
        else:
            dk, db, dr, after = scale_back(d, b_k, b, r, dw, after, eta, eps, low, high, BOUNDED)
        token = (start + t) * HV + head
        tl.store(grad_k + token * K + columns, dk, mask=columns < K)
        if BETA_AWARE:
            tl.store(grad_beta + token, db)
        if RETENTION == HEAD_RETENTION:
            tl.store(grad_retention + token, tl.sum(tl.where(columns < K, dr, 0.0), 0))
        if RETENTION == CHANNEL_RETENTION:
            tl.store(grad_retention + token * K + columns, dr, mask=columns < K)
    tl.debug_barrier()  # the next chunk writes over the scratch
    return after, to_center


@triton.jit
def load_grad(grad_final_scale, index, K: tl.constexpr, KP: tl.constexpr):
    after = tl.zeros((KP,), tl.float32)
    if grad_final_scale is not None:
        columns = tl.arange(0, KP)
        after = tl.load(grad_final_scale + blocks.row_at(index, K, columns), mask=columns < K, other=0.0)
    return after


@triton.jit
def precondition_back_kernel(
    k,
    beta,
    retention,
    center,
    chunks,
    sequences,
    checkpoints,
    grad_w,
    grad_final_scale,
    scratch,
    grad_k,
    grad_beta,
    grad_retention,
    grad_initial_scale,
    grad_center,
    constant,
    eta,
    eps,
    low,
    high,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    RULE: tl.constexpr,
    RETENTION: tl.constexpr,
    BETA_AWARE: tl.constexpr,
    BOUNDED: tl.constexpr,
    C: tl.constexpr,
):
    """One sequence and head, token by token."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, KP)
    c = load_center(center, head)
    to_center = 0.0
    own = scratch + (sequence * HV + head).to(tl.int64) * (C * KP)
    after = load_grad(grad_final_scale, sequence * HV + head, K, KP)
    begin, end = tl.load(sequences + sequence), tl.load(sequences + sequence + 1)
    for back in range(end - begin):
        chunk = end - 1 - back
        start, size = blocks.chunk_at(chunks, chunk)
        d = tl.load(checkpoints + blocks.row_at(chunk * HV + head, K, columns), mask=columns < K, other=1.0)
        after, more = retreat(
            after, d, k, beta, retention, grad_w, own, grad_k, grad_beta, grad_retention, start, size, head,
            c, constant, eta, eps, low, high, H, HV, K, KP, RULE, RETENTION, BETA_AWARE, BOUNDED, C,
        )  # fmt: skip
        to_center += more
    if grad_center is not None:
        tl.store(grad_center + sequence * HV + head, to_center)
    if grad_initial_scale is not None:
        tl.store(
            grad_initial_scale + blocks.row_at(sequence * HV + head, K, columns), after, mask=columns < K
        )


@triton.jit
def sums_back_kernel(
    k,
    chunks,
    grad_w,
    sums,
    later_sums,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """Of z = dw * k in one chunk and head: its sum [K], and k2_t . (its sum over the tokens after t) [C]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, size = blocks.chunk_at(chunks, chunk)
    reaching = tl.zeros((C,), tl.float32)
    for first in range(0, K, BK):
        b_k = blocks.load_rows(k, start, size, head // (HV // H), H, first, K, C, BK).to(tl.float32)
        z = blocks.load_rows(grad_w, start, size, head, HV, first, K, C, BK) * b_k
        columns = first + tl.arange(0, BK)
        tl.store(sums + blocks.row_at(chunk * HV + head, K, columns), tl.sum(z, 0), mask=columns < K)
        reaching += tl.sum(b_k * b_k * (tl.cumsum(z, 0, reverse=True) - z), 1)
    blocks.store_scalars(later_sums, reaching, start, size, head, HV, C)


@triton.jit
def scale_scan_back_kernel(
    k,
    beta,
    chunks,
    sequences,
    y,
    solve,
    checkpoints,
    bound,
    sums,
    later_sums,
    grad_w,
    grad_final_scale,
    scratch,
    grad_checkpoints,
    grad_u,
    grad_k,
    grad_beta,
    grad_initial_scale,
    eta,
    eps,
    low,
    high,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BETA_AWARE: tl.constexpr,
    BOUNDED: tl.constexpr,
    C: tl.constexpr,
):
    """From the last chunk to the first: the gradient of the scale at each chunk's end, and its tokens' dc."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, KP)
    own = scratch + (sequence * HV + head).to(tl.int64) * (C * KP)
    after = load_grad(grad_final_scale, sequence * HV + head, K, KP)
    begin, end = tl.load(sequences + sequence), tl.load(sequences + sequence + 1)
    for back in range(end - begin):
        chunk = end - 1 - back
        start, size = blocks.chunk_at(chunks, chunk)
        place = blocks.row_at(chunk * HV + head, K, columns)
        tl.store(grad_checkpoints + place, after, mask=columns < K)
        if tl.load(bound + chunk * HV + head) == 0:
            b_k = blocks.load_rows(k, start, size, head // (HV // H), H, 0, K, C, KP).to(tl.float32)
            k2 = b_k * b_k
            right = tl.sum(k2 * after[None, :], 1) + blocks.load_scalars(later_sums, start, size, head, HV, C)
            dc = tl.sum(blocks.load_square(solve, chunk, head, HV, C) * right[:, None], 0)
            blocks.store_scalars(grad_u, dc, start, size, head, HV, C)
            dc *= blocks.load_scalars(y, start, size, head, HV, C)
            after += tl.load(sums + place, mask=columns < K, other=0.0) - tl.sum(k2 * dc[:, None], 0)
        else:
            d = tl.load(checkpoints + place, mask=columns < K, other=1.0)
            after, _ = retreat(
                after, d, k, beta, None, grad_w, own, grad_k, grad_beta, None, start, size, head,
                0.0, 1.0, eta, eps, low, high, H, HV, K, KP, 0, 0, BETA_AWARE, BOUNDED, C,
            )  # fmt: skip
    if grad_initial_scale is not None:
        tl.store(
            grad_initial_scale + blocks.row_at(sequence * HV + head, K, columns), after, mask=columns < K
        )


@triton.jit
def scale_keys_back_kernel(
    k,
    beta,
    chunks,
    y,
    checkpoints,
    bound,
    u,
    grad_checkpoints,
    grad_u,
    grad_w,
    grad_k,
    grad_beta,
    eta,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BETA_AWARE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradients of the keys and betas of one chunk and head, unless the scan had to write them."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, size = blocks.chunk_at(chunks, chunk)
    if tl.load(bound + chunk * HV + head) == 0:
        b_u = blocks.load_scalars(u, start, size, head, HV, C)
        dc = blocks.load_scalars(grad_u, start, size, head, HV, C)
        s = tl.zeros((C,), tl.float32)
        total = tl.zeros((C,), tl.float32)
        for first in range(0, K, BK):
            b_k = blocks.load_rows(k, start, size, head // (HV // H), H, first, K, C, BK).to(tl.float32)
            k2 = b_k * b_k
            d = scales_within(load_checkpoint(checkpoints, chunk * HV + head, first, K, BK), k2, b_u)
            s += tl.sum(d * k2, 1)
            total += tl.sum(k2, 1)
        b = load_betas(beta, start, size, head, HV, BETA_AWARE, C)
        c, ds, dn, db = token_gradients(b, s, total, dc, eta, eps)
        if BETA_AWARE:
            blocks.store_scalars(grad_beta, db, start, size, head, HV, C)
        pull = dc * blocks.load_scalars(y, start, size, head, HV, C)
        for first in range(0, K, BK):
            b_k = blocks.load_rows(k, start, size, head // (HV // H), H, first, K, C, BK).to(tl.float32)
            k2 = b_k * b_k
            d = scales_within(load_checkpoint(checkpoints, chunk * HV + head, first, K, BK), k2, b_u)
            dw = blocks.load_rows(grad_w, start, size, head, HV, first, K, C, BK).to(tl.float32)
            z = dw * b_k - pull[:, None] * k2
            after = load_checkpoint(grad_checkpoints, chunk * HV + head, first, K, BK)[None, :]
            after += tl.cumsum(z, 0, reverse=True) - z
            dk = key_gradient(b_k, d, after, dw, c[:, None], ds[:, None], dn[:, None])
            blocks.store_rows(grad_k, dk, start, size, head, HV, first, K, C, BK)


class Gradients(NamedTuple):
    """Of phase 1's inputs; that of k with one head per value head, as the kernels leave it."""

    k: Tensor
    beta: Tensor
    retention: Tensor | None
    initial_scale: Tensor | None
    center: Tensor | None


def backward(i: Inputs, steps: Steps, grad_w: Tensor, grad_final_scale: Tensor | None) -> Gradients:
    k, beta, retention, initial_scale, _, at, center = i
    B, T, H, K = k.shape
    HV = beta.shape[2]
    grad_k = k.new_empty(B, T, HV, K, dtype=k.dtype if H == HV else torch.float32)
    grad_beta = beta.new_zeros(beta.shape, dtype=torch.float32)
    grad_initial_scale = None if initial_scale is None else k.new_empty(at.N, HV, K, dtype=torch.float32)
    common = {"k": k, "chunks": at.table, "grad_w": grad_w}
    to_keys = {"beta": beta, "checkpoints": steps.checkpoints, "grad_k": grad_k, "grad_beta": grad_beta}
    scan = {
        "sequences": at.sequences,
        "grad_final_scale": grad_final_scale,
        "grad_initial_scale": grad_initial_scale,
        "scratch": k.new_empty(at.N, HV, at.size, i.sizes()["KP"], dtype=torch.float32),
    }
    per_sequence = lambda o: (at.N, HV)  # noqa: E731
    if not i.parallel:
        grad_r = torch.empty_like(retention, dtype=torch.float32) if isinstance(retention, Tensor) else None
        grad_center = None if center is None else k.new_empty(at.N, HV, dtype=torch.float32)
        more = {"grad_retention": grad_r, "center": center, "grad_center": grad_center}
        arguments = {**common, **to_keys, **scan, **i.retention_args(), **i.numbers(), **more}
        launch.run(precondition_back_kernel, per_sequence, k, i.sizes(), **arguments)
        grad_center = None if grad_center is None else grad_center.sum(0)
        return Gradients(grad_k, grad_beta, grad_r, grad_initial_scale, grad_center)

    solved = system(i)
    sums = {"sums": torch.empty_like(steps.checkpoints), "later_sums": torch.empty_like(steps.u)}
    saved = {"bound": steps.bound, "y": solved["y"]}
    grads = {"grad_checkpoints": torch.empty_like(steps.checkpoints), "grad_u": torch.empty_like(steps.u)}
    per_chunk = lambda o: (at.count, HV)  # noqa: E731
    launch.run(sums_back_kernel, per_chunk, k, i.sizes(), **common, **sums)
    arguments = {**common, **to_keys, **scan, **saved, **sums, **grads, "solve": solved["solve"]}
    launch.run(scale_scan_back_kernel, per_sequence, k, i.sizes(), **arguments, **i.numbers())
    arguments = {
        **common,
        **to_keys,
        **saved,
        **grads,
        "u": steps.u,
        "eta": i.numbers()["eta"],
        "eps": i.numbers()["eps"],
    }
    launch.run(scale_keys_back_kernel, per_chunk, k, i.sizes(), **arguments)
    return Gradients(grad_k, grad_beta, None, grad_initial_scale, None)
