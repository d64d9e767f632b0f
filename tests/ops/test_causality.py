"""NaN and Inf do not travel back in time: outputs before a token do not depend on it, whatever it holds."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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
from tests.ops.problems import Config, Problem, gradients, make, relative_error

T, SICK = 70, 45  # in the middle of a chunk
every_backend = pytest.mark.parametrize("backend", available_backends())
pytestmark = pytest.mark.filterwarnings("ignore:log_decay has elements above 0")


def problem(decay: str = "channel", **changes) -> Problem:
    settings = {"H": 1, "group": 2, "K": 33, "V": 3, "retention": "channel", "bounds": None}
    return make(Config((T,), decay=decay, initial_state=True, **settings | changes))


def run(operator, p: Problem, backend: str, device: str = "cpu") -> list[Tensor]:
    tensors, options = p.arguments(operator)
    with torch.no_grad():
        outputs = operator(**{name: x.to(device) for name, x in tensors.items()}, **options, backend=backend)
    return [x.cpu() for x in outputs]


def check_causality(
    backend: str,
    decay: str,
    where: str,
    poison: float,
    device: str = "cpu",
    operator=online_scaled_delta_rule,
    block: int = 1,
) -> None:
    p = problem(decay, block=block)
    healthy = run(operator, p, backend, device)[0]
    p.tensors[where][:, SICK] = poison
    o = run(operator, p, backend, device)[0]
    assert torch.equal(o[:, :SICK], healthy[:, :SICK])
    assert not o[:, SICK:].isfinite().all(), "it should show from then on"


@every_backend
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "beta", "log_decay", "retention"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_outputs_before_a_sick_token_are_unchanged(backend, decay, where, poison):
    if where == "log_decay" and poison == -torch.inf:
        pytest.skip("is legal: it forgets everything")
    check_causality(backend, decay, where, poison)


# Rules of phase 1 beside the paper's: a diagonal covariance, blocks of it, and the Gram diagonal.
every_other_rule = pytest.mark.parametrize(
    ("operator", "block"),
    [(newton_delta_rule, 1), (newton_delta_rule, 3), (newton_delta_rule, 0), (pgdn_delta_rule, 1)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)


@every_backend
@every_other_rule
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "beta", "log_decay", "retention", "gain"])
def test_outputs_by_other_rules_before_a_sick_token_are_unchanged(backend, operator, block, where, poison):
    if where == "log_decay" and poison == -torch.inf:
        pytest.skip("is legal: it forgets everything")
    if where == "gain" and operator is not pgdn_delta_rule:
        pytest.skip("has no gain")
    check_causality(backend, "head", where, poison, operator=operator, block=block)


def check_place(backend: str, where: str, at: int, device: str = "cpu") -> None:
    p = problem("none")
    healthy = run(delta_rule, p, backend, device)[0]
    p.tensors[where][:, at] = torch.nan
    o, state = run(delta_rule, p, backend, device)
    assert torch.equal(o[:, :at], healthy[:, :at])
    assert o[:, at:].isnan().all()
    assert state.isnan().any()


@every_backend
@pytest.mark.parametrize("where", ["k", "v", "beta", "write_keys"])
@pytest.mark.parametrize("at", [32, 33, 63, T - 1])
def test_that_holds_for_every_place_in_a_chunk_and_without_decay(backend, where, at):
    check_place(backend, where, at)


@every_backend
@pytest.mark.parametrize("where", ["k", "beta"])
@pytest.mark.parametrize("bounds", [None, (0.5, 2.0)])
def test_write_keys_before_a_sick_token_are_unchanged(backend, where, bounds):
    p = problem(retention="none", bounds=bounds, eta=0.3)
    healthy = run(precondition_keys, p, backend)[0]
    p.tensors[where][:, SICK] = torch.nan
    w, d = run(precondition_keys, p, backend)
    assert torch.equal(w[:, :SICK], healthy[:, :SICK])
    assert d.isnan().any()


def check_write_keys(backend: str, operator, block: int, where: str, device: str = "cpu") -> None:
    p = problem(block=block)
    healthy = run(operator, p, backend, device)[0]
    p.tensors[where][:, SICK] = torch.nan
    w, state = run(operator, p, backend, device)
    assert torch.equal(w[:, :SICK], healthy[:, :SICK])
    assert not w[:, SICK:].isfinite().all()
    assert state.isnan().any()


@every_backend
@pytest.mark.parametrize(
    ("operator", "block", "where"),
    [
        *((newton_keys, block, where) for block in (1, 3, 0) for where in ("k", "beta", "retention")),
        *((pgdn_keys, 1, where) for where in ("k", "gain", "retention")),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_write_keys_by_other_rules_before_a_sick_token_are_unchanged(backend, operator, block, where):
    check_write_keys(backend, operator, block, where)


@every_backend
@pytest.mark.parametrize("where", ["k", "v", "beta", "log_decay"])
@pytest.mark.parametrize("seen", ["o", "final_state"])
def test_a_loss_that_is_nan_does_not_have_healthy_gradients(backend, where, seen):
    p = problem()
    p.tensors[where][:, SICK] = torch.nan
    tensors, options = p.arguments(delta_rule)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    loss = delta_rule(**leaves, **options, backend=backend)[seen == "final_state"].sum()
    assert loss.isnan()
    assert not gradients(loss, leaves)["grad_k"].isfinite().all()


@pytest.mark.parametrize("where", ["k", "v", "beta", "log_decay", "write_keys"])
def test_chunkwise_keeps_the_gradients_of_earlier_tokens(where):
    """Of a loss that sees earlier outputs alone: what comes later counts as if it were not there."""
    p = problem()
    results = []
    for value in (None, torch.nan):
        if value is not None:
            p.tensors[where][:, SICK] = value
        tensors, options = p.arguments(delta_rule)
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        o, _ = delta_rule(**leaves, **options, backend="chunkwise")
        grads = gradients(o[:, :SICK].sum(), leaves)
        results.append({n: g if n == "grad_initial_state" else g[:, :SICK] for n, g in grads.items()})
    for name, want in results[0].items():
        torch.testing.assert_close(results[1][name], want, msg=name)


def test_chunkwise_is_causal_where_it_cannot_look_at_numbers():
    """Compiled, and under torch.func, there is no asking whether all is finite."""
    p = problem()
    healthy = run(delta_rule, p, "chunkwise")[0]
    p.tensors["v"][:, SICK] = torch.nan
    tensors, options = p.arguments(delta_rule)

    def outputs(v):
        return delta_rule(**tensors | {"v": v}, **options, backend="chunkwise")[0]

    mapped = torch.func.vmap(outputs)(torch.stack([tensors["v"], tensors["v"]]))[1]
    compiled = torch.compile(outputs, fullgraph=True, backend="aot_eager")(tensors["v"])
    for o in (mapped, compiled):
        torch.testing.assert_close(o[:, :SICK], healthy[:, :SICK])
        assert o[:, SICK:].isnan().all()


def check_replacement(backend: str, K: int, T: int, device: str = "cpu") -> None:
    """Small values replace a large state within a chunk; its rounding errors must go with it."""
    random = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(1, T, 1, K, generator=random), dim=-1) for _ in range(2))
    v = 1e-3 * torch.randn(1, T, 1, 8, generator=random)
    state = torch.randn(1, 1, K, 8, generator=random)
    inputs = (q, k, v, torch.full((1, T, 1), 0.9), state)

    def final_state(backend: str, device: str, dtype: torch.dtype) -> Tensor:
        q, k, v, beta, state = (x.to(device, dtype) for x in inputs)
        given = {"initial_state": state, "output_final_state": True, "backend": backend}
        return delta_rule(q, k, v, beta, **given)[1].cpu()

    want = final_state("reference", "cpu", torch.float64)
    assert relative_error(final_state(backend, device, torch.float32), want) < 1e-5


@every_backend
@pytest.mark.parametrize("T", [16, 64])
@pytest.mark.parametrize("K", [4, 16, 32])
def test_a_state_that_is_replaced_keeps_its_digits(backend, K, T):
    check_replacement(backend, K, T)
