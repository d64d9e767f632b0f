"""The paper's idealised setting: full-gradient steps S - grad f(S) D_t on f(S) = E|S k - v|² / 2.

No operator runs this, so the dynamics are written out here, in terms of E = S - S* with S* the optimum
nearest to S: the gradient is E Sigma and f(S) - f* = tr(E Sigma E') / 2.  Everything is homogeneous in E, so
E is rescaled to norm 1 after every step and its size tracked as a logarithm: even a loss of 1e-1000 is exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from osdn.analysis.theory.check import Check, log
from osdn.analysis.theory.runs import box_least_squares
from osdn.analysis.theory.token_local import Decomposition

REGRET = "R_T is at least the regret incurred"
NEWTON = "the comparator is Σ⁺"
MONOTONE = "no step raises f (not needed)"


@dataclass(frozen=True)
class Population:
    """P regressions: the covariances of their keys, and where the state starts relative to an optimum."""

    covariance: Tensor  # [P, K, K]
    start: Tensor  # [P, V, K]

    @property
    def smoothness(self) -> Tensor:
        """L, the smoothness of f, [P]."""
        return torch.linalg.eigvalsh(self.covariance)[:, -1]

    @property
    def newton(self) -> Tensor:
        """The comparator, [P, K, K]."""
        return torch.linalg.pinv(self.covariance, hermitian=True)

    def loss(self, E: Tensor) -> Tensor:
        """f(S) - f* for E = S - S*, [P]."""
        return ((E @ self.covariance) * E).sum((-2, -1)) / 2


def random_population(
    generator: torch.Generator,
    P: int = 16,
    K: int = 4,
    V: int = 3,
    rank: int | None = None,
    spread: float = 0.3,
) -> Population:
    """Covariances with random eigenvectors and eigenvalues; a `rank` below K leaves a null space."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    basis = torch.linalg.qr(normal(P, K, K)).Q[..., : rank or K]
    strength = (spread * normal(P, rank or K)).exp()
    return Population((basis * strength[:, None]) @ basis.mT, normal(P, V, K))


@dataclass(frozen=True)
class Trajectory:
    """T steps of a learner."""

    population: Population
    log_losses: Tensor  # log(f(S_t) - f*), [P, T + 1]
    directions: Tensor  # S_t - S*, scaled to norm 1, [P, T, V, K]
    feedback: Tensor  # h_t(D_t), [P, T]

    @property
    def length(self) -> int:
        return self.feedback.shape[1]

    def feedback_of(self, D: Tensor) -> Tensor:
        """h_t(D) of one comparator [P, K, K], [P, T]."""
        return feedback(self.population.covariance[:, None], self.directions, D[:, None])

    def regret(self, D: Tensor) -> Tensor:
        """[P]"""
        return (self.feedback - self.feedback_of(D)).sum(1)


def feedback(covariance: Tensor, E: Tensor, D: Tensor) -> Tensor:
    """h_t(D) = (-<G, G D> + |G D|²_Sigma / 2) / |G|² with G = E Sigma; 0 at an optimum, as in the paper."""
    G = E @ covariance
    step = G @ D
    change = -(G * step).sum((-2, -1)) + ((step @ covariance) * step).sum((-2, -1)) / 2
    norm = G.square().sum((-2, -1))
    return torch.where(norm > 0, change / norm, 0.0)


def descend(
    population: Population,
    T: int,
    eta: float | None = None,
    first: Tensor | None = None,
    box: tuple[float, float] | None = None,
) -> Trajectory:
    """Online gradient descent on h_t: over full matrices, or over diagonal ones in a box.

    By default the step size is 1 / L and the first preconditioner I / L.
    """
    cov, L, E = population.covariance, population.smoothness, population.start
    nearest = cov @ population.newton  # projects out directions that no key has
    D = torch.eye(cov.shape[-1], dtype=cov.dtype) / L[:, None, None] if first is None else first
    rate = (1 / L)[:, None, None] if eta is None else eta
    log_size = torch.zeros_like(L)
    log_losses, directions, feedbacks = [], [], []
    for t in range(T + 1):
        E = E @ nearest
        size = E.norm(dim=(-2, -1), keepdim=True)
        E, log_size = E / size.clamp_min(1e-300), log_size + log(size).flatten()
        log_losses.append(log(population.loss(E)) + 2 * log_size)
        if t == T:
            break
        directions.append(E)
        feedbacks.append(feedback(cov, E, D))
        G = E @ cov
        gram = G.mT @ G / G.square().sum((-2, -1), keepdim=True).clamp_min(1e-300)
        E = E - G @ D
        D = D - rate * (gram @ D @ cov - gram)  # the gradient of h_t at D
        if box is not None:
            D = D.diagonal(dim1=-2, dim2=-1).clamp(*box).diag_embed()
    return Trajectory(population, *(torch.stack(x, 1) for x in (log_losses, directions, feedbacks)))


# -------------------------------------------------------------------------------------------- the statements


def exact_quadratic(k: Tensor, v: Tensor) -> Check:
    """Property 1: the Hessian of f is Sigma ⊗ I, so f is L-smooth with L the largest eigenvalue of Sigma.

    Keys [P, N, K] and values [P, N, V] are P samples; f is the mean over a sample.
    """

    def f(S: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (k @ S.reshape(k.shape[-1], -1) - v).square().sum(-1).mean() / 2  # columns of S, stacked

    P, _, K = k.shape
    S = torch.randn(P, K * v.shape[-1], dtype=k.dtype, generator=torch.Generator().manual_seed(0))
    hessian = torch.func.vmap(torch.func.hessian(f))(S, k, v)
    covariance = k.mT @ k / k.shape[1]
    expected = torch.stack([torch.kron(c, torch.eye(v.shape[-1], dtype=k.dtype)) for c in covariance])
    left, right = (torch.linalg.eigvalsh(x)[:, -1] for x in (hessian, covariance))
    error = (hessian - expected).abs().amax((-2, -1))
    return Check("Property 1: Hessian Σ ⊗ I", "=", log(left), log(right), error=error)


def convex_feedback(trajectory: Trajectory, A: Tensor, B: Tensor) -> Check:
    """Lemma: h_t is a convex quadratic: halfway from A to B it sags by |G (A - B)|²_Sigma / 8 |G|²."""
    cov = trajectory.population.covariance[:, None]
    sag = (trajectory.feedback_of(A) + trajectory.feedback_of(B)) / 2 - trajectory.feedback_of((A + B) / 2)
    G = trajectory.directions @ cov
    step = G @ (A - B)[:, None]
    formula = ((step @ cov) * step).sum((-2, -1)) / 8 / G.square().sum((-2, -1))
    return Check("Lemma: h is convex", "=", log(sag).flatten(), log(formula).flatten(), tolerance=1e-6)


def optimal_feedback(trajectory: Trajectory) -> tuple[Check, Check]:
    """Lemma: h_t(Sigma^+) = -(f(S_t) - f*) / |grad f|²; by the Rayleigh quotient, that is at most -1 / 2L."""
    population, E = trajectory.population, trajectory.directions
    newton = -trajectory.feedback_of(population.newton)
    G = E @ population.covariance[:, None]
    formula = (G * E).sum((-2, -1)) / 2 / G.square().sum((-2, -1))
    floor = (1 / (2 * population.smoothness))[:, None].expand_as(newton)
    return (
        Check(
            "Lemma: h of the Newton step",
            "=",
            log(newton).flatten(),
            log(formula).flatten(),
        ),
        Check("Rayleigh: 1/2L ≤ |h(Σ⁺)|", "<=", log(floor).flatten(), log(newton).flatten()),
    )


def population_bound(
    trajectory: Trajectory, comparator: Tensor | None = None, regret: Tensor | None = None
) -> Check:
    """Theorem 1: (f(S_{T+1}) - f*) / (f(S_1) - f*) <= (2 L R_T / T)^T, here as logarithms per step."""
    population, newton = trajectory.population, trajectory.population.newton
    comparator = newton if comparator is None else comparator
    incurred = trajectory.regret(comparator)
    regret = incurred if regret is None else regret
    hypotheses = {
        MONOTONE: bool((trajectory.feedback <= 1e-12).all()),
        NEWTON: torch.allclose(comparator, newton),
        REGRET: bool((regret >= incurred - 1e-9).all()),
    }
    left = (trajectory.log_losses[:, -1] - trajectory.log_losses[:, 0]) / trajectory.length
    right = log(2 * population.smoothness * regret / trajectory.length)
    return Check("Theorem 1", "<=", left, right, hypotheses)


def bounded_regret(population: Population) -> Tensor:
    """Sharper than the paper: L |D_1 - Sigma^+|² / 2 bounds the regret of steps 1 / L from D_1 = I / L, [P].

    Sigma^+ minimises every h_t, so each step moves D closer to it: |D_{t+1} - Sigma^+|² <= |D_t - Sigma^+|² -
    (2 / L) (h_t(D_t) - h_t(Sigma^+)).  Theorem 1 then reads (L² |D_1 - Sigma^+|² / T)^T.
    """
    first = torch.eye(population.newton.shape[-1], dtype=torch.float64) / population.smoothness[:, None, None]
    seen = population.covariance @ population.newton  # how D acts on directions that no key has is irrelevant
    return population.smoothness * (seen @ (first - population.newton) @ seen).square().sum((-2, -1)) / 2


def constant_regret(trajectory: Trajectory) -> Check:
    """The regret of `descend` never exceeds `bounded_regret`, however long it runs."""
    population = trajectory.population
    incurred = trajectory.regret(population.newton)
    return Check("Sharper, Theorem 1: bounded regret", "<=", log(incurred), log(bounded_regret(population)))


def population_decomposition(trajectory: Trajectory, box: tuple[float, float]) -> Decomposition:
    """The regret of a diagonal learner against Sigma^+, split into learning, the box, and being diagonal."""
    cov = trajectory.population.covariance
    G = trajectory.directions @ cov[:, None]
    gram = G.mT @ G / G.square().sum((-2, -1), keepdim=True)  # sum_t h_t(Diag d) = d'Qd / 2 - c'd
    Q, c = (gram.sum(1) * cov), gram.sum(1).diagonal(dim1=-2, dim2=-1)
    inside = box_least_squares(Q, c, box)
    free = (torch.linalg.pinv(Q, hermitian=True) @ c[..., None])[..., 0]
    sums = {
        "learner": trajectory.feedback.sum(1),
        "inside": trajectory.feedback_of(inside.diag_embed()).sum(1),
        "free": trajectory.feedback_of(free.diag_embed()).sum(1),
        "newton": trajectory.feedback_of(trajectory.population.newton).sum(1),
    }
    return Decomposition(
        sums["learner"] - sums["newton"],
        sums["learner"] - sums["inside"],
        sums["inside"] - sums["free"],
        sums["free"] - sums["newton"],
    )
