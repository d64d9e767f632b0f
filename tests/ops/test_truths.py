"""The operators, the reference included, compute what the paper and independent implementations say."""

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from osdn.ops import available_backends, delta_rule, online_scaled_delta_rule, precondition_keys
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
def test_one_pass_is_both_phases(backend):
    problem = make(
        Config((50, 3), packed=True, H=2, group=2, K=9, V=11, decay="head", retention="tied", eta=0.3)
    )
    t, options = problem.arguments(online_scaled_delta_rule)
    o, state, scale = online_scaled_delta_rule(**t, **options, backend=backend)
    t, options = problem.arguments(precondition_keys)
    problem.tensors["write_keys"], scale_1 = precondition_keys(**t, **options, backend=backend)
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
def test_unaware_of_beta_is_beta_of_one(backend):
    t, options = make(Config((30,), eta=0.3, beta_aware=False)).arguments(precondition_keys)
    unaware = precondition_keys(**t, **options, backend=backend)
    options["beta_aware"] = True
    aware = precondition_keys(t["k"], torch.ones_like(t["beta"]), **options, backend=backend)
    for a, b in zip(unaware, aware):
        assert relative_error(a, b) < 1e-6
