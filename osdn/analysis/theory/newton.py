"""Newton scaling: the covariance stays between 0 and its prior, no write overshoots, and the state solves a
ridge regression.

The bounds need non-negative write strengths and a retention of at most 1; the keys can be anything.  They are
measured on runs of `newton_keys` with blocks of one, some and all channels.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from osdn.analysis.theory.check import Check, log
from osdn.ops import newton_delta_rule, newton_keys

POSITIVE = "beta is not negative"
KEPT = "retention is at most 1"
RETAINED = "nothing is forgotten"


@dataclass(frozen=True)
class NewtonScalingProblem:
    """The tensors of `newton_delta_rule` in float64, one problem per row, with keys of any norm."""

    q: Tensor  # [B, T, 1, K]
    k: Tensor  # [B, T, 1, K]
    v: Tensor  # [B, T, 1, V]
    beta: Tensor  # [B, T, 1]
    retention: Tensor  # [B, T, 1]
    prior: float
    block_size: int
    backend: str = "auto"

    def settings(self) -> dict[str, Any]:
        return {"prior": self.prior, "block_size": self.block_size, "backend": self.backend}

    @property
    def hypotheses(self) -> dict[str, bool]:
        return {POSITIVE: bool((self.beta >= 0).all()), KEPT: bool((self.retention <= 1).all())}


def random_problem(
    generator: torch.Generator, B: int, block_size: int, T: int = 40, K: int = 6, backend: str = "auto"
) -> NewtonScalingProblem:
    """Keys of different norms that share a direction, with write strengths up to 5."""
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    q, k, v = (torch.randn(B, T, 1, n, **options) for n in (K, K, 3))
    k = 3 * torch.rand(B, T, 1, 1, **options) * (k + torch.randn(B, 1, 1, K, **options))
    beta, retention = 5 * torch.rand(B, T, 1, **options), 0.8 + 0.2 * torch.rand(B, T, 1, **options)
    return NewtonScalingProblem(q, k, v, beta, retention, prior=2.0, block_size=block_size, backend=backend)


def eigenvalues(p: NewtonScalingProblem) -> Tensor:
    """The eigenvalues of the covariance after every token, [B, T, K]."""
    P, by_token = None, []
    for k, beta, retention in zip(p.k.split(1, 1), p.beta.split(1, 1), p.retention.split(1, 1)):
        _, P = newton_keys(k, beta, retention=retention, initial_covariance=P, **p.settings())
        by_token.append(torch.linalg.eigvalsh(P).flatten(1))
    return torch.stack(by_token, 1)


def covariance_bounds(p: NewtonScalingProblem) -> tuple[Check, Check]:
    """0 < 1 / (1 / prior + sum_i beta_i |k_i|^2) <= P <= prior, at the token where each is tightest."""
    e = eigenvalues(p)
    seen = (p.beta * p.k.square().sum(-1))[..., 0].cumsum(1)  # [B, T]
    floor, least = -log(1 / p.prior + seen), log(e.amin(2).clamp_min(0))
    tightest = (least - floor).argmin(1, keepdim=True)
    most = log(e.amax((1, 2)))
    return (
        Check(
            "Newton: 0 < P",
            "<=",
            floor.gather(1, tightest)[:, 0],
            least.gather(1, tightest)[:, 0],
            p.hypotheses,
        ),
        Check("Newton: P ≤ prior", "<=", most, torch.full_like(most, p.prior).log(), p.hypotheses),
    )


def no_overshoot(p: NewtonScalingProblem) -> Check:
    """beta <w, k> < 1: a write never takes its error past zero."""
    w, _ = newton_keys(p.k, p.beta, retention=p.retention, **p.settings())
    step = p.beta * (w * p.k).sum(-1)
    largest = step.abs().amax((1, 2))
    return Check("Newton: beta <w, k> < 1", "<", log(largest), torch.zeros_like(largest), p.hypotheses)


def ridge_regression(p: NewtonScalingProblem) -> Check:
    """With one block and no forgetting, S = argmin_S sum_i beta_i |S' k_i - v_i|^2 + |S|^2 / prior."""
    p = replace(p, block_size=p.k.shape[3])
    _, S, _ = newton_delta_rule(
        p.q, p.k, p.v, p.beta, retention=p.retention, output_final_state=True, **p.settings()
    )
    assert S is not None
    X, Y, weights = p.k[:, :, 0], p.v[:, :, 0], p.beta
    A = X.mT @ (weights * X) + torch.eye(X.shape[2], dtype=X.dtype) / p.prior
    solved = torch.linalg.solve(A, X.mT @ (weights * Y))
    got, want = S[:, 0].flatten(1), solved.flatten(1)
    return Check(
        "Newton: the ridge regression",
        "=",
        log(got.norm(dim=1)),
        log(want.norm(dim=1)),
        {POSITIVE: p.hypotheses[POSITIVE], RETAINED: bool((p.retention == 1).all())},
        error=(got - want).norm(dim=1) / want.norm(dim=1),
    )
