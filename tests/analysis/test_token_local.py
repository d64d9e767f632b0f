"""The statements about the implemented update on random problems, and the measurement behind them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osdn.analysis.theory import runs
from osdn.analysis.theory import token_local as tok
from osdn.analysis.theory.figures import ALTERNATING_BEST, alternating_problem
from osdn.analysis.theory.runs import best_fixed_scale, box_least_squares, newton_problem, random_problem, run
from osdn.ops import delta_rule, online_scaled_delta_rule, precondition_keys


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def problems(draw, retention: bool = True):
    """Problems that meet the hypotheses: unit keys, gates in (0, 1), a box in (0, 2], a start inside it."""
    seed = draw(st.integers(0, 2**31))
    low, high = sorted((draw(st.floats(0.05, 1.0)), draw(st.floats(1.0, 2.0))))
    floor = draw(st.floats(0.01, 0.9))
    p = random_problem(
        generator(seed),
        B=3,
        T=draw(st.integers(1, 40)),
        K=draw(st.integers(1, 8)),
        V=draw(st.integers(1, 5)),
        decay=draw(st.sampled_from(["none", "scalar", "channel"])),
        beta=(floor, draw(st.floats(floor + 0.01, 0.99))),
        eta=draw(st.floats(1e-4, 1.0)),
        bounds=(low, high),
        backend=draw(st.sampled_from(["auto", "reference", "chunkwise"])),
    )
    if retention and draw(st.booleans()):
        p = p.with_(retention=torch.rand(p.k.shape, generator=generator(seed), dtype=torch.float64))
    return p


@settings(max_examples=40, deadline=None)
@given(problems())
def test_statements_that_do_not_involve_the_learner_hold_on_random_problems(p):
    for check in (
        tok.closed_form(p),
        tok.monotone_descent(p),
        tok.affine_forgetting(p),
        tok.token_local_bound(p),
    ):
        assert check.passed, (check.statement, check.verdict)
    check = tok.regret_decomposition(p).check("parts")
    assert check.passed, check.verdict


@settings(max_examples=15, deadline=None)
@given(problems(retention=False))
def test_statements_about_the_learner_hold_on_random_problems(p):
    checks = [tok.phase_one_descends(p), *tok.smoothness(p), tok.online_regret(p)]
    checks.append(tok.textbook_regret(p.with_(eta=tok.textbook_eta(p))))
    for check in checks:
        assert check.passed, (check.statement, check.verdict)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 300), st.integers(1, 8), st.floats(1e-3, 1.9))
def test_the_newton_case_contracts_at_both_rates(seed, T, K, eta):
    p = newton_problem(generator(seed), B=3, T=T, K=K)
    for check in (
        tok.newton_rate(p.with_(eta=tok.textbook_eta(p))),
        tok.newton_constant_regret(p.with_(eta=eta)),
    ):
        assert check.passed, (check.statement, check.verdict)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_repeated_keys_turn_token_local_ratios_into_class_losses(seed, channels):
    p, classes = tok.repeated_keys_problem(generator(seed), B=3, T=12, channels=tuple(channels))
    check = tok.repeated_keys(p, classes)
    assert check.passed, check.verdict
    # and Theorem 2 bounds the quantity in the corollary
    bound = tok.token_local_bound(p)
    assert bound.passed
    assert (check.left <= bound.right + 1e-9).all()


# ---------------------------------------------------------------------------------------- the measurement


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
def test_a_run_measures_the_operators_intermediate_states(decay):
    p = random_problem(generator(), B=2, T=7, K=3, V=2, decay=decay)
    r = run(p)
    w, _ = precondition_keys(p.k, p.beta)
    S = torch.zeros(2, 1, 3, 2, dtype=torch.float64)
    for t in range(p.length):
        k, v = p.k[:, t], p.v[:, t]
        if decay != "none":
            g = p.log_decay[:, t]
            S = (g if g.ndim == 3 else g[..., None]).exp()[..., None] * S
        u = v - torch.einsum("bhkv,bhk->bhv", S, k)
        torch.testing.assert_close(r.before[:, t], u.square().sum(-1) / 2)
        S = S + p.beta[:, t, :, None, None] * w[:, t, :, :, None] * u[:, :, None]
        residual = v - torch.einsum("bhkv,bhk->bhv", S, k)
        torch.testing.assert_close(r.after[:, t], residual.square().sum(-1) / 2)
    torch.testing.assert_close(r.final_state, S)


def test_a_run_ends_in_the_fused_operators_state():
    p = random_problem(generator(), B=2, T=20, decay="channel", eta=0.1)
    _, S, _ = online_scaled_delta_rule(
        p.k, p.k, p.v, p.beta, eta=0.1, log_decay=p.log_decay, output_final_state=True
    )
    torch.testing.assert_close(run(p).final_state, S)


def test_a_wrong_phase_one_is_caught(monkeypatch):
    def too_timid(*args, eta, **settings):
        return precondition_keys(*args, eta=0.9 * eta, **settings)

    monkeypatch.setattr(runs, "precondition_keys", too_timid)
    p = random_problem(generator(), B=2, T=10)
    assert not tok.phase_one_descends(p).passed
    assert not tok.affine_forgetting(p).passed


def test_a_wrong_phase_two_is_caught(monkeypatch):
    def too_strong(q, k, v, beta, **settings):
        return delta_rule(q, k, v, 1.01 * beta, **settings)

    monkeypatch.setattr(runs, "delta_rule", too_strong)
    p = random_problem(generator(), B=2, T=10)
    assert not tok.closed_form(p).passed
    assert not tok.smoothness(p)[0].passed


# ---------------------------------------------------------------------------------- the best fixed scale


@pytest.mark.parametrize(("K", "T", "top"), [(1, 5, 0.45), (4, 50, 0.9), (9, 4, 0.9), (20, 60, 0.9)])
def test_the_best_scale_satisfies_the_optimality_conditions(K, T, top):
    p = random_problem(generator(), B=4, T=T, K=K, beta=(0.2, top))
    d = best_fixed_scale(p, (0.5, 2.0)).requires_grad_()
    (gradient,) = torch.autograd.grad(p.feedback(d).sum(), d)
    at_low, at_high = d == 0.5, d == 2.0
    assert ((d >= 0.5) & (d <= 2.0)).all()
    assert (gradient[at_low] > -1e-6).all()
    assert (gradient[at_high] < 1e-6).all()
    assert (gradient[~at_low & ~at_high].abs() < 1e-6).all()
    assert (at_low | at_high).any()  # the box matters


def test_the_best_scale_beats_a_grid():
    p = random_problem(generator(), B=1, T=30, K=2)
    best = p.feedback(best_fixed_scale(p, (0.5, 2.0))).sum()
    axis = torch.linspace(0.5, 2.0, 61, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    values = torch.stack([p.feedback(d.view(1, 1, 2)).sum() for d in grid])
    assert best <= values.min() + 1e-12
    assert values.min() - best < 1e-2


def test_the_best_free_scale_solves_the_normal_equations():
    p = random_problem(generator(), B=2, T=40, K=5)
    d = best_fixed_scale(p, None).requires_grad_()
    (gradient,) = torch.autograd.grad(p.feedback(d).sum(), d)
    assert gradient.abs().max() < 1e-9


def test_a_solver_that_does_not_converge_raises():
    p = random_problem(generator(), B=4, T=50, K=9)
    Q, c = p.s[:, :, 0].mT @ p.s[:, :, 0], p.s[:, :, 0].sum(1)
    with pytest.raises(RuntimeError, match="did not converge in 1 rounds"):
        box_least_squares(Q, c, (0.5, 2.0), rounds=1)


# -------------------------------------------------------------------------------- where the paper differs


def test_theorem_2_with_the_actual_regret_is_the_inequality_of_means():
    """Its right side is then the arithmetic mean of the q_t, for any comparator."""
    p = random_problem(generator(), B=4)
    mean = run(p).log_q.exp().mean(1).log().flatten()
    for d in (None, p.start, 0.7 * p.start):
        torch.testing.assert_close(tok.token_local_bound(p, d).right, mean)


def test_theorem_2_is_false_under_the_papers_convention_for_zero_residuals():
    """With q_t = 1 and h_t = 0 where u_t = 0, a stream of zeros has product 1, regret 0 and gap 0."""
    p = newton_problem(generator(), B=2, T=5)
    p = p.with_(v=torch.zeros_like(p.v))
    r = run(p)
    assert (r.before == 0).all()  # the empty state answers zero
    product, regret = 1.0, 0.0  # by the convention, for every token
    gap = tok.comparator_gap(p, best_fixed_scale(p, p.bounds))
    assert (product > (2 * gap + 2 * regret / p.length) ** p.length).all()
    assert tok.RESIDUAL in tok.token_local_bound(p).violated


def test_theorem_2_holds_for_keys_of_any_norm_with_the_regret_weighted_by_it():
    """Unit keys only serve to cancel 1 / |k|²; with the regret of |k|² h_t they are not needed."""
    p = random_problem(generator(), B=8)
    p = p.with_(k=p.k * torch.linspace(0.2, 1.3, p.length, dtype=torch.float64)[None, :, None, None])
    r, d = run(p), best_fixed_scale(p, p.bounds)
    weighted = (p.n * (r.feedback - p.feedback(d))).sum(1)
    right = (2 * tok.comparator_gap(p, d) + 2 * weighted / p.length).log()
    assert (r.log_q.mean(1) <= right + 1e-12).all()


def test_a_constant_step_has_regret_that_grows_with_the_stream():
    """R_T = o(T), which the theorem's remarks assume, needs a step that shrinks with T."""
    regrets = []
    for T in (2048, 8192, 32768):
        p = alternating_problem(T)
        torch.testing.assert_close(best_fixed_scale(p, p.bounds), torch.full_like(p.start, ALTERNATING_BEST))
        regrets.append(float(run(p).regret(torch.full_like(p.start, ALTERNATING_BEST))))
    assert regrets[1] / regrets[0] == pytest.approx(4, rel=0.05)
    assert regrets[2] / regrets[1] == pytest.approx(4, rel=0.05)
    g = 0.2  # |h'| of both gates at the best scale: each pair of tokens adds eta g²
    assert regrets[2] / 32768 == pytest.approx(0.003 * g**2 / 2, rel=0.05)


def test_the_newton_regret_stays_bounded_where_the_paper_lets_it_grow():
    p = newton_problem(generator(), B=4, T=4096).with_(eta=1.0)
    d = best_fixed_scale(p, p.bounds)
    r = run(p)
    halves = (r.feedback - p.feedback(d)).unflatten(1, (2, 2048)).sum(2)  # [B, 2, H]
    assert (halves[:, 1] < 0.05 * halves[:, 0]).all()


def test_the_scale_cannot_shrink_the_residual_before_the_decay():
    """OSGDN: against the undecayed state, the residual has an extra (1 - alpha) v that no write changes."""
    p = random_problem(generator(), B=3, T=6, decay="scalar")
    tokens = tok._tokens(p)
    alpha = tokens.log_decay.exp()[..., None]
    read = torch.einsum("nhkv,nthk->nthv", tokens.initial_state, tokens.k)
    before_decay, after_decay = tokens.v - read, tokens.v - alpha * read
    torch.testing.assert_close(after_decay, alpha * before_decay + (1 - alpha) * tokens.v)
    measured = run(tokens)
    torch.testing.assert_close(measured.before, after_decay.square().sum(-1) / 2)
    contracted = (1 - measured.step).square() * before_decay.square().sum(-1) / 2
    assert not torch.allclose(measured.after, contracted)


def test_forgetting_moves_the_proximal_centre():
    """The step before the clip minimises <grad h_t(d_t), D> + |D - r d_t|² / 2 eta."""
    p = random_problem(generator(), B=3, T=1, K=4, bounds=None, eta=0.2, retention=0.7)
    _, stepped = p.scales()
    d = p.start.clone().requires_grad_()
    (slope,) = torch.autograd.grad(p.feedback(d).sum(), d)
    D = stepped.clone().requires_grad_()
    objective = (slope * D).sum() + (D - 0.7 * p.start).square().sum() / (2 * 0.2)
    (gradient,) = torch.autograd.grad(objective, D)
    assert gradient.abs().max() < 1e-12


def test_the_counter_example_solves_every_token_and_learns_nothing():
    check, r = tok.counter_example(T=9)
    assert check.passed
    assert float(r.final_state) == pytest.approx(-1.0)
    assert (r.after.flatten()[1:] / r.before.flatten()[1:]).max() < 1e-24


def test_statements_about_a_box_require_bounds():
    with pytest.raises(ValueError, match="give the problem bounds"):
        tok.token_local_bound(random_problem(generator(), B=1, bounds=None))


def test_the_textbook_step_balances_the_bound():
    p = random_problem(generator(), B=1, T=25, K=4)
    assert tok.diameter(p) == 3.0
    assert tok.textbook_eta(p) == pytest.approx(3.0 / math.sqrt(25))
