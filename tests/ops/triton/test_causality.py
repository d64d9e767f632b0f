"""The kernels, too, let no NaN travel back in time, and lose no digits when a state is replaced."""

import pytest
import torch

from osdn.ops import delta_rule, precondition_keys
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
    found = []
    for value in (0.0, torch.nan):
        leaves = {name: x.clone().requires_grad_() for name, x in t.items()}
        leaves["q"].data.fill_(value)
        _, state = delta_rule(**{n: x.to(DEVICE) for n, x in leaves.items()}, **options, backend="triton")
        found.append(gradients(state.sum(), leaves))
    for name, want in found[0].items():
        assert torch.equal(found[1][name], want), name


@pytest.mark.parametrize(("K", "T"), [(4, 16), (4, 64), (16, 64), (32, 64)])
def test_a_state_that_is_replaced_keeps_its_digits(K, T):
    shared.check_replacement("triton", K, T, DEVICE)
