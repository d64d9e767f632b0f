"""Pieces the kernels share: where a chunk lies in memory, loads and stores of its rows, and pairs of halves.

The one idea: a chunk of C tokens is halved again and again.  At level l the C rows fall into neighbouring
pairs of halves of 2**l rows, and every pair of different rows is in exactly one such pair of halves, at the
level of the highest bit in which their numbers differ.  So a sum over all pairs of rows is a sum over log2(C)
levels, and at each level the boundary between two halves lies between any row of one and any row of the
other.  The inverse of a triangular matrix and the decay per channel are both computed level by level.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

# What `DECAY` says of the logarithms of decay.
NO_DECAY = tl.constexpr(0)
HEAD_DECAY = tl.constexpr(1)  # one per head
CHANNEL_DECAY = tl.constexpr(2)  # one per head and key channel

# exp(-200) is 0 in float32, so a decay beyond it changes nothing; -inf times 0 would be NaN.
STRONGEST = tl.constexpr(-200.0)


@triton.jit
def columns_of_sequence(D: tl.constexpr, BD: tl.constexpr):
    """This program's first column, sequence and head; the launch is `launch.over_columns`."""
    in_all: tl.constexpr = (D + BD - 1) // BD
    program = tl.program_id(0)
    return program % in_all * BD, program // in_all, tl.program_id(1)


@triton.jit
def row_at(index, D: tl.constexpr, columns):
    """Where x[index, columns] of x [..., D] lies; 64 bits, since a GPU holds more than 2**31 numbers."""
    return index.to(tl.int64) * D + columns


@triton.jit
def chunk_at(chunks, chunk):
    """The first token of a chunk and how many tokens it has."""
    return tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)


@triton.jit
def load_rows(
    x, start, size, head, HEADS: tl.constexpr, first, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """x[start : start + C, head, first : first + BD] of x [tokens, HEADS, D], zeros beyond chunk and D."""
    rows = tl.arange(0, C)[:, None]
    columns = first + tl.arange(0, BD)[None, :]
    inside = (rows < size) & (columns < D)
    return tl.load(x + (start * HEADS + head) * D + rows * (HEADS * D) + columns, mask=inside, other=0.0)


@triton.jit
def store_rows(
    x,
    value,
    start,
    size,
    head,
    HEADS: tl.constexpr,
    first,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    rows = tl.arange(0, C)[:, None]
    columns = first + tl.arange(0, BD)[None, :]
    inside = (rows < size) & (columns < D)
    tl.store(
        x + (start * HEADS + head) * D + rows * (HEADS * D) + columns,
        value.to(x.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def load_scalars(x, start, size, head, HEADS: tl.constexpr, C: tl.constexpr):
    """x[start : start + C, head] of x [tokens, HEADS] in float32; zeros beyond the chunk."""
    rows = tl.arange(0, C)
    return tl.load(x + start * HEADS + head + rows * HEADS, mask=rows < size, other=0.0).to(tl.float32)


@triton.jit
def store_scalars(x, value, start, size, head, HEADS: tl.constexpr, C: tl.constexpr):
    rows = tl.arange(0, C)
    tl.store(x + start * HEADS + head + rows * HEADS, value, mask=rows < size)


@triton.jit
def load_square(x, chunk, head, HEADS: tl.constexpr, C: tl.constexpr):
    """The matrix of one chunk and head, of x [chunks, HEADS, C, C]."""
    rows = tl.arange(0, C)
    return tl.load(x + (chunk * HEADS + head).to(tl.int64) * (C * C) + rows[:, None] * C + rows[None, :])


@triton.jit
def store_square(x, value, chunk, head, HEADS: tl.constexpr, C: tl.constexpr):
    rows = tl.arange(0, C)
    place = x + (chunk * HEADS + head).to(tl.int64) * (C * C) + rows[:, None] * C + rows[None, :]
    tl.store(place, value.to(x.dtype.element_ty))


@triton.jit
def dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b with operands of dtype DOT, summed in float32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)


@triton.jit
def lower_dot(T, x, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """T @ x of a lower triangular T.  What is not finite in x goes to its own row and those after it.

    Zeros above the diagonal times NaN would make it reach the rows before, which are earlier tokens.
    """
    x = x.to(DOT)
    finite = tl.abs(x.to(tl.float32)) < float("inf")
    rows = tl.arange(0, C)[:, None]
    first = tl.min(tl.where(finite, C, rows), 0)
    y = dot(T, tl.where(finite, x, 0.0), DOT, PRECISION)
    return tl.where(rows >= first[None, :], float("nan"), y)


@triton.jit
def across(level, C: tl.constexpr):
    """Which pairs of rows [C, C] lie in the two halves of one pair at this level."""
    rows = tl.arange(0, C)
    return ((rows[:, None] ^ rows[None, :]) >> level) == 1


@triton.jit
def later(level, C: tl.constexpr):
    """Which rows [C, 1] are in the later half of their pair at this level."""
    return ((tl.arange(0, C) >> level) % 2 == 1)[:, None]


@triton.jit
def inverse(A, LEVELS: tl.constexpr, C: tl.constexpr, ROUGH: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [C, C], from the inverses of its halves, level by level.

    With the inverses X and Y of the two diagonal blocks, the block below is -Y A X.  Sums of powers of A
    need no fewer products, and grow with repeated keys where the inverse does not.  Products that round their
    factors (ROUGH) are followed by one step of refinement in PRECISION.  From the first row on that is not
    finite, the inverse is NaN; rows before it do not depend on it.
    """
    rows = tl.arange(0, C)
    finite = tl.abs(A) < float("inf")
    first = tl.min(tl.min(tl.where(finite, C, rows[:, None]), 1), 0)
    A = tl.where(finite, A, 0.0)
    identity = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    T = identity - tl.where(across(0, C), A, 0.0)
    for level in range(1, LEVELS):
        below = tl.where(across(level, C), A, 0.0)
        T -= tl.dot(tl.dot(T, below, input_precision=ROUGH), T, input_precision=ROUGH)
    if PRECISION != ROUGH:
        residual = tl.dot(T, A, acc=T - identity, input_precision=PRECISION)
        T -= tl.dot(residual, T, input_precision=ROUGH)
    return tl.where(rows[:, None] >= first, float("nan"), T)


@triton.jit
def grow(inner, outer, level, C: tl.constexpr, BD: tl.constexpr):
    """Sums of log-decay [C, BD] within halves of 2**level rows, to those within halves of twice as many.

    `inner` is the sum from the half's first row to this one, `outer` from the next row to the half's last.
    Nothing is ever subtracted, so a strong decay costs its neighbours no digits.
    """
    rows = tl.arange(0, C)
    sibling = tl.broadcast_to((rows ^ (1 << level))[:, None], (C, BD))
    total = tl.gather(inner + outer, sibling, 0)  # of the other half of the pair
    inner = tl.where(later(level, C), inner + total, inner)
    outer = tl.where(later(level, C), outer, outer + total)
    return inner, outer


@triton.jit
def channel_sums(g, LEVELS: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Of g [C, BD], the sums from the chunk's first row to this one, and from the next row to the last."""
    inner = g
    outer = tl.zeros((C, BD), tl.float32)
    for level in range(LEVELS):
        inner, outer = grow(inner, outer, level, C, BD)
    return inner, outer


@triton.jit
def head_sums(g, C: tl.constexpr):
    """The same of g [C]."""
    rows = tl.arange(0, C)
    until = rows[:, None] >= rows[None, :]
    return tl.sum(tl.where(until, g[None, :], 0.0), 1), tl.sum(tl.where(until, 0.0, g[None, :]), 1)


@triton.jit
def head_decays(g, C: tl.constexpr):
    """exp of the sum of g over the rows after j and up to i, [C, C]; zero above the diagonal."""
    rows = tl.arange(0, C)
    steps = tl.where(rows[:, None] > rows[None, :], g[:, None], 0.0)
    return tl.where(rows[:, None] >= rows[None, :], tl.exp(tl.cumsum(steps, 0)), 0.0)


@triton.jit
def log_decays(g):
    g = g.to(tl.float32)
    return tl.where(g < STRONGEST, STRONGEST, g)
