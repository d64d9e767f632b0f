"""Decoding token by token, in place or not, gives what one forward gives."""

import pytest
import torch

from osdn.ops import online_scaled_delta_rule
from osdn.ops import triton as backend
from osdn.ops.checks import Scaling
from tests.ops.problems import Config, make, relative_error
from tests.ops.triton.device import DEVICE, truth

CASES = [
    ("none", "none"),
    ("none", "head"),
    ("head", "tied"),
    ("head", "none"),
    ("channel", "constant"),
    ("channel", "channel"),
]


def problem_of(decay, retention):
    config = Config((5, 5), H=1, group=2, K=21, V=40, decay=decay, retention=retention, eta=0.1)
    return make(config)


@pytest.mark.parametrize(("decay", "retention"), CASES)
def test_decoding_in_place_matches_one_forward(decay, retention):
    problem = problem_of(decay, retention)
    want = truth(online_scaled_delta_rule, problem)
    tensors, options = problem.arguments(online_scaled_delta_rule)
    tensors = {name: x.to(DEVICE) for name, x in tensors.items()}
    settings = Scaling(options["eta"], options["bounds"], options["beta_aware"], 1e-6)
    state = torch.zeros(2, 2, 21, 40, device=DEVICE)
    memory = state.data_ptr()
    scale, outputs = None, []
    for t in range(5):
        at = {name: x[:, t : t + 1].contiguous() for name, x in tensors.items()}
        kept = at.get("retention", options.get("retention", 1.0))
        o, scale = backend.decode_(
            at["q"], at["k"], at["v"], at["beta"], kept, scale, settings, at.get("log_decay"), state, 21**-0.5
        )
        outputs.append(o)
    assert state.data_ptr() == memory
    assert relative_error(torch.cat(outputs, 1).cpu(), want["o"]) < 1e-6
    assert relative_error(state.cpu(), want["final_state"]) < 1e-6
    assert relative_error(scale.cpu(), want["final_scale"]) < 1e-6


@pytest.mark.parametrize(("decay", "retention"), CASES)
def test_decoding_through_the_operator_matches_one_forward(decay, retention):
    problem = problem_of(decay, retention)
    want = truth(online_scaled_delta_rule, problem)
    tensors, options = problem.arguments(online_scaled_delta_rule)
    state = scale = None
    outputs = []
    for t in range(5):
        at = {name: x[:, t : t + 1].to(DEVICE) for name, x in tensors.items()}
        o, state, scale = online_scaled_delta_rule(
            **at, **options, initial_state=state, initial_scale=scale, backend="triton"
        )
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1).cpu(), want["o"]) < 1e-6
    assert relative_error(state.cpu(), want["final_state"]) < 1e-6
    assert relative_error(scale.cpu(), want["final_scale"]) < 1e-6


def test_a_state_that_cannot_be_updated_in_place_is_refused():
    x = torch.zeros(1, 1, 1, 4, device=DEVICE)
    state = torch.zeros(1, 1, 4, 4, device=DEVICE)
    for bad in (state.half(), state.mT, state[..., :3]):
        with pytest.raises(ValueError, match=r"state is .* must be"):
            backend.decode_(x, x, x, x[..., 0], 1.0, None, None, None, bad, 1.0)
    with pytest.raises(ValueError, match="no gradient"):
        backend.decode_(x.requires_grad_(), x, x, x[..., 0].detach(), 1.0, None, None, None, state, 1.0)
