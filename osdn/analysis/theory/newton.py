"""Newton scaling: the covariance stays between zero and its prior, no write overshoots, a ridge is solved.

The bounds need write strengths that are not negative and a retention of at most one; they ask nothing of the
keys.  They are measured along runs of `newton_keys` with blocks of one, some and all channels.
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
class Problem:
    """Keys of any length, one problem per row; the tensors of `newton_delta_rule` in float64."""

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
) -> Problem:
    """Keys of lengths up to three that share a direction, write strengths up to five."""
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    q, k, v = (torch.randn(B, T, 1, n, **options) for n in (K, K, 3))
    k = 3 * torch.rand(B, T, 1, 1, **options) * (k + torch.randn(B, 1, 1, K, **options))
    beta, retention = 5 * torch.rand(B, T, 1, **options), 0.8 + 0.2 * torch.rand(B, T, 1, **options)
    return Problem(q, k, v, beta, retention, prior=2.0, block_size=block_size, backend=backend)


def eigenvalues(p: Problem) -> Tensor:
    """Of the covariance after every token, [B, T, K]."""
    P, found = None, []
    for k, beta, retention in zip(p.k.split(1, 1), p.beta.split(1, 1), p.retention.split(1, 1)):
        _, P = newton_keys(k, beta, retention=retention, initial_covariance=P, **p.settings())
        found.append(torch.linalg.eigvalsh(P).flatten(1))
    return torch.stack(found, 1)


def covariance_bounds(p: Problem) -> tuple[Check, Check]:
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


def no_overshoot(p: Problem) -> Check:
    """beta <w, k> < 1: a write never takes its own error past zero."""
    w, _ = newton_keys(p.k, p.beta, retention=p.retention, **p.settings())
    step = p.beta * (w * p.k).sum(-1)
    largest = step.abs().amax((1, 2))
    return Check("Newton: beta <w, k> < 1", "<", log(largest), torch.zeros_like(largest), p.hypotheses)


def ridge_regression(p: Problem) -> Check:
    """One block and no forgetting: the state is argmin_S sum_i beta_i |S' k_i - v_i|^2 + |S|^2 / prior."""
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
