"""However a sequence is cut, packed or fed, it gives what it gives alone and in one piece."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from osdn.ops import available_backends, online_scaled_delta_rule
from tests.ops.problems import Config, Problem, answer, gradients, make, relative_error, weighted_sum

every_backend = pytest.mark.parametrize("backend", available_backends())
every_decay = pytest.mark.parametrize("decay", ["none", "head", "channel"])

PER_TOKEN = ("q", "k", "v", "beta", "log_decay", "retention")
PER_SEQUENCE = ("initial_state", "initial_scale", "final_state", "final_scale")


def config(lengths: tuple[int, ...], decay: str, **changes) -> Config:
    sizes = {"H": 2, "group": 2, "K": 7, "V": 5}
    starts = {"initial_state": True, "initial_scale": "each"}
    return Config(lengths, **sizes | starts | changes, decay=decay, retention="head", eta=0.3)


def pieces(problem: Problem, cuts: list[int]) -> list[dict[str, torch.Tensor]]:
    """The per-token tensors between each two cuts."""
    t, _ = problem.arguments(online_scaled_delta_rule)
    return [{n: x[:, a:b] for n, x in t.items() if n in PER_TOKEN} for a, b in pairwise(cuts)]


@every_backend
@every_decay
@settings(max_examples=8)
@given(lengths=st.lists(st.sampled_from([0, 1, 2, 30, 63, 64, 65, 130]), min_size=1, max_size=5))
def test_packed_sequences_are_separate_sequences(backend, decay, lengths):
    packed = make(config(tuple(lengths), decay, packed=True))
    got = answer(online_scaled_delta_rule, packed, backend, torch.float64)

    cuts = packed.options.pop("cu_seqlens").tolist()
    starts = {n: x for n, x in packed.tensors.items() if n in PER_SEQUENCE}
    leaves = [
        {n: x.double().requires_grad_() for n, x in piece.items()}
        | {n: x[i : i + 1].double().requires_grad_() for n, x in starts.items()}
        for i, piece in enumerate(pieces(packed, cuts))
    ]
    _, options = packed.arguments(online_scaled_delta_rule)
    outputs = [online_scaled_delta_rule(**t, **options, backend=backend) for t in leaves]
    o, state, scale = (torch.cat(x, dim) for x, dim in zip(zip(*outputs), (1, 0, 0)))
    torch.testing.assert_close(got["o"], o)
    torch.testing.assert_close(got["final_state"], state)
    torch.testing.assert_close(got["final_scale"], scale)

    every = {f"{name}_{i}": x for i, t in enumerate(leaves) for name, x in t.items()}
    grads = gradients(weighted_sum((o, state, scale)), every)
    for name in leaves[0]:
        alone = [grads[f"grad_{name}_{i}"] for i in range(len(leaves))]
        torch.testing.assert_close(got[f"grad_{name}"], torch.cat(alone, 0 if name in PER_SEQUENCE else 1))


@every_backend
@every_decay
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 150), max_size=4))
def test_a_sequence_cut_anywhere_continues_from_its_states(backend, decay, cuts):
    problem = make(config((150, 150), decay))
    tensors, options = problem.arguments(online_scaled_delta_rule)
    whole = online_scaled_delta_rule(**tensors, **options, backend=backend)

    state, scale, outputs = tensors["initial_state"], tensors["initial_scale"], []
    for piece in pieces(problem, [0, *sorted(cuts), 150]):
        o, state, scale = online_scaled_delta_rule(
            **piece, initial_state=state, initial_scale=scale, **options, backend=backend
        )
        outputs.append(o)
    for a, b in zip((torch.cat(outputs, 1), state, scale), whole):
        assert relative_error(a, b) < 1e-5


@every_backend
@every_decay
def test_gradients_flow_through_the_states_of_a_cut_sequence(backend, decay):
    problem = make(config((90,), decay))
    whole = answer(online_scaled_delta_rule, problem, backend, torch.float64)
    tensors, options = problem.arguments(online_scaled_delta_rule)
    leaves = {n: x.double().requires_grad_() for n, x in tensors.items()}
    state, scale, outputs = leaves["initial_state"], leaves["initial_scale"], []
    for a, b in ((0, 13), (13, 77), (77, 90)):
        o, state, scale = online_scaled_delta_rule(
            **{n: x[:, a:b] for n, x in leaves.items() if n in PER_TOKEN},
            initial_state=state,
            initial_scale=scale,
            **options,
            backend=backend,
        )
        outputs.append(o)
    got = gradients(weighted_sum((torch.cat(outputs, 1), state, scale)), leaves)
    for name, grad in got.items():
        torch.testing.assert_close(grad, whole[name])


@every_backend
@every_decay
def test_decoding_token_by_token_is_one_forward(backend, decay):
    problem = make(config((70, 70), decay))
    tensors, options = problem.arguments(online_scaled_delta_rule)
    whole = online_scaled_delta_rule(**tensors, **options, backend=backend)
    state, scale, outputs = tensors["initial_state"], tensors["initial_scale"], []
    for token in pieces(problem, list(range(71))):
        o, state, scale = online_scaled_delta_rule(
            **token, initial_state=state, initial_scale=scale, **options, backend=backend
        )
        outputs.append(o)
    for a, b in zip((torch.cat(outputs, 1), state, scale), whole):
        assert relative_error(a, b) < 1e-5


@every_backend
@every_decay
def test_nothing_to_do_passes_the_states_through(backend, decay):
    for lengths, packed in (((0, 0), False), ((0, 0, 0), True)):
        problem = make(config(lengths, decay, packed=packed))
        tensors, options = problem.arguments(online_scaled_delta_rule)
        o, state, scale = online_scaled_delta_rule(**tensors, **options, backend=backend)
        assert o.shape == tensors["v"].shape
        assert torch.equal(state, tensors["initial_state"])
        assert torch.equal(scale, tensors["initial_scale"])


@every_backend
@every_decay
def test_an_empty_batch_gives_empty_outputs(backend, decay):
    tensors, options = make(config((70,), decay)).arguments(online_scaled_delta_rule)
    nobody = {name: x[:0].requires_grad_() for name, x in tensors.items()}
    o, state, scale = online_scaled_delta_rule(**nobody, **options, backend=backend)
    assert (o.shape, state.shape, scale.shape) == ((0, 70, 4, 5), (0, 4, 7, 5), (0, 4, 7))


@every_backend
def test_the_states_handed_in_are_not_written_to(backend):
    tensors, options = make(config((33,), "head")).arguments(online_scaled_delta_rule)
    before = {name: x.clone() for name, x in tensors.items()}
    online_scaled_delta_rule(**tensors, **options, backend=backend)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
