"""The paper's statements about the implemented update, each measured on runs of the operators.

Everything the theorems bound follows from f_t before and after a write (`run`), the closed form of the
feedback, and the best fixed scale in the box.  Each function here combines them into one statement.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osdn.analysis.theory.check import Check, log
from osdn.analysis.theory.runs import Problem, Run, best_fixed_scale, measure, run

UNIT = "keys have norm 1"
RESIDUAL = "no residual is zero (unstated)"
GATE = "0 < beta < 1"
BOX = "the box lies in (0, 2]"
FLOOR = "no |k|² is below eps (unstated)"
RETENTION = "retention is 1"
BETA_AWARE = "phase 1 sees beta"
START = "the first scale lies in the box"
COMPARATOR = "the comparator lies in the box"
REGRET = "R_T is at least the regret incurred"
NEWTON = "some d in the box has beta <d, s_t> = 1 for all t"
TEXTBOOK = "eta = D / (G √T)"
STEP_SIZE = "eta < 2 / L_h"
CLASSES = "a class fixes its key and its value"
DISJOINT = "keys of different classes share no channel"
NO_DECAY = "the state does not decay"


# --------------------------------------------------------------------------------- the feedback of one token


def closed_form(problem: Problem) -> Check:
    """Lemma 1: h_t, measured from the states, is ((1 - beta <d, s>)² - 1) / 2|k|²."""
    r = run(problem)
    measured, formula = r.feedback, ((1 - r.step).square() - 1) / (2 * problem.n)
    return Check(
        "Lemma 1: closed form of h",
        "=",
        _problems(log(measured.abs()).mean(1)),
        _problems(log(formula.abs()).mean(1)),
        {RESIDUAL: _residuals(r)},
        error=_problems((measured - formula).abs().amax(1)),
    )


def phase_one_descends(problem: Problem) -> Check:
    """Lemma 1: the step of phase 1 is -eta times the gradient that autograd computes through phase 2."""
    tokens = _tokens(problem)
    gradient = _measured_gradient(tokens, tokens.start)
    _, stepped = tokens.with_(bounds=None).scales()
    step = (tokens.start - stepped) / problem.eta
    return Check(
        "Lemma 1: phase 1 descends h",
        "=",
        log(gradient.norm(dim=-1)).flatten(),
        log(step.norm(dim=-1)).flatten(),
        {
            RESIDUAL: _residuals(run(problem)),
            FLOOR: bool((problem.n >= problem.eps).all()),
            RETENTION: _retains(problem),
            BETA_AWARE: problem.beta_aware,
        },
        error=(gradient - step).norm(dim=-1).flatten(),
    )


def smoothness(problem: Problem) -> tuple[Check, Check]:
    """Proposition: the Hessian of h_t has norm beta² sum k⁴ / |k|², which is at most 1 for unit keys."""
    tokens = _tokens(problem)
    d, steps = tokens.start, torch.eye(tokens.k.shape[-1], dtype=tokens.k.dtype)
    origin = _measured_gradient(tokens, d)
    # the gradient is affine, so its differences are columns of the Hessian
    columns = [_measured_gradient(tokens, d + e) - origin for e in steps]
    measured = torch.linalg.matrix_norm(torch.stack(columns, -1), 2).flatten()
    formula = (tokens.beta.square() * tokens.s.square().sum(-1) / tokens.n).flatten()
    hypotheses = {UNIT: _unit(problem), RESIDUAL: _residuals(run(problem))}
    return (
        Check(
            "Smoothness: L_h = β² Σk⁴ / |k|²",
            "=",
            log(measured),
            log(formula),
            {RESIDUAL: hypotheses[RESIDUAL]},
            error=(measured - formula).abs(),
        ),
        Check(
            "Smoothness: L_h ≤ 1",
            "<=",
            log(measured),
            torch.zeros_like(measured),
            {**hypotheses, GATE: _gated(problem)},
        ),
    )


def monotone_descent(problem: Problem) -> Check:
    """Corollary: with a box inside (0, 2], every write lowers the loss of its token."""
    r = run(problem)
    worst = _problems(r.log_q.amax(1))
    hypotheses = {
        UNIT: _unit(problem),
        GATE: _gated(problem),
        BOX: problem.bounds is not None and problem.bounds[0] > 0 and problem.bounds[1] <= 2,
        START: _inside(problem.start, problem),
        RESIDUAL: _residuals(r),
    }
    return Check("Corollary: monotone descent", "<", worst, torch.zeros_like(worst), hypotheses)


def affine_forgetting(problem: Problem) -> Check:
    """Proposition: with forgetting, each token of phase 1 is an affine map of the scale, then a clip."""
    measured, last = problem.scales()
    scales = affine_scales(problem)
    gap = (scales[:, :-1] * problem.k - measured).abs().amax((1, 3))
    return Check(
        "APF: the scan stays affine",
        "=",
        _problems(log(last.norm(dim=-1))),
        _problems(log(scales[:, -1].norm(dim=-1))),
        error=_problems(torch.maximum(gap, (scales[:, -1] - last).abs().amax(-1))),
    )


def affine_scales(problem: Problem) -> Tensor:
    """d_1 to d_{T+1} as in the proposition: matrices r I - eta b² ss' / n, then a clip, [B, T + 1, H, K]."""
    retention = _full(1.0 if problem.retention is None else problem.retention, problem)  # [B, T, H, K]
    scales = [problem.start]
    for t in range(problem.length):
        s, b = problem.s[:, t], problem.beta[:, t, :, None] if problem.beta_aware else 1.0
        rate = problem.eta / problem.n[:, t, :, None].clamp_min(problem.eps)
        A = retention[:, t].diag_embed() - (rate * b * b)[..., None] * s[..., :, None] * s[..., None, :]
        d = (A @ scales[-1][..., None])[..., 0] + rate * b * s
        scales.append(d if problem.bounds is None else d.clamp(*problem.bounds))
    return torch.stack(scales, 1)


# ------------------------------------------------------------------------------------------------- theorem 2


def token_local_bound(problem: Problem, d: Tensor | None = None, regret: Tensor | None = None) -> Check:
    """Theorem 2: the geometric mean of q_t is at most 2 eps_T(d) + 2 R_T(d) / T, here as logarithms per
    token.

    By default the comparator d [B, H, K] is the best in the box and the regret [B, H] is that of the run.
    """
    r = run(problem)
    d = best_fixed_scale(problem, _box(problem)) if d is None else d
    incurred = r.regret(d)
    regret = incurred if regret is None else regret
    hypotheses = {
        UNIT: _unit(problem),
        RESIDUAL: _residuals(r),
        COMPARATOR: _inside(d, problem),
        REGRET: bool((regret >= incurred - 1e-9).all()),
    }
    left, right = r.log_q.mean(1), log(2 * comparator_gap(problem, d) + 2 * regret / problem.length)
    return Check("Theorem 2", "<=", _problems(left), _problems(right), hypotheses)


def comparator_gap(problem: Problem, d: Tensor) -> Tensor:
    """eps_T(d), [B, H]."""
    return (1 - problem.beta * (d[:, None] * problem.s).sum(-1)).square().mean(1) / 2


def online_regret(problem: Problem) -> Check:
    """The regret against the best scale d is at most |d_1 - d|² / 2 eta + eta / 2 sum |grad h_t(d_t)|²."""
    r = run(problem)
    d = best_fixed_scale(problem, _box(problem))
    slopes = (problem.beta * (1 - r.step) / problem.n).abs() * problem.s.norm(dim=-1)  # |grad h_t(d_t)|
    distance = (problem.start - d).square().sum(-1)
    bound = distance / (2 * problem.eta) + problem.eta / 2 * slopes.square().sum(1)
    return Check(
        "OGD regret, any step",
        "<=",
        _problems(log(r.regret(d))),
        _problems(log(bound)),
        _learner(problem, r),
    )


def textbook_regret(problem: Problem) -> Check:
    """With the textbook step, the regret is at most diameter * gradient bound * sqrt(T)."""
    r = run(problem)
    regret = r.regret(best_fixed_scale(problem, _box(problem)))
    bound = diameter(problem) * gradient_bound(problem) * math.sqrt(problem.length)
    return Check(
        "OGD regret, textbook step",
        "<=",
        _problems(log(regret)),
        torch.full_like(_problems(regret), math.log(bound)),
        {**_learner(problem, r), **_textbook(problem)},
    )


def diameter(problem: Problem) -> float:
    low, high = _box(problem)
    return (high - low) * math.sqrt(problem.k.shape[-1])


def gradient_bound(problem: Problem) -> float:
    """An upper bound on |grad h_t| = beta |1 - beta <d, s>| |s|, for unit keys and gates up to 1."""
    return max(1.0, _box(problem)[1] - 1)


def textbook_eta(problem: Problem) -> float:
    return diameter(problem) / (gradient_bound(problem) * math.sqrt(problem.length))


# -------------------------------------------------------------------------------------- the gated Newton case


def newton_rate(problem: Problem) -> Check:
    """Theorem 2, gated Newton case with the textbook step: the geometric mean is at most 2 D G / √T."""
    r = run(problem)
    right = math.log(2 * diameter(problem) * gradient_bound(problem) / math.sqrt(problem.length))
    left = _problems(r.log_q.mean(1))
    hypotheses = {**_learner(problem, r), **_textbook(problem), NEWTON: _newton(problem)}
    return Check("Theorem 2, Newton: (C/√T)^T", "<=", left, torch.full_like(left, right), hypotheses)


def newton_constant_regret(problem: Problem) -> Check:
    """Sharper than the paper: if all h_t share a minimiser, the regret is bounded and the rate is (O(1)/T)^T.

    No step moves d away from d*: |d_{t+1} - d*|² <= |d_t - d*|² - eta (2 - eta L_h) q_t, hence
    sum q_t <= |d_1 - d*|² / (eta (2 - eta L_h)), for any constant step below 2 / L_h.
    """
    r = run(problem)
    d = best_fixed_scale(problem, _box(problem))
    L = (problem.beta.square() * problem.s.square().sum(-1)).amax(1)  # [B, H]
    bound = (problem.start - d).square().sum(-1) / (problem.eta * (2 - problem.eta * L) * problem.length)
    hypotheses = {
        **_learner(problem, r),
        UNIT: _unit(problem),
        NEWTON: _newton(problem),
        STEP_SIZE: bool((problem.eta * L < 2).all()),
    }
    return Check(
        "Sharper, Newton: (C/T)^T",
        "<=",
        _problems(r.log_q.mean(1)),
        _problems(log(bound)),
        hypotheses,
    )


# ------------------------------------------------------------------------ from tokens to a global statement


def repeated_keys(problem: Problem, classes: Tensor) -> Check:
    """Corollary: for classes [T] with disjoint channels, prod_c F_c(S_T) / F_c(S_0) is the product of q_t."""
    r = run(problem)
    firsts = [int((classes == c).nonzero()[0]) for c in classes.unique()]
    k, v = problem.k[:, firsts], problem.v[:, firsts]  # [B, C, H, ...]
    start = torch.zeros_like(r.final_state) if problem.initial_state is None else problem.initial_state
    first_losses, last_losses = _class_losses(start, k, v), _class_losses(r.final_state, k, v)
    supports = (k != 0).sum(1)
    same = classes[:, None] == classes[firsts]  # [T, C]
    expected_k, expected_v = k[:, same.int().argmax(1)], v[:, same.int().argmax(1)]
    hypotheses = {
        CLASSES: torch.equal(problem.k, expected_k) and torch.equal(problem.v, expected_v),
        DISJOINT: bool((supports <= 1).all()),
        NO_DECAY: problem.log_decay is None,
        RESIDUAL: _residuals(r),
    }
    left = (log(last_losses) - log(first_losses)).sum(1) / problem.length
    right = r.log_q.mean(1)
    return Check(
        "Corollary: repeated keys", "=", _problems(left), _problems(right), hypotheses, tolerance=1e-6
    )


def repeated_keys_problem(
    generator: torch.Generator, B: int = 8, T: int = 12, channels: tuple[int, ...] = (2, 3, 1), V: int = 3
) -> tuple[Problem, Tensor]:
    """A stream of tokens whose classes own disjoint channels, and the class of each token; all appear."""
    C, K = len(channels), sum(channels)
    k, owner = torch.zeros(C, K, dtype=torch.float64), torch.repeat_interleave(torch.tensor(channels))
    k[owner, torch.arange(K)] = torch.randn(K, generator=generator, dtype=torch.float64)
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(C, V, generator=generator, dtype=torch.float64)
    classes = torch.cat([torch.arange(C), torch.randint(C, (T - C,), generator=generator)])
    classes = classes[torch.randperm(T, generator=generator)]
    beta = 0.2 + 0.3 * torch.rand(B, T, 1, generator=generator, dtype=torch.float64)
    expand = (B, T, 1, -1)
    return Problem(
        k[classes][None, :, None].expand(expand), v[classes][None, :, None].expand(expand), beta
    ), classes


def counter_example(T: int = 16, beta: float = 0.8, backend: str = "auto") -> tuple[Check, Run]:
    """K = V = 1, k = 1, v = (-1)^t, exact Newton steps: every q_t is 0 and S never nears its optimum 0."""
    ones = torch.ones(1, T, 1, 1, dtype=torch.float64)
    v = ((-1.0) ** torch.arange(1, T + 1, dtype=torch.float64))[None, :, None, None]
    scale = torch.full((1, 1, 1), 1 / beta, dtype=torch.float64)
    problem = Problem(
        ones, v, torch.full((1, T, 1), beta, dtype=torch.float64), initial_scale=scale, backend=backend
    )
    r = run(problem)
    suboptimality = r.final_state.square().flatten() / 2  # f(S) - f* for f(S) = E (S - v)² / 2
    check = Check(
        "Counter-example K = V = 1",
        "=",
        log(suboptimality),
        torch.full_like(suboptimality, math.log(0.5)),
        {"every token is solved exactly": bool(r.after.max() < 1e-24)},
    )
    return check, r


# --------------------------------------------------------------------------------- the parts of the regret


@dataclass(frozen=True)
class Decomposition:
    """The regret against the comparator that solves every step, in three parts; one entry per problem."""

    total: Tensor
    online: Tensor  # the learner against the best scale in the box
    box: Tensor  # the best scale in the box against the best scale overall
    diagonal: Tensor  # the best scale overall against the full comparator

    def check(self, statement: str) -> Check:
        parts = self.online + self.box + self.diagonal
        hypotheses = {
            "the box costs nothing negative": bool((self.box >= -1e-9).all()),
            "being diagonal costs nothing negative": bool((self.diagonal >= -1e-9).all()),
        }
        error = (parts - self.total).abs() / self.total.abs().clamp_min(1e-300)
        return Check(statement, "=", log(self.total), log(parts), hypotheses, error=error)


def regret_decomposition(problem: Problem) -> Decomposition:
    """The full comparator of each token is kk' / |k|⁴, which leaves no residual: h_t = -1 / 2|k|²."""
    r = run(problem)
    solved = -1 / (2 * problem.n)
    inside, outside = (problem.feedback(best_fixed_scale(problem, b)).sum(1) for b in (_box(problem), None))
    return Decomposition(
        _problems((r.feedback - solved).sum(1)),
        _problems(r.feedback.sum(1) - inside),
        _problems(inside - outside),
        _problems(outside - solved.sum(1)),
    )


# --------------------------------------------------------------------------------------------------- helpers


def _problems(x: Tensor) -> Tensor:
    """[B, H] -> [B H]: every head counts as a separate problem."""
    return x.flatten()


def _box(problem: Problem) -> tuple[float, float]:
    if problem.bounds is None:
        raise ValueError("this statement compares with the best scale in a box: give the problem bounds")
    return problem.bounds


def _inside(d: Tensor, problem: Problem) -> bool:
    if problem.bounds is None:
        return True
    return bool(((d >= problem.bounds[0]) & (d <= problem.bounds[1])).all())


def _unit(problem: Problem) -> bool:
    return bool(((problem.n - 1).abs() < 1e-9).all())


def _gated(problem: Problem) -> bool:
    return bool(((problem.beta > 0) & (problem.beta < 1)).all())


def _residuals(r: Run) -> bool:
    # below 1e-24 a loss is rounding error of values of order 1
    return bool((r.before > 1e-24).all())


def _retains(problem: Problem) -> bool:
    return problem.retention is None or bool((torch.as_tensor(problem.retention) == 1).all())


def _newton(problem: Problem) -> bool:
    return bool((comparator_gap(problem, best_fixed_scale(problem, _box(problem))) < 1e-12).all())


def _learner(problem: Problem, r: Run) -> dict[str, bool]:
    """The hypotheses under which phase 1 is projected online gradient descent on h_t."""
    return {
        RETENTION: _retains(problem),
        BETA_AWARE: problem.beta_aware,
        FLOOR: bool((problem.n >= problem.eps).all()),
        RESIDUAL: _residuals(r),
    }


def _textbook(problem: Problem) -> dict[str, bool]:
    """The further hypotheses of the bound D G sqrt(T)."""
    return {
        UNIT: _unit(problem),
        START: _inside(problem.start, problem),
        TEXTBOOK: math.isclose(problem.eta, textbook_eta(problem)),
    }


def _full(x: float | Tensor, problem: Problem) -> Tensor:
    """A retention of any form, expanded to [B, T, H, K]."""
    x = torch.as_tensor(x, dtype=problem.k.dtype)
    return (x[..., None] if x.ndim == 3 else x).expand_as(problem.k)


def _tokens(problem: Problem) -> Problem:
    """Every token of the run as a one-token problem that starts from the state and scale before it."""
    S, d = problem.initial_state, problem.start
    S = problem.k.new_zeros(*d.shape, problem.v.shape[-1]) if S is None else S
    pieces = []
    for t in range(problem.length):
        token_fields = {x: getattr(problem, x)[:, t : t + 1] for x in ("k", "v", "beta")}
        for x in ("log_decay", "retention"):
            value = getattr(problem, x)
            token_fields[x] = value[:, t : t + 1] if isinstance(value, Tensor) else value
        token = problem.with_(**token_fields, initial_state=S, initial_scale=d)
        pieces.append(token)
        write_keys, d = token.scales()
        S = measure(token, write_keys).final_state

    def stack(name: str) -> Any:
        values = [getattr(piece, name) for piece in pieces]
        return torch.cat(values) if isinstance(values[0], Tensor) else values[0]

    names = ("k", "v", "beta", "log_decay", "retention", "initial_state", "initial_scale")
    return problem.with_(**{name: stack(name) for name in names})


def _measured_gradient(tokens: Problem, d: Tensor) -> Tensor:
    """The gradient of h_t at the scales d [N, H, K] of N tokens, by autograd through a write of phase 2."""
    d = d.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(measure(tokens, d[:, None] * tokens.k).feedback.sum(), d)
    return gradient


def _class_losses(S: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """F_c(S) for a state [B, H, K, V] and classes [B, C, H, ...]: [B, C, H]."""
    return (torch.einsum("bhkv,bchk->bchv", S, k) - v).square().sum(-1) / 2
