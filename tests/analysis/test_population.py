"""The statements about the idealised dynamics, and the dynamics against gradient steps on data."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osdn.analysis.theory import population as pop
from osdn.analysis.theory.population import Population


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(1, 4), st.integers(1, 40), st.floats(0.1, 0.8))
def test_statements_hold_on_random_populations(seed, K, V, T, spread):
    rank = 2 + seed % (K - 1)  # with a single direction, the first step already reaches the optimum
    population = pop.random_population(generator(seed), P=4, K=K, V=V, rank=rank, spread=spread)
    trajectory = pop.descend(population, T)
    ends = torch.randn(2, 4, K, K, generator=generator(seed), dtype=torch.float64)
    checks = [*pop.optimal_feedback(trajectory), pop.convex_feedback(trajectory, *ends)]
    checks += [pop.constant_regret(trajectory), pop.population_bound(trajectory)]
    for check in checks:
        assert check.holds, (check.statement, check.verdict)


def test_the_dynamics_are_full_gradient_steps_on_data():
    """Against S - grad f(S) D with autograd's gradient of the mean squared error on keys and values."""
    k, v = (torch.randn(2, 30, n, generator=generator(n), dtype=torch.float64) for n in (4, 3))
    S = torch.randn(2, 3, 4, generator=generator(), dtype=torch.float64)

    def f(S):
        return (torch.einsum("pvk,pnk->pnv", S, k) - v).square().sum(-1).mean(-1) / 2  # [P]

    covariance = k.mT @ k / 30
    optimum = (v.mT @ k / 30) @ torch.linalg.pinv(covariance)
    population = Population(covariance, S - optimum)
    trajectory = pop.descend(population, 5)
    D = torch.eye(4, dtype=torch.float64) / population.smoothness[:, None, None]
    for t in range(5):
        torch.testing.assert_close(
            (f(S) - f(optimum)).log(), trajectory.log_losses[:, t], rtol=1e-6, atol=1e-6
        )
        gradient = torch.func.grad(lambda S: f(S).sum())(S)
        norm = gradient.square().sum((-2, -1))

        def feedback(D, S=S, gradient=gradient, norm=norm):
            return (f(S - gradient @ D) - f(S)) / norm

        torch.testing.assert_close(feedback(D), trajectory.feedback[:, t], rtol=1e-6, atol=1e-9)
        slope = torch.func.grad(lambda D, h=feedback: h(D).sum())(D)
        S, D = S - gradient @ D, D - slope / population.smoothness[:, None, None]


def test_property_1_holds_and_fails_for_the_wrong_kronecker_order(monkeypatch):
    k, v = (torch.randn(3, 9, n, generator=generator(n), dtype=torch.float64) for n in (4, 2))
    assert pop.exact_quadratic(k, v).passed
    kron = torch.kron
    monkeypatch.setattr(torch, "kron", lambda a, b: kron(b, a))
    assert not pop.exact_quadratic(k, v).passed


def test_monotone_descent_is_not_needed_for_theorem_1():
    """The ratios only have to be non-negative for the inequality of means."""
    population = pop.random_population(generator(), P=8)
    first = torch.eye(4, dtype=torch.float64) / population.smoothness[:, None, None]
    for leap in (3.0, 10.0, -1.0):
        check = pop.population_bound(pop.descend(population, 20, first=leap * first))
        assert check.violated == [pop.MONOTONE]
        assert check.holds


@pytest.mark.parametrize("c", [0.01, 100.0])
def test_rescaling_the_keys_changes_neither_side_of_theorem_1(c):
    """So L alone does not determine how fast the bound shrinks: scaling the keys changes nothing but L."""
    population = pop.random_population(generator(), P=6)
    scaled = Population(c * population.covariance, population.start)
    a, b = (pop.population_bound(pop.descend(x, 16)) for x in (population, scaled))
    torch.testing.assert_close(a.left, b.left, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(a.right, b.right)
    torch.testing.assert_close(scaled.smoothness, c * population.smoothness)


def test_the_bounded_regret_makes_theorem_1_faster_than_a_square_root():
    population = pop.random_population(generator(), P=8)
    for T in (16, 64, 256):
        check = pop.population_bound(pop.descend(population, T), regret=pop.bounded_regret(population))
        assert check.passed
        constant = 2 * population.smoothness * pop.bounded_regret(population)
        torch.testing.assert_close(check.right, (constant / T).log())


# --------------------------------------------------------------------------------------- the decomposition


def test_the_parts_vanish_when_they_should():
    strength = torch.rand(5, 4, generator=generator(), dtype=torch.float64) + 0.6
    start = torch.randn(5, 3, 4, generator=generator(), dtype=torch.float64)
    axes = Population(strength.diag_embed(), start)
    roomy, tight = (0.1, 5.0), (0.1, 0.6)  # the optimum 1 / strength lies between 0.62 and 1.67
    inside = pop.population_decomposition(pop.descend(axes, 30, box=roomy), roomy)
    assert inside.diagonal.abs().max() < 1e-9  # the covariance is diagonal, so is its inverse
    assert inside.box.abs().max() < 1e-9
    outside = pop.population_decomposition(pop.descend(axes, 30, box=tight), tight)
    assert outside.box.min() > 1e-3
    turned = pop.random_population(generator(), P=5, spread=0.8)
    crossed = pop.population_decomposition(pop.descend(turned, 30, box=roomy), roomy)
    assert crossed.diagonal.min() > 1e-3


def test_the_comparators_are_the_best_of_their_class():
    population, box = pop.random_population(generator(), P=3, spread=0.6), (0.5, 1.0)
    trajectory = pop.descend(population, 40, box=box)
    parts = pop.population_decomposition(trajectory, box)
    assert parts.check("parts").passed
    best = trajectory.feedback.sum(1) - parts.online
    for seed in range(200):
        d = 0.5 + 0.5 * torch.rand(3, 4, generator=generator(seed), dtype=torch.float64)
        assert (trajectory.feedback_of(d.diag_embed()).sum(1) >= best - 1e-9).all()
