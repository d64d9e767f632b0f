"""Phase 1, forward: a state of one number per channel follows the keys and makes them write keys.

Two ways.  Token by token (`advance`): the state in registers, keys streamed, for every rule, retention and
box.  By chunks, for online scaling of long sequences without retention: while the box does not bind, phase 1
is itself a delta rule with one value column, key k2 = k**2 and target 1 / beta, so a chunk's steps u solve a
small triangular system,

    (I + diag(y) L) u = x - y * (k2 d),  x = eta beta / n,  y = eta beta**2 / n,  L_ij = k2_i . k2_j (j < i)

and the scale moves by k2' u.  Before each chunk the scan makes sure that no channel can leave the box within
it: all its steps up together stay below the top, all steps down above the bottom.  Where one could, the chunk
is taken token by token.  Both ways leave the scale at the start of every chunk, where the backward begins.
"""
# mypy: allow-untyped-defs

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from osdn.ops.checks import Newton, Rule, Scaling, Squash
from osdn.ops.triton import blocks, launch
from osdn.ops.triton.chunks import Chunks, upper_bound

# What `RETENTION` says of what a scale keeps of itself.
HEAD_RETENTION = tl.constexpr(1)  # one number per token and head
CHANNEL_RETENTION = tl.constexpr(2)  # one per token, head and channel; otherwise one number for all

# What `RULE` says of how the state moves; `eta` is then the prior, or the logarithm of the squash.
NEWTON = tl.constexpr(1)  # a diagonal covariance
SQUASH = tl.constexpr(2)  # a Gram diagonal; else a scale by online gradient descent

# From this length on three launches cost less than tokens one after another; to be measured on a GPU.
PARALLEL_FROM = 256

# While one token is worked on, the keys of the next three are on their way.
STAGES = tl.constexpr(4)


@triton.jit
def load_row(x, token, head, HEADS: tl.constexpr, D: tl.constexpr, columns):
    """x[token, head, columns] of x [tokens, HEADS, D] in float32."""
    return tl.load(x + (token * HEADS + head) * D + columns, mask=columns < D, other=0.0).to(tl.float32)


@triton.jit
def pick(x, t, C: tl.constexpr):
    """x[t] of a vector x [C] in registers."""
    return tl.sum(tl.where(tl.arange(0, C) == t, x, 0.0), 0)


@triton.jit
def load_betas(beta, start, size, head, HV: tl.constexpr, BETA_AWARE: tl.constexpr, C: tl.constexpr):
    """What the inner loss of a chunk's tokens [C] sees of beta."""
    b = tl.full((C,), 1.0, tl.float32)
    if BETA_AWARE:
        b = blocks.load_scalars(beta, start, size, head, HV, C)
    return b


@triton.jit
def load_retentions(retention, start, size, head, HV: tl.constexpr, RETENTION: tl.constexpr, C: tl.constexpr):
    """A chunk's retentions [C] where there is one per token and head; `retention_at` looks the others up."""
    r = tl.zeros((C,), tl.float32)
    if RETENTION == HEAD_RETENTION:
        r = blocks.load_scalars(retention, start, size, head, HV, C)
    return r


@triton.jit
def retention_at(
    retention, per_head, constant, start, t, head, columns,
    HV: tl.constexpr, K: tl.constexpr, RETENTION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    r = constant
    if RETENTION == HEAD_RETENTION:
        r = pick(per_head, t, C)
    if RETENTION == CHANNEL_RETENTION:
        r = load_row(retention, start + t, head, HV, K, columns)
    return r


@triton.jit
def free_step(d, k, b, r, eta, eps):
    """The scale [K] after one token, before the box."""
    k2 = k * k
    n = tl.sum(k2, 0)
    n = tl.where(n < eps, eps, n)  # a comparison, so that NaN stays NaN
    rate = eta * b / n  # known before the scale is: tokens wait for one sum each
    return r * d + rate * (1.0 - b * tl.sum(d * k2, 0)) * k2


@triton.jit
def clip(d, low, high, BOUNDED: tl.constexpr):
    if BOUNDED:
        d = tl.where(d < low, low, d)
        d = tl.where(d > high, high, d)
    return d


@triton.jit
def squashed(often, eta):
    """1 / (1 + |x|) and exp(-eta x / (1 + |x|))."""
    inverse = 1.0 / (1.0 + tl.abs(often))
    return inverse, tl.exp(-eta * often * inverse)


@triton.jit
def step(d, k, b, r, center, eta, eps, low, high, RULE: tl.constexpr, BOUNDED: tl.constexpr):
    """One token: its write key [K], and the state [K] after it."""
    if RULE == NEWTON:
        w = d * k
        n = 1.0 + b * tl.sum(k * w, 0)
        d = r * (d - b / n * w * w) + (1.0 - r) * eta
        w = w / n
    elif RULE == SQUASH:
        d = r * d + b * k * k
        _, scale = squashed(tl.log(d + eps) - center, eta)
        w = scale * k
    else:
        w = d * k
        d = clip(free_step(d, k, b, r, eta, eps), low, high, BOUNDED)
    return w, d


@triton.jit
def load_center(center, head):
    c = 0.0
    if center is not None:
        c = tl.load(center + head).to(tl.float32)
    return c


@triton.jit
def advance(
    d, k, beta, retention, w, start, size, head, center, constant, eta, eps, low, high,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    RULE: tl.constexpr, RETENTION: tl.constexpr, BETA_AWARE: tl.constexpr, BOUNDED: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Token by token through a chunk: writes the write keys and returns the state after them."""
    columns = tl.arange(0, KP)
    betas = load_betas(beta, start, size, head, HV, BETA_AWARE, C)
    per_head = load_retentions(retention, start, size, head, HV, RETENTION, C)
    for t in tl.range(size, num_stages=STAGES):
        b_k = load_row(k, start + t, head // (HV // H), H, K, columns)
        r = retention_at(retention, per_head, constant, start, t, head, columns, HV, K, RETENTION, C)
        b_w, d = step(d, b_k, pick(betas, t, C), r, center, eta, eps, low, high, RULE, BOUNDED)
        place = w + ((start + t) * HV + head) * K + columns
        tl.store(place, b_w.to(w.dtype.element_ty), mask=columns < K)
    return d


@triton.jit
def load_scale(initial_scale, first, index, K: tl.constexpr, KP: tl.constexpr):
    """The initial state [KP]; `first` everywhere unless given."""
    d = tl.zeros((KP,), tl.float32) + first
    if initial_scale is not None:
        columns = tl.arange(0, KP)
        d = tl.load(initial_scale + blocks.row_at(index, K, columns), mask=columns < K, other=1.0).to(
            tl.float32
        )
    return d


@triton.jit
def precondition_kernel(
    k,
    beta,
    retention,
    initial_scale,
    center,
    chunks,
    sequences,
    w,
    checkpoints,
    final_scale,
    constant,
    first,
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
    d = load_scale(initial_scale, first, sequence * HV + head, K, KP)
    c = load_center(center, head)
    for chunk in range(tl.load(sequences + sequence), tl.load(sequences + sequence + 1)):
        start, size = blocks.chunk_at(chunks, chunk)
        tl.store(checkpoints + blocks.row_at(chunk * HV + head, K, columns), d, mask=columns < K)
        d = advance(
            d, k, beta, retention, w, start, size, head, c, constant, eta, eps, low, high,
            H, HV, K, KP, RULE, RETENTION, BETA_AWARE, BOUNDED, C,
        )  # fmt: skip
    tl.store(final_scale + blocks.row_at(sequence * HV + head, K, columns), d, mask=columns < K)


@triton.jit
def system_kernel(
    k,
    beta,
    chunks,
    x,
    y,
    solve,
    eta,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BETA_AWARE: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    ROUGH: tl.constexpr,
    PRECISION: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """x, y and (I + diag(y) L)^-1, of one chunk and head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, size = blocks.chunk_at(chunks, chunk)
    rows = tl.arange(0, C)
    L = tl.zeros((C, C), tl.float32)
    n = tl.zeros((C,), tl.float32)
    for first in range(0, K, BK):
        b_k = blocks.load_rows(k, start, size, head // (HV // H), H, first, K, C, BK).to(tl.float32)
        k2 = b_k * b_k
        n += tl.sum(k2, 1)
        L += tl.dot(k2, tl.trans(k2), input_precision=PRECISE)
    n = tl.where(n < eps, eps, n)
    b = load_betas(beta, start, size, head, HV, BETA_AWARE, C)
    b_y = eta * b * b / n
    blocks.store_scalars(x, eta * b / n, start, size, head, HV, C)
    blocks.store_scalars(y, b_y, start, size, head, HV, C)
    A = tl.where(rows[:, None] > rows[None, :], b_y[:, None] * L, 0.0)
    blocks.store_square(solve, blocks.inverse(A, LEVELS, C, ROUGH, PRECISION), chunk, head, HV, C)


@triton.jit
def scale_scan_kernel(
    k,
    beta,
    initial_scale,
    chunks,
    sequences,
    x,
    y,
    solve,
    w,
    checkpoints,
    bound,
    u,
    final_scale,
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
    """From chunk to chunk of one sequence and head: the scale, and whether the box may bind in the chunk."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, KP)
    lower = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]
    d = load_scale(initial_scale, 1.0, sequence * HV + head, K, KP)
    for chunk in range(tl.load(sequences + sequence), tl.load(sequences + sequence + 1)):
        start, size = blocks.chunk_at(chunks, chunk)
        tl.store(checkpoints + blocks.row_at(chunk * HV + head, K, columns), d, mask=columns < K)
        b_k = blocks.load_rows(k, start, size, head // (HV // H), H, 0, K, C, KP).to(tl.float32)
        k2 = b_k * b_k
        right = blocks.load_scalars(y, start, size, head, HV, C) * tl.sum(k2 * d[None, :], 1)
        right = blocks.load_scalars(x, start, size, head, HV, C) - right
        # Zeros above the diagonal times NaN would carry a token's NaN to those before it.
        b_u = tl.sum(tl.where(lower, blocks.load_square(solve, chunk, head, HV, C) * right[None, :], 0.0), 1)
        blocks.store_scalars(u, b_u, start, size, head, HV, C)
        up = tl.sum(k2 * tl.where(b_u > 0, b_u, 0.0)[:, None], 0)
        down = tl.sum(k2 * tl.where(b_u > 0, 0.0, b_u)[:, None], 0)
        binds = 0
        if BOUNDED:
            inside = (d + up <= high) & (d + down >= low) | (columns >= K)
            binds = 1 - tl.min(inside.to(tl.int32), 0)
        tl.store(bound + chunk * HV + head, binds)
        if binds == 0:
            d = d + up + down
        else:
            d = advance(
                d, k, beta, None, w, start, size, head, 0.0, 1.0, eta, eps, low, high,
                H, HV, K, KP, 0, 0, BETA_AWARE, BOUNDED, C,
            )  # fmt: skip
    tl.store(final_scale + blocks.row_at(sequence * HV + head, K, columns), d, mask=columns < K)


@triton.jit
def scales_within(d, k2, u):
    """The scale [C, BK] before every token of a chunk in which the box does not bind."""
    moves = u[:, None] * k2
    return d[None, :] + (tl.cumsum(moves, 0) - moves)


@triton.jit
def load_checkpoint(checkpoints, index, first, K: tl.constexpr, BK: tl.constexpr):
    columns = first + tl.arange(0, BK)
    return tl.load(checkpoints + blocks.row_at(index, K, columns), mask=columns < K, other=0.0)


@triton.jit
def scale_keys_kernel(
    k,
    chunks,
    checkpoints,
    bound,
    u,
    w,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """The write keys of one chunk, head and block of channels, unless the scan had to write them."""
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, size = blocks.chunk_at(chunks, chunk)
    first = block * BK
    if tl.load(bound + chunk * HV + head) == 0:
        d = load_checkpoint(checkpoints, chunk * HV + head, first, K, BK)
        b_k = blocks.load_rows(k, start, size, head // (HV // H), H, first, K, C, BK).to(tl.float32)
        b_w = scales_within(d, b_k * b_k, blocks.load_scalars(u, start, size, head, HV, C)) * b_k
        blocks.store_rows(w, b_w, start, size, head, HV, first, K, C, BK)


class Steps(NamedTuple):
    """What the forward leaves for the backward; of as many chunks as any boundaries make of the tokens."""

    checkpoints: Tensor  # [chunks, HV, K], the scale at the chunk's start
    bound: Tensor  # [chunks, HV], whether the box may have bound in the chunk
    u: Tensor  # [B, T, HV], the steps where it did not


class Inputs(NamedTuple):
    """What phase 1 is given; `retention` is a number for all tokens or a tensor."""

    k: Tensor  # [B, T, H, K]
    beta: Tensor  # [B, T, HV], or the gain of `Squash`
    retention: float | Tensor  # [B, T, HV] or [B, T, HV, K]
    initial_scale: Tensor | None  # [N, HV, K]; so, too, a covariance or a Gram diagonal
    settings: Rule
    at: Chunks
    center: Tensor | None = None  # [HV]

    @property
    def parallel(self) -> bool:
        keeps_all = isinstance(self.retention, float) and self.retention == 1.0
        return isinstance(self.settings, Scaling) and keeps_all and self.at.longest >= PARALLEL_FROM

    def sizes(self) -> dict[str, int]:
        (H, K), HV = self.k.shape[2:], self.beta.shape[2]
        retention = self.retention.ndim - 2 if isinstance(self.retention, Tensor) else 0
        return {
            "H": H,
            "HV": HV,
            "K": K,
            "KP": max(16, triton.next_power_of_2(K)),
            "RETENTION": retention,
            "RULE": {Scaling: 0, Newton: 1, Squash: 2}[type(self.settings)],
            "BETA_AWARE": not isinstance(self.settings, Scaling) or self.settings.beta_aware,
            "BOUNDED": isinstance(self.settings, Scaling) and self.settings.bounds is not None,
            **self.at.sizes(),
        }

    def numbers(self) -> dict[str, float]:
        """`eta` and the like, whatever they are called in this rule."""
        rule = self.settings
        if isinstance(rule, Newton):
            return {"eta": rule.prior, "eps": 0.0, "low": 0.0, "high": 0.0}
        if isinstance(rule, Squash):
            return {"eta": math.log(rule.bound), "eps": rule.eps, "low": 0.0, "high": 0.0}
        low, high = rule.bounds or (0.0, 0.0)
        return {"eta": rule.eta, "eps": rule.eps, "low": low, "high": high}

    @property
    def first(self) -> float:
        """Where every channel's state starts."""
        rule = self.settings
        return rule.prior if isinstance(rule, Newton) else float(isinstance(rule, Scaling))

    def retention_args(self) -> dict[str, Any]:
        """The retention, as a tensor or a number."""
        if isinstance(self.retention, Tensor):
            return {"retention": self.retention, "constant": 1.0}
        return {"retention": None, "constant": self.retention}


def system(i: Inputs) -> dict[str, Tensor]:
    """x, y [B, T, HV] and the inverses [chunks, HV, C, C], float32."""
    HV = i.beta.shape[2]
    x, y = i.beta.new_empty(2, *i.beta.shape, dtype=torch.float32)
    solve = i.k.new_empty(i.at.count, HV, i.at.size, i.at.size, dtype=torch.float32)
    results = {"x": x, "y": y, "solve": solve}
    numbers = {name: x for name, x in i.numbers().items() if name in ("eta", "eps")}
    inputs = {"k": i.k, "beta": i.beta, "chunks": i.at.table, **numbers}
    launch.run(system_kernel, lambda o: (i.at.count, HV), i.k, i.sizes(), **inputs, **results)
    return results


def forward(i: Inputs) -> tuple[Tensor, Tensor, Steps]:
    """Write keys [B, T, HV, K], final scale [N, HV, K], and what the backward needs."""
    k, beta, _, initial_scale, _, at, center = i
    K, HV = k.shape[3], beta.shape[2]
    w, final_scale, steps = empty_outputs(k, beta, at.N)
    per_sequence = lambda o: (at.N, HV)  # noqa: E731
    common = {"k": k, "chunks": at.table, "w": w, "checkpoints": steps.checkpoints}
    scan = {
        "beta": beta,
        "sequences": at.sequences,
        "initial_scale": initial_scale,
        "final_scale": final_scale,
    }
    if not i.parallel:
        launch.run(
            precondition_kernel,
            per_sequence,
            k,
            i.sizes(),
            **common,
            **scan,
            **i.retention_args(),
            **i.numbers(),
            center=center,
            first=i.first,
        )
        return w, final_scale, steps
    common |= {"bound": steps.bound, "u": steps.u}
    launch.run(scale_scan_kernel, per_sequence, k, i.sizes(), **common, **scan, **system(i), **i.numbers())
    launch.run(scale_keys_kernel, lambda o: (at.count, HV, triton.cdiv(K, o["BK"])), k, i.sizes(), **common)
    return w, final_scale, steps


def empty_outputs(k: Tensor, beta: Tensor, N: int) -> tuple[Tensor, Tensor, Steps]:
    """The results of `forward`, uninitialised; zeros where it may leave some out."""
    (B, T, _, K), HV = k.shape, beta.shape[2]
    rows = upper_bound(k, N)
    steps = Steps(
        k.new_zeros(rows, HV, K, dtype=torch.float32),
        k.new_zeros(rows, HV, dtype=torch.int32),
        k.new_zeros(B, T, HV, dtype=torch.float32),
    )
    return k.new_empty(B, T, HV, K), k.new_empty(N, HV, K, dtype=torch.float32), steps
