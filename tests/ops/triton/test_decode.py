"""Decoding token by token, in place or not, gives what one forward gives."""

import pytest
import torch
from triton.runtime.autotuner import Autotuner

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
        with pytest.raises(ValueError, match=r"state .* must be"):
            backend.decode_(x, x, x, x[..., 0], 1.0, None, None, None, bad, 1.0)
    with pytest.raises(ValueError, match="no gradient"):
        backend.decode_(x.requires_grad_(), x, x, x[..., 0].detach(), 1.0, None, None, None, state, 1.0)


@pytest.mark.parametrize("name", ["q", "v", "beta", "retention", "initial_scale", "log_decay"])
def test_a_tensor_that_does_not_fit_is_refused(name):
    """Nothing is read beyond its end: kernels trust shapes."""
    right = {
        "q": torch.zeros(1, 1, 1, 4, device=DEVICE),
        "k": torch.zeros(1, 1, 1, 4, device=DEVICE),
        "v": torch.zeros(1, 1, 2, 4, device=DEVICE),
        "beta": torch.zeros(1, 1, 2, device=DEVICE),
        "retention": torch.zeros(1, 1, 2, device=DEVICE),
        "initial_scale": torch.zeros(1, 2, 4, device=DEVICE),
        "settings": Scaling(0.003, None, True, 1e-6),
        "log_decay": torch.zeros(1, 1, 2, 4, device=DEVICE),
        "state": torch.zeros(1, 2, 4, 4, device=DEVICE),
        "scale": 1.0,
    }
    backend.decode_(**right)
    with pytest.raises(ValueError, match=f"{name} has"):
        backend.decode_(**right | {name: right[name][:, :0]})


def test_autotuning_advances_a_state_once(monkeypatch):
    """It runs a kernel again and again to time it, also one that writes its state over the one it read."""
    monkeypatch.setenv("OSDN_TRITON_AUTOTUNE", "1")
    runs = []

    def time_it(self, call, quantiles):
        for _ in range(3):
            call()
        runs.append(call)
        return [1.0, 1.0, 1.0]

    if not torch.cuda.is_available():  # nor anything to time it with
        monkeypatch.setattr(Autotuner, "do_bench", time_it)
    x = torch.full((1, 1, 1, 4), 0.5, device=DEVICE)
    state = torch.ones(1, 1, 4, 70, device=DEVICE)
    v = torch.ones(1, 1, 1, 70, device=DEVICE)
    backend.decode_(x, x, v, x[..., 0], 1.0, None, None, None, state, 1.0)
    # The error is 1 - 4/2, half of it is written with a key of 1/2.
    assert torch.allclose(state, torch.full_like(state, 1 - 0.25))
    assert len(runs) == 2 or torch.cuda.is_available()
