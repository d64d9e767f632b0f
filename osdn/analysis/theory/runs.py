"""A problem is a stream of keys, values and gates; a run sends it through the operators and measures writes.

Measuring needs the state just before and just after each write.  A token with `beta = 0` reads the state and
writes nothing, so every token is sent twice, first with `beta = 0`: the first copy, which also takes the
decay, reads the state before the write, the second the state after it.  This takes one call of the operator
and no second copy of its recurrence.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from osdn.analysis.theory.check import log
from osdn.ops import delta_rule, precondition_keys


@dataclass(frozen=True)
class Problem:
    """Keys, values and gates in the operators' layout, and the settings of phase 1."""

    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    beta: Tensor  # [B, T, H]
    log_decay: Tensor | None = None  # [B, T, H] or [B, T, H, K]
    initial_state: Tensor | None = None  # [B, H, K, V]
    eta: float = 0.003
    bounds: tuple[float, float] | None = (0.5, 2.0)
    retention: float | Tensor | None = None  # a number, [B, T, H] or [B, T, H, K]
    initial_scale: Tensor | None = None  # [B, H, K]
    beta_aware: bool = True
    eps: float = 1e-6
    backend: str = "auto"
    write_keys: Tensor | None = None  # [B, T, H, K] of another rule; phase 1 is then skipped

    @property
    def s(self) -> Tensor:
        """The squared keys, channel by channel, [B, T, H, K]."""
        return self.k.square()

    @property
    def n(self) -> Tensor:
        """The squared norms of the keys, [B, T, H]."""
        return self.s.sum(-1)

    @property
    def length(self) -> int:
        return self.k.shape[1]

    @property
    def start(self) -> Tensor:
        """The scale before the first token, [B, H, K]."""
        ones = torch.ones_like(self.k[:, 0])
        return ones if self.initial_scale is None else self.initial_scale.expand_as(ones)

    def with_(self, **changes: Any) -> "Problem":
        return replace(self, **changes)

    def feedback(self, d: Tensor) -> Tensor:
        """h_t(d) of a fixed scale d in closed form, [B, H, K] -> [B, T, H]."""
        return ((1 - self.beta * (d[:, None] * self.s).sum(-1)).square() - 1) / (2 * self.n)

    def scales(self) -> tuple[Tensor, Tensor]:
        """Phase 1: the write keys [B, T, H, K] and the last scale [B, H, K]."""
        return precondition_keys(
            self.k,
            self.beta,
            eta=self.eta,
            bounds=self.bounds,
            retention=self.retention,
            initial_scale=self.initial_scale,
            beta_aware=self.beta_aware,
            eps=self.eps,
            backend=self.backend,
        )


@dataclass(frozen=True)
class Run:
    """What the operators did with a problem: losses f_t before and after the write of token t, [B, T, H]."""

    problem: Problem
    write_keys: Tensor  # [B, T, H, K]
    before: Tensor
    after: Tensor
    final_state: Tensor  # [B, H, K, V]

    @property
    def log_q(self) -> Tensor:
        """log f_t(S_t) / f_t(S_{t-1}), measured, [B, T, H]."""
        return log(self.after) - log(self.before)

    @property
    def feedback(self) -> Tensor:
        """h_t(d_t), measured, [B, T, H]."""
        return (self.after - self.before) / (2 * self.before * self.problem.n)

    @property
    def step(self) -> Tensor:
        """beta_t <d_t, s_t>, the fraction of the residual that the write removes, [B, T, H]."""
        return self.problem.beta * (self.write_keys * self.problem.k).sum(-1)

    def regret(self, d: Tensor) -> Tensor:
        """The regret of the run against the fixed scale d, [B, H]."""
        return (self.feedback - self.problem.feedback(d)).sum(1)


def run(problem: Problem) -> Run:
    """Run both phases, with the loss of every token before and after its write."""
    return measure(problem, problem.scales()[0] if problem.write_keys is None else problem.write_keys)


def measure(problem: Problem, write_keys: Tensor) -> Run:
    """Run phase 2 with these write keys."""
    zero = torch.zeros_like(problem.beta)
    k, v = _twice(problem.k), _twice(problem.v)
    decay = problem.log_decay
    o, final_state = delta_rule(
        k,
        k,
        v,
        _interleave(zero, problem.beta),
        write_keys=_twice(write_keys),
        log_decay=None if decay is None else _interleave(decay, torch.zeros_like(decay)),
        scale=1.0,
        initial_state=problem.initial_state,
        output_final_state=True,
        backend=problem.backend,
    )
    assert final_state is not None
    losses = (o - v).square().sum(-1) / 2
    return Run(problem, write_keys, losses[:, 0::2], losses[:, 1::2], final_state)


def best_fixed_scale(problem: Problem, bounds: tuple[float, float] | None) -> Tensor:
    """The scale in the box that minimises sum_t h_t(d), [B, H, K]; without bounds, that of smallest norm."""
    A = problem.beta[..., None] * problem.s / problem.n[..., None].sqrt()  # rows of the least-squares problem
    A, b = A.transpose(1, 2), problem.n.rsqrt().transpose(1, 2)[..., None]  # [B, H, T, K], [B, H, T, 1]
    if bounds is None:
        return (torch.linalg.pinv(A) @ b)[..., 0]
    return box_least_squares(A.mT @ A, (A.mT @ b)[..., 0], bounds)


def box_least_squares(
    Q: Tensor, c: Tensor, bounds: tuple[float, float], gap: float = 1e-12, rounds: int = 200
) -> Tensor:
    """argmin over the box of d'Qd / 2 - c'd by an interior-point method, [..., K, K], [..., K] -> [..., K].

    It stops when <gradient, d - x> <= gap (1 + |c|) for every x in the box, which bounds how far d is from
    optimal.  A final sweep of coordinate descent moves coordinates that belong on a wall onto it.
    """
    low, high = bounds
    a = b = torch.full_like(c, (high - low) / 2)  # distances to the two walls
    lower = upper = c.abs().amax(-1, keepdim=True).expand_as(c) + 1  # the walls' multipliers
    for _ in range(rounds):
        gradient = (Q @ (low + a)[..., None])[..., 0] - c
        downhill = torch.where(gradient > 0, a, -b)  # as far as the box allows
        if ((gradient * downhill).sum(-1) <= gap * (1 + c.abs().sum(-1))).all():
            return _sweep(Q, c, low + a, bounds)
        target = 0.1 * (a * lower + b * upper).mean(-1, keepdim=True) / 2
        system = Q + (lower / a + upper / b).diag_embed()
        step = torch.linalg.solve(system, target / a - target / b - gradient)
        dl, du = target / a - lower - lower / a * step, target / b - upper + upper / b * step
        shrink = torch.stack([-step / a, step / b, -dl / lower, -du / upper]).amax((0, -1))
        t = (0.99 / shrink.clamp_min(0.99))[..., None]  # stay inside
        a, b, lower, upper = a + t * step, b - t * step, lower + t * dl, upper + t * du
    raise RuntimeError(f"the box-constrained least squares did not converge in {rounds} rounds")


def _sweep(Q: Tensor, c: Tensor, d: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Set each coordinate in turn to its best value."""
    d = d.clone()
    # a channel that no key uses has a zero row: any value is optimal, so it stays as it is
    curvature = Q.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(c.dtype).tiny)
    for i in range(c.shape[-1]):
        slope = (Q[..., i, :] * d).sum(-1) - c[..., i]
        d[..., i] = (d[..., i] - slope / curvature[..., i]).clamp(*bounds)
    return d


def random_problem(
    generator: torch.Generator,
    B: int = 32,
    T: int = 48,
    K: int = 6,
    V: int = 4,
    decay: str = "none",
    beta: tuple[float, float] = (0.1, 0.95),
    **settings: Any,
) -> Problem:
    """B problems with unit keys whose channels have different scales; `decay` is none, scalar or channel."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k = F.normalize(normal(B, T, 1, K) * normal(B, 1, 1, K).exp(), dim=-1)
    gates = beta[0] + (beta[1] - beta[0]) * normal(B, T, 1).sigmoid()
    shape = {"none": None, "scalar": (B, T, 1), "channel": (B, T, 1, K)}[decay]
    log_decay = None if shape is None else F.logsigmoid(normal(*shape) + 2)
    return Problem(k, normal(B, T, 1, V), gates, log_decay, **settings)


def newton_problem(generator: torch.Generator, d_star: Tensor | None = None, **sizes: Any) -> Problem:
    """A problem that meets the gated Newton condition: beta_t = 1 / <d*, s_t> for a d* inside the box."""
    problem = random_problem(generator, **sizes)
    if d_star is None:
        shape = problem.k[:, 0].shape
        d_star = 1.05 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return problem.with_(beta=1 / (d_star[:, None] * problem.s).sum(-1))


def _twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], 2).flatten(1, 2)
