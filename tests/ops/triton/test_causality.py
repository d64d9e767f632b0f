"""The kernels, too, let no NaN travel back in time, and lose no digits when a state is replaced."""

import pytest
import torch

from osdn.ops import delta_rule, newton_delta_rule, newton_keys, pgdn_delta_rule, pgdn_keys, precondition_keys
from osdn.ops.triton import phase1
from tests.ops import test_causality as shared
from tests.ops.problems import gradients, relative_error
from tests.ops.triton.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.mark.parametrize(
    ("where", "poison", "decay"),
    [
        ("q", torch.nan, "channel"),
        ("k", torch.nan, "head"),
        ("k", torch.inf, "channel"),
        ("v", torch.nan, "channel"),
        ("v", torch.inf, "head"),
        ("beta", torch.nan, "head"),
        ("log_decay", torch.nan, "head"),
        ("log_decay", torch.nan, "channel"),
        ("retention", torch.nan, "head"),
    ],
)
def test_outputs_before_a_sick_token_are_unchanged(where, poison, decay):
    shared.check_causality("triton", decay, where, poison, DEVICE)


@pytest.mark.parametrize(
    ("operator", "block", "where", "poison"),
    [
        (newton_delta_rule, 1, "k", torch.nan),
        (newton_delta_rule, 1, "beta", torch.inf),
        (newton_delta_rule, 1, "retention", torch.nan),
        (newton_delta_rule, 3, "k", torch.nan),
        (pgdn_delta_rule, 1, "k", torch.inf),
        (pgdn_delta_rule, 1, "gain", torch.nan),
        (pgdn_delta_rule, 1, "gain", torch.inf),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_outputs_by_other_rules_before_a_sick_token_are_unchanged(operator, block, where, poison):
    shared.check_causality("triton", "head", where, poison, DEVICE, operator, block)


@pytest.mark.parametrize(
    ("operator", "where"),
    [(newton_keys, "k"), (newton_keys, "beta"), (pgdn_keys, "k"), (pgdn_keys, "gain")],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_write_keys_by_other_rules_before_a_sick_token_are_unchanged(operator, where):
    shared.check_write_keys("triton", operator, 1, where, DEVICE)


@pytest.mark.parametrize(("where", "at"), [("k", 32), ("v", 33), ("beta", 63), ("write_keys", 69)])
def test_that_holds_for_every_place_in_a_chunk_and_without_decay(where, at):
    shared.check_place("triton", where, at, DEVICE)


@pytest.mark.parametrize(("where", "bounds"), [("k", None), ("beta", None), ("k", (0.5, 2.0))])
def test_write_keys_before_a_sick_token_are_unchanged(where, bounds, monkeypatch):
    """But for rounding: a chunk in which the box might bind is redone token by token."""
    monkeypatch.setattr(phase1, "PARALLEL_FROM", 1)
    p = shared.problem(retention="none", bounds=bounds, eta=0.3)
    healthy = shared.run(precondition_keys, p, "triton", DEVICE)[0]
    p.tensors[where][:, shared.SICK] = torch.nan
    w, d = shared.run(precondition_keys, p, "triton", DEVICE)
    assert relative_error(w[:, : shared.SICK], healthy[:, : shared.SICK]) < 1e-6
    assert d.isnan().any()


def test_queries_do_not_reach_the_gradients_of_the_state():
    t, options = shared.problem("head").arguments(delta_rule)
    grads = []
    for value in (0.0, torch.nan):
        leaves = {name: x.clone().requires_grad_() for name, x in t.items()}
        leaves["q"].data.fill_(value)
        _, state = delta_rule(**{n: x.to(DEVICE) for n, x in leaves.items()}, **options, backend="triton")
        grads.append(gradients(state.sum(), leaves))
    for name, want in grads[0].items():
        assert torch.equal(grads[1][name], want), name


@pytest.mark.parametrize(("K", "T"), [(4, 16), (4, 64), (16, 64), (32, 64)])
def test_a_state_that_is_replaced_keeps_its_digits(K, T):
    shared.check_replacement("triton", K, T, DEVICE)
