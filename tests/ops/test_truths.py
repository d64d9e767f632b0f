"""The operators, the reference included, compute what the paper and independent implementations say."""

import math

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from osdn.ops import (
    available_backends,
    delta_rule,
    newton_delta_rule,
    newton_keys,
    online_scaled_delta_rule,
    pgdn_delta_rule,
    pgdn_keys,
    precondition_keys,
)
from tests.ops.problems import Config, answer, assert_close, make, relative_error

every_backend = pytest.mark.parametrize("backend", available_backends())


def shared_heads(x, HV):
    return x.repeat_interleave(HV // x.shape[2], 2)


@every_backend
@pytest.mark.parametrize("peer", [qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule])
def test_gated_delta_rule_is_that_of_qwen3_next(backend, peer):
    t = make(Config((131, 131), H=2, group=2, K=24, V=17, decay="head", initial_state=True)).tensors
    q, k = shared_heads(t["q"], 4), shared_heads(t["k"], 4)
    want = peer(
        q, k, t["v"], t["log_decay"], t["beta"], initial_state=t["initial_state"], output_final_state=True
    )
    got = delta_rule(
        t["q"],
        t["k"],
        t["v"],
        t["beta"],
        log_decay=t["log_decay"],
        initial_state=t["initial_state"],
        output_final_state=True,
        backend=backend,
    )
    for a, b in zip(got, want):
        assert relative_error(a, b) < 1e-5


@every_backend
@pytest.mark.parametrize("peer", [kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention])
def test_channel_decay_is_that_of_kimi_linear(backend, peer):
    t = make(Config((131, 131), H=3, K=24, V=17, decay="channel", initial_state=True)).tensors
    state = t["initial_state"]
    want = peer(
        t["q"], t["k"], t["v"], t["log_decay"], t["beta"], initial_state=state, output_final_state=True
    )
    got = delta_rule(
        t["q"],
        t["k"],
        t["v"],
        t["beta"],
        log_decay=t["log_decay"],
        initial_state=state,
        output_final_state=True,
        backend=backend,
    )
    for a, b in zip(got, want):
        assert relative_error(a, b) < 1e-5


def loss(S, k, v):
    """The regression loss of one token; S is [V, K] as in the paper."""
    return (S @ k - v).square().sum() / 2


def preconditioned_step(S, k, v, beta, d):
    """One step of gradient descent on `loss`, its gradient scaled from the right by diag(d)."""
    S = S.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(S, k, v), S)
    return S.detach() - beta * gradient * d, gradient


def hypergradient(S, k, v, beta, d):
    """Of the definition of h_t, by automatic differentiation."""
    d = d.detach().requires_grad_()
    after, gradient = preconditioned_step(S, k, v, beta, d)
    h = (loss(after, k, v) - loss(S, k, v)) / gradient.square().sum()
    return h.detach(), torch.autograd.grad(h, d)[0]


def random_token(K, V):
    random = torch.Generator().manual_seed(K)
    S, k, v, d = (torch.randn(s, generator=random, dtype=torch.float64) for s in ((V, K), (K,), (V,), (K,)))
    return S, k, v, torch.rand((), generator=random, dtype=torch.float64), 1 + 0.3 * d


@pytest.mark.parametrize(("K", "V"), [(1, 1), (5, 3), (16, 7)])
def test_closed_form_of_the_hypergradient(K, V):
    """Lemma "Closed-form hypergradient": neither the state nor the value matters, and keys need no norm."""
    S, k, v, beta, d = random_token(K, V)
    h, gradient = hypergradient(S, k, v, beta, d)
    left = 1 - beta * (d * k**2).sum()
    torch.testing.assert_close(h, (left**2 - 1) / (2 * k.square().sum()))
    torch.testing.assert_close(gradient, -beta * left / k.square().sum() * k**2)


@every_backend
@pytest.mark.parametrize(("K", "V"), [(1, 1), (5, 3), (16, 7)])
def test_scale_descends_the_hypergradient(backend, K, V):
    S, k, v, beta, d = random_token(K, V)
    want = d - 0.2 * hypergradient(S, k, v, beta, d)[1]
    key, strength = k[None, None, None], beta[None, None, None]
    _, scale = precondition_keys(key, strength, eta=0.2, bounds=None, initial_scale=d[None], backend=backend)
    torch.testing.assert_close(scale[0, 0], want)


@every_backend
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_whole_recurrence_is_preconditioned_gradient_descent(backend, decay):
    """The paper's definitions, step by step with autograd: scaling the write key is scaling the gradient."""
    T, K, V, eta, bounds = 20, 6, 4, 0.4, (0.9, 1.1)
    t = {name: x.double() for name, x in make(Config((T,), H=1, K=K, V=V, decay=decay)).tensors.items()}
    g = t.get("log_decay")
    t["k"] += 1e-3  # h_t is not defined for a key of zeros
    S, d = torch.zeros(V, K, dtype=torch.float64), torch.ones(K, dtype=torch.float64)
    want = []
    for i in range(T):
        k, v, beta = t["k"][0, i, 0], t["v"][0, i, 0], t["beta"][0, i, 0]
        S = S if g is None else S * g[0, i, 0].exp()
        after, _ = preconditioned_step(S, k, v, beta, d)
        d = (d - eta * hypergradient(S, k, v, beta, d)[1]).clamp(*bounds)
        S = after
        want.append(S @ t["q"][0, i, 0])
    o, state, scale = online_scaled_delta_rule(
        t["q"],
        t["k"],
        t["v"],
        t["beta"],
        log_decay=g,
        eta=eta,
        bounds=bounds,
        scale=1.0,
        output_final_state=True,
        backend=backend,
    )
    torch.testing.assert_close(o[0, :, 0], torch.stack(want))
    torch.testing.assert_close(state[0, 0], S.mT)
    torch.testing.assert_close(scale[0, 0], d)
    assert (d == bounds[0]).any() or (d == bounds[1]).any(), "the projection should have been exercised"


@every_backend
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_no_step_is_the_plain_delta_rule(backend, decay):
    problem = make(Config((40, 40), H=2, group=2, K=9, V=11, decay=decay, eta=0.0, initial_state=True))
    del problem.tensors["write_keys"]  # None: write with the keys themselves
    got = answer(online_scaled_delta_rule, problem, backend, torch.float32)
    want = answer(delta_rule, problem, backend, torch.float32)
    assert (got.pop("final_scale") == 1).all()
    assert_close(got, want, outputs=1e-6, gradients=1e-5)


@every_backend
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_decay_of_one_is_no_decay(backend, decay):
    problem = make(Config((70,), H=2, K=9, V=11, decay=decay, initial_state=True))
    problem.tensors["log_decay"].zero_()
    got = answer(online_scaled_delta_rule, problem, backend, torch.float32)
    del problem.tensors["log_decay"], got["grad_log_decay"]
    assert_close(got, answer(online_scaled_delta_rule, problem, backend, torch.float32), 1e-6, 1e-5)


@every_backend
@pytest.mark.parametrize(
    ("phase_1", "both"),
    [
        (precondition_keys, online_scaled_delta_rule),
        (newton_keys, newton_delta_rule),
        (pgdn_keys, pgdn_delta_rule),
    ],
)
def test_one_pass_is_both_phases(backend, phase_1, both):
    sizes = {"H": 2, "group": 2, "K": 9, "V": 11, "block": 3}
    problem = make(Config((50, 3), packed=True, **sizes, decay="head", retention="tied", eta=0.3))
    t, options = problem.arguments(both)
    o, state, scale = both(**t, **options, backend=backend)
    t, options = problem.arguments(phase_1)
    problem.tensors["write_keys"], scale_1 = phase_1(**t, **options, backend=backend)
    t, options = problem.arguments(delta_rule)
    o_2, state_2 = delta_rule(**t, **options, backend=backend)
    for a, b in ((o, o_2), (state, state_2), (scale, scale_1)):
        assert relative_error(a, b) < 1e-6


@every_backend
def test_retention_of_every_shape_says_the_same(backend):
    t, options = make(Config((30, 30), group=2, retention="head", eta=0.3)).arguments(precondition_keys)
    number = precondition_keys(**t | {"retention": 0.97}, **options, backend=backend)
    t["retention"] = torch.full_like(t["retention"], 0.97)
    head = precondition_keys(**t, **options, backend=backend)
    t["retention"] = t["retention"][..., None].expand(-1, -1, -1, 8)
    channel = precondition_keys(**t, **options, backend=backend)
    for a, b, c in zip(number, head, channel):
        assert relative_error(a, b) < 1e-6
        assert relative_error(a, c) < 1e-6


@every_backend
@pytest.mark.parametrize("prior", [0.5, 3.0])
def test_one_block_solves_the_ridge_regression(backend, prior):
    """argmin_S sum_i beta_i |S' k_i - v_i|^2 + |S|^2 / prior, at every token."""
    problem = make(Config((40, 40), H=1, group=2, K=7, V=5, block=0, prior=prior, scale=1.0))
    t, options = problem.arguments(newton_delta_rule)
    t = {name: x.double() for name, x in t.items()}
    o, state, covariance = newton_delta_rule(**t, **options, backend=backend)
    k, q = shared_heads(t["k"], 2), shared_heads(t["q"], 2)
    for n, head, length in ((0, 0, 40), (1, 1, 40), (0, 1, 23), (1, 0, 1)):
        X, Y, beta = (x[n, :length, head] for x in (k, t["v"], t["beta"]))
        A = X.mT @ (beta[:, None] * X) + torch.eye(7, dtype=X.dtype) / prior
        S = torch.linalg.solve(A, X.mT @ (beta[:, None] * Y))
        assert relative_error(o[n, length - 1, head], S.mT @ q[n, length - 1, head]) < 1e-9
        if length == 40:
            assert relative_error(state[n, head], S) < 1e-9
            assert relative_error(covariance[n, head, 0], A.inverse()) < 1e-9


@every_backend
@pytest.mark.parametrize("block", [1, 4, 0])
def test_a_covariance_stays_between_zero_and_its_prior_and_no_write_overshoots(backend, block):
    """Whatever the keys, their lengths and the write strengths; retention included."""
    problem = make(Config((300,), K=12, block=block, prior=2.0, retention="tied", alike=0.5))
    t, options = problem.arguments(newton_keys)
    t["k"], t["beta"] = 3 * t["k"], 5 * t["beta"]
    for retention in (None, t["retention"]):
        write_keys, P = newton_keys(**t | {"retention": retention}, **options, backend=backend)
        eigenvalues = torch.linalg.eigvalsh(P)
        assert eigenvalues.min() > -1e-6
        assert eigenvalues.max() < 2.0 * (1 + 1e-6)
        assert (t["beta"] * (write_keys * t["k"]).sum(-1)).max() < 1


@every_backend
@pytest.mark.parametrize("block", [1, 3])
def test_retention_draws_a_covariance_to_its_prior(backend, block):
    """Tokens of zeros change nothing else: P - prior shrinks by the retention at each."""
    initial = make(Config((1,), K=6, block=block, initial_scale="each")).tensors["initial_covariance"]
    silent = torch.zeros(1, 5, 2, 6), torch.ones(1, 5, 2)
    _, P = newton_keys(
        *silent, block_size=block, retention=0.9, prior=2.0, initial_covariance=initial, backend=backend
    )
    prior = 2.0 * torch.eye(block)
    torch.testing.assert_close(P - prior, 0.9**5 * (initial - prior))


@every_backend
def test_only_the_symmetric_part_of_a_covariance_counts(backend):
    k, beta, C = torch.randn(1, 9, 1, 4), torch.rand(1, 9, 1), torch.rand(1, 1, 2, 2, 2)
    a = newton_keys(k, beta, block_size=2, initial_covariance=C, backend=backend)
    b = newton_keys(k, beta, block_size=2, initial_covariance=(C + C.mT) / 2, backend=backend)
    for x, y in zip(a, b):
        assert torch.equal(x, y)


@every_backend
def test_squashed_keys_are_those_of_preconditioned_gated_deltanet(backend):
    """arXiv 2604.21100, its sum written out: A_t = sum_s gain_s k_s^2 prod_(s < i <= t) r_i."""
    t, _ = make(Config((30,), H=1, group=2, K=6, retention="head", initial_scale="each")).arguments(pgdn_keys)
    t = {name: x.double() for name, x in t.items()}
    t["retention"] = t["retention"] * 0.9
    got, gram = pgdn_keys(**t, squash=1.7, eps=1e-4, backend=backend)
    k = shared_heads(t["k"], 2)
    for now in (0, 7, 29):
        A = t["retention"][:, : now + 1].prod(1)[..., None] * t["initial_gram"]
        for s in range(now + 1):
            kept = t["retention"][:, s + 1 : now + 1].prod(1) * t["gain"][:, s]  # [1, HV]
            A = A + kept[..., None] * k[:, s] ** 2
        x = (A + 1e-4).log() - t["center"][:, None]
        torch.testing.assert_close(got[:, now], torch.exp(-math.log(1.7) * x / (1 + x.abs())) * k[:, now])
    torch.testing.assert_close(gram, A)


@every_backend
def test_a_squash_of_one_leaves_keys_as_they_are(backend):
    t, _ = make(Config((30,), group=2)).arguments(pgdn_keys)
    write_keys, _ = pgdn_keys(**t, squash=1, backend=backend)
    torch.testing.assert_close(write_keys, shared_heads(t["k"], 4))


@every_backend
def test_unaware_of_beta_is_beta_of_one(backend):
    t, options = make(Config((30,), eta=0.3, beta_aware=False)).arguments(precondition_keys)
    unaware = precondition_keys(**t, **options, backend=backend)
    options["beta_aware"] = True
    aware = precondition_keys(t["k"], torch.ones_like(t["beta"]), **options, backend=backend)
    for a, b in zip(unaware, aware):
        assert relative_error(a, b) < 1e-6
