"""The second table's claim: each row is one step of its optimiser on its loss."""

import pytest
import torch

from osdn.zoo import INNER_OPTIMISERS, inner_step
from tests.zoo.conftest import make_case

GRADIENT_ROWS = [name for name, row in INNER_OPTIMISERS.items() if row.rate is not None]


def state_and_token(name):
    """A state reached after some tokens, and the next token."""
    case = make_case(name, T=9)
    _, state = case.recurrence.scan({x: a[..., :8, :] for x, a in case.inputs.items()}, case.weights)
    return case.recurrence, state, {**{x: a[..., 8, :] for x, a in case.inputs.items()}, **case.weights}


@pytest.mark.parametrize("name", GRADIENT_ROWS)
def test_a_row_is_one_gradient_step_on_its_loss(name):
    recurrence, state, token = state_and_token(name)
    after, _ = recurrence.step(state, token)
    torch.testing.assert_close(
        inner_step(INNER_OPTIMISERS[name], state, token), after["S"], rtol=1e-11, atol=1e-12
    )


def test_longhorn_is_the_minimiser_of_its_loss():
    recurrence, state, token = state_and_token("longhorn")
    after, _ = recurrence.step(state, token)
    loss = INNER_OPTIMISERS["longhorn"].loss
    gradient = torch.func.grad(lambda S: loss(S, state["S"], token).sum())(after["S"])
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    with pytest.raises(ValueError, match="minimises its loss"):
        inner_step(INNER_OPTIMISERS["longhorn"], state, token)


def test_retnets_regulariser_is_its_decay():
    """The table gives RetNet both, but one step on the regularised loss already decays the state."""
    recurrence, state, token = state_and_token("retnet")
    after, _ = recurrence.step(state, token)
    S, gamma, row = state["S"], token["gamma"][..., None], INNER_OPTIMISERS["retnet"]

    def regularised(S):
        return (row.loss(S, S, token) + ((1 - gamma) * S.square()).sum((-2, -1)) / 2).sum()

    torch.testing.assert_close(S - torch.func.grad(regularised)(S), after["S"])
    twice = gamma * S - torch.func.grad(regularised)(gamma * S)
    assert not torch.allclose(twice, after["S"])
