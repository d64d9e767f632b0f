"""The two phases with matrix products, in plain PyTorch, for any device: the paper's WY/UT form over chunks.

Within a chunk of C tokens the writes u of the delta rule solve one unit lower triangular system (paper,
"Chunkwise WY derivation" and "Backbone Extensions"), so a scan over chunks replaces the scan over tokens.
The idea that keeps it exact for strong decay: a product of decays is always the exponential of a sum over
just the tokens it spans, never a ratio of two longer products nor a difference of two longer sums.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from osdn.ops import tracing
from osdn.ops.checks import Newton, Phase1, Phase2, Rule, Scaling, Squash, boundaries, first_state

CHUNK = 64  # tokens at most; a power of two


def precondition_keys(
    k: Tensor,  # [B, T, H, K]
    phase1: Phase1,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Phase 1, a scan over tokens whatever the rule; sequences and heads go side by side."""
    rule, gate, retention, initial, center = phase1
    tokens = Chunks(k, cu_seqlens, heads=gate.shape[2], size=1)
    k, gate = tokens.split(k), tokens.split(gate)  # [M, 1, K], [M, 1, 1], M = tokens * HV, as all below
    r = repeat(retention) if isinstance(retention, float) else tokens.by_step(tokens.split(retention))
    if initial is None:
        initial = first_state(rule, k, tokens.N, tokens.H, k.shape[2])
    advance, inputs = _rule(rule, k, gate)
    steps = list(zip(*(tokens.by_step(x) for x in inputs), r))
    state = tokens.enter(initial)[:, None]  # [N * HV, 1, ...]
    rows: list[Tensor] = []
    finished: list[Tensor] = []
    recompute = initial.ndim > 3 and not (tracing.in_transform() or torch.compiler.is_compiling())
    for first in range(0, len(steps), CHUNK):
        scan = partial(_scan_tokens, advance, steps[first : first + CHUNK])
        if recompute:  # for the backward, rather than keep the covariance of every token
            chunk_rows, chunk_finished, state = checkpoint(
                scan, state, use_reentrant=False, preserve_rng_state=False
            )
        else:
            chunk_rows, chunk_finished, state = scan(state)
        rows += chunk_rows
        finished += chunk_finished
    w = torch.cat(rows) if rows else k
    if isinstance(rule, Scaling):
        w = w * k
    elif isinstance(rule, Squash):
        assert center is not None
        centered = (w + rule.eps).log() - center.repeat(tokens.count)[:, None, None]
        w = rule.bound ** -(centered / (1 + centered.abs())) * k
    return tokens.merge(w), tokens.leave(state, finished)[:, :, 0]


Advance = Callable[..., tuple[Tensor, Tensor]]


def _scan_tokens(
    advance: Advance, steps: list[tuple[Any, ...]], state: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """One row per token, the states of sequences that end on the way, and the state of those that go on."""
    rows: list[Tensor] = []
    finished: list[Tensor] = []
    for step in steps:
        state = Chunks.running(state, len(step[0]), finished)
        row, state = advance(state, *step)
        rows.append(row)
    return rows, finished, state


def _rule(rule: Rule, k: Tensor, gate: Tensor) -> tuple[Advance, tuple[Tensor, ...]]:
    """How a token updates the state: f(state, *inputs, retention) -> row, next state; and its inputs.

    A row is the write key, or the state from which all write keys are computed at once.
    """
    if isinstance(rule, Newton):
        prior, size = rule
        prior_covariance = prior * torch.eye(size, dtype=k.dtype, device=k.device)

        def covariance(P: Tensor, k: Tensor, beta: Tensor, r: float | Tensor) -> tuple[Tensor, Tensor]:
            y = (P * k.unflatten(-1, (-1, size))[..., None, :]).sum(-1)  # [m, 1, K / b, b]
            n = 1 + beta * (k * y.flatten(-2)).sum(-1, keepdim=True)  # [m, 1, 1]
            P = P - (beta / n)[..., None, None] * (y[..., :, None] * y[..., None, :])
            if isinstance(r, Tensor):
                P = torch.lerp(prior_covariance, P, r[..., None, None])
            elif r != 1:
                P = r * P + (1 - r) * prior_covariance
            return y.flatten(-2) / n, P

        return covariance, (k, gate)
    k2 = k.square()
    if isinstance(rule, Squash):

        def gram(A: Tensor, added: Tensor, r: float | Tensor) -> tuple[Tensor, Tensor]:
            A = _kept(r, A) + added
            return A, A

        return gram, (gate * k2,)
    eta, bounds, beta_aware, eps = rule
    b = gate if beta_aware else torch.ones_like(gate)
    direction = k2 / k2.sum(-1, keepdim=True).clamp_min(eps)

    def scale(
        d: Tensor, k2: Tensor, direction: Tensor, gain: Tensor, damping: Tensor, r: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        step = gain - damping * (d * k2).sum(-1, keepdim=True)
        after = torch.addcmul(_kept(r, d), step, direction)
        return d, after if bounds is None else after.clamp(*bounds)

    return scale, (k2, direction, eta * b, eta * b.square())


def _kept(r: float | Tensor, x: Tensor) -> Tensor:
    """`r * x`.  For a number near 1, 1 - r is rounded: r's error would add up over thousands of tokens."""
    return torch.sub(x, x, alpha=1 - r) if isinstance(r, float) and 0.5 < r != 1 else r * x


def delta_rule(x: Phase2, write_keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Phase 2.  Only the scan over the states between chunks is sequential; the rest is one batch."""
    with _full_precision(x.v.device):
        chunks = Chunks(x.v, x.cu_seqlens, heads=x.v.shape[2], size=_chunk_size(x.k.shape[3]))
        q, k, v, beta = (chunks.split(y) for y in (x.q, x.k, x.v, x.beta))  # [M, C, ·], M = chunks * HV
        w = k if write_keys is None else chunks.split(write_keys)
        g = None if x.log_decay is None else chunks.split(x.log_decay)  # [M, C, 1 or K]
        sick = _sick(k, v, beta, w, g)
        poison: Iterable[tuple[Tensor, Tensor] | None] = repeat(None)
        if sick is not None:  # such tokens do nothing, and their results are replaced
            not_a_number = _not_a_number(sick, q, k, v, beta, w, g)  # [M, C, 1]
            poison = zip(chunks.by_step(sick[:, -1:]), chunks.by_step(not_a_number.sum(1, keepdim=True)))
            k, v, beta, w = (y.masked_fill(sick, 0) for y in (k, v, beta, w))
            g = None if g is None else g.masked_fill(sick, 0)

        scores, gram = _products(q, k, w, g)  # [M, C, C]
        decay: Iterable[Tensor | None] = repeat(None)
        if g is not None:
            since_start, until_end = g.cumsum(1).exp(), _sum_after(g).exp()
            q, k, w = since_start * q, since_start * k, until_end * w
            decay = chunks.by_step(since_start[:, -1, :, None])  # [M, 1 or K, 1]
        steps = (chunks.by_step(y) for y in (q, k, v, beta, w.mT, beta * gram, scores.tril()))

        S = x.initial_state
        S = chunks.enter(v.new_zeros(chunks.N, chunks.H, k.shape[2], v.shape[2]) if S is None else S)
        outputs: list[Tensor] = []
        finished: list[Tensor] = []
        for q_s, k_s, v_s, beta_s, w_s, gram_s, scores_s, decay_s, poison_s in zip(*steps, decay, poison):
            S = chunks.running(S, len(v_s), finished)
            error = torch.baddbmm(v_s, k_s, S, alpha=-1)  # of the state the chunk starts from
            u = torch.linalg.solve_triangular(gram_s, beta_s * error, upper=False, unitriangular=True)
            outputs.append(torch.baddbmm(q_s @ S, scores_s, u, beta=x.scale, alpha=x.scale))
            S = torch.baddbmm(S if decay_s is None else decay_s * S, w_s, u)
            if poison_s is not None:
                sick_s, not_a_number_s = poison_s
                S = torch.where(sick_s, not_a_number_s, S)
        o = torch.cat(outputs) if outputs else v
        if sick is not None:
            o = torch.where(sick, not_a_number, o)
        return chunks.merge(o), chunks.leave(S, finished)


def _chunk_size(K: int) -> int:
    """No more tokens than channels, but at least four.

    K tokens can replace all that a state holds.  In a longer chunk the writes nearly cancel the state it
    starts from, and what is left has that state's rounding errors.
    """
    return min(CHUNK, max(4, 1 << (K.bit_length() - 1)))


def _sick(*tokens: Tensor | None) -> Tensor | None:
    """Which tokens `[M, C, 1]` are not finite or come after one that is not, in their chunk.

    A matrix product over the chunk would carry them to earlier tokens: the zeros above the diagonal times NaN
    are NaN.  None when there are none, which is asked only where looking at numbers is allowed and cheap.
    """
    detached = [x.detach() for x in tokens if x is not None]
    visible = not (tracing.is_traced(detached) or tracing.in_transform())
    if visible and detached[0].device.type == "cpu" and all(bool(x.sum().isfinite()) for x in detached):
        return None
    healthy = [(x.abs() < torch.inf).all(-1, keepdim=True) for x in detached]
    if tokens[-1] is not None:
        healthy[-1] = (detached[-1] < torch.inf).all(-1, keepdim=True)  # a decay of -inf forgets everything
    return (~torch.stack(healthy).all(0)).cumsum(1) > 0


def _not_a_number(sick: Tensor, *tokens: Tensor | None) -> Tensor:
    """NaN at the tokens that are `sick`, with gradients of NaN: a loss of NaN must not look harmless."""
    total = torch.stack([x.sum(-1, keepdim=True) for x in tokens if x is not None]).sum(0)
    return (total.masked_fill(~sick, 0) * torch.nan).masked_fill(~sick, 0)


def _products(q: Tensor, k: Tensor, w: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """`sum_c q[i, c] w[j, c] exp(g[j+1, c] + ... + g[i, c])` and the same of k, `[M, C, C]` each.

    Right for i >= j; callers use no others.
    """
    if g is not None and g.shape[2] > 1:
        return _channel_products(q, k, w, g)
    scores, gram = q @ w.mT, k @ w.mT
    if g is not None:
        after = torch.ones_like(gram[:1], dtype=torch.bool).tril(-1)
        decay = torch.where(after, g, 0).cumsum(1).exp()
        scores, gram = scores * decay, gram * decay
    return scores, gram


def _channel_products(q: Tensor, k: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """`_products` where every channel has its own decay, which cannot be taken out of the sum.

    Between the two halves of a block it splits into two factors that never grow, from j to the middle and
    from the middle to i: a matrix product.  So blocks of one token are joined in pairs, the pairs in pairs,
    and so on up to the chunk.
    """
    M, C, K = w.shape
    rows = torch.stack([q, k], 2)  # [M, C, 2, K]
    blocks = (rows * w[:, :, None]).sum(-1)[:, :, None, :, None]  # [M, C, 1, 2, 1]
    size = 1
    while size < C:
        pairs = (M, C // (2 * size), 2, size)
        g_early, g_late = g.view(*pairs, K).unbind(2)  # [M, pairs, size, K]
        early = w.view(*pairs, K)[:, :, 0] * _sum_after(g_early).exp()
        late = rows.view(*pairs, 2, K)[:, :, 1] * g_late.cumsum(2).exp()[:, :, :, None]
        between = (late.flatten(2, 3) @ early.mT).unflatten(2, (size, 2))
        first, second = blocks.unflatten(1, pairs[1:3]).unbind(2)  # [M, pairs, size, 2, size]
        blocks = torch.cat([F.pad(first, (0, size)), torch.cat([between, second], -1)], 2)
        size *= 2
    scores, gram = blocks[:, 0].unbind(2)
    return scores, gram


def _sum_after(g: Tensor) -> Tensor:
    """For every token the sum of `g` over the tokens after it; the tokens are the last dimension but one."""
    return F.pad(g[..., 1:, :].flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1))


def _full_precision(device: torch.device) -> AbstractContextManager:
    """Autocast would round the states: the recurrence is computed in the dtype it is given."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class Chunks:
    """Where the tokens of every sequence and head go when sequences are cut into chunks of `size`.

    Chunks are ordered step by step: the first chunk of every sequence, then every second chunk, and so on,
    the longest sequences first.  A step is then one slice over the first `active` sequences, the work is
    proportional to the number of chunks however uneven the sequences are, and sequences of one length are
    a mere reshape away.  Tokens that fill up a last chunk are zeros: they neither decay, read nor write.
    """

    def __init__(self, like: Tensor, cu_seqlens: Tensor | None, heads: int, size: int) -> None:
        self.B, self.T, self.H = *like.shape[:2], heads
        if cu_seqlens is None:
            lengths = [self.T] * self.B
        else:
            cuts = boundaries(cu_seqlens, self.T)
            lengths = [b - a for a, b in pairwise(cuts)]
        self.N, self.longest = len(lengths), max(lengths, default=0)
        self.size = min(size, 1 << max(self.longest - 1, 0).bit_length())  # a lone token is a chunk of one
        self.steps = -(-self.longest // self.size)
        self.active = [self.N] * self.steps
        self.even = min(lengths, default=0) == self.longest
        if not self.even:
            self._place(torch.tensor(lengths), like.device)
        self.count = sum(self.active)

    def _place(self, lengths: Tensor, device: torch.device) -> None:
        counts, order = (-(-lengths // self.size)).sort(descending=True, stable=True)
        rank = order.argsort()
        active = self.N - counts.bincount()[: self.steps].cumsum(0)
        first = active.cumsum(0) - active  # chunk of every step
        sequence = torch.arange(self.N).repeat_interleave(lengths)  # of every token
        position = torch.arange(self.T) - (lengths.cumsum(0) - lengths)[sequence]
        chunk = first[position // self.size] + rank[sequence]
        self.slot = (chunk * self.size + position % self.size).to(device)
        self.active = active.tolist()
        self.order, self.rank = order.to(device), rank.to(device)

    def split(self, x: Tensor) -> Tensor:
        """`[B, T, heads, D]`, `[B, T, heads]` or with fewer, shared heads, to `[chunks * heads, size, D]`."""
        x = x[..., None] if x.ndim == 3 else x
        x = x if x.shape[2] == self.H else x.repeat_interleave(self.H // x.shape[2], 2)
        H, D = x.shape[2:]
        if self.even:
            x = x.reshape(self.N, self.longest, H, D)
            x = F.pad(x, (0, 0, 0, 0, 0, self.steps * self.size - self.longest))
            x = x.view(self.N, self.steps, self.size, H, D).transpose(0, 1)
        else:
            x = x.new_zeros(self.count * self.size, H, D).index_copy(0, self.slot, x[0])
            x = x.view(self.count, self.size, H, D)
        return x.transpose(-3, -2).reshape(self.count * H, self.size, D)

    def merge(self, x: Tensor) -> Tensor:
        """The inverse of `split`, to `[B, T, heads, D]`."""
        H, D = self.H, x.shape[2]
        x = x.view(self.count, H, self.size, D).transpose(1, 2)
        if self.even:
            x = x.reshape(self.steps, self.N, self.size, H, D).transpose(0, 1)
            x = x.reshape(self.N, self.steps * self.size, H, D)[:, : self.longest]
            return x.reshape(self.B, self.T, H, D)
        return x.reshape(self.count * self.size, H, D).index_select(0, self.slot)[None]

    def by_step(self, x: Tensor) -> tuple[Tensor, ...]:
        """The slice of every step.  One split rather than a slice at a time: its backward is one join."""
        return x.split([n * self.H for n in self.active])

    def enter(self, state: Tensor) -> Tensor:
        """Initial states `[N, heads, ...]`, flattened, longest sequence first."""
        return (state if self.even else state.index_select(0, self.order)).flatten(0, 1)

    @staticmethod
    def running(state: Tensor, rows: int, finished: list[Tensor]) -> Tensor:
        """The states of the sequences that have a chunk left; those of the others go to `finished`."""
        if rows < len(state):
            state, done = state.split([rows, len(state) - rows])
            finished.append(done)
        return state

    def leave(self, state: Tensor, finished: list[Tensor]) -> Tensor:
        """The final states `[N, heads, ...]`, in the caller's order."""
        state = torch.cat([state, *reversed(finished)]).unflatten(0, (self.N, self.H))
        return state if self.even else state.index_select(0, self.rank)
