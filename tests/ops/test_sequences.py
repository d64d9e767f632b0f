"""However a sequence is cut, packed or fed, it gives what it gives alone and in one piece."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from osdn.ops import (
    available_backends,
    newton_delta_rule,
    online_scaled_delta_rule,
    pgdn_delta_rule,
)
from tests.ops.problems import (
    BOTH,
    OUTPUTS,
    Config,
    Problem,
    answer,
    gradients,
    make,
    relative_error,
    weighted_sum,
)

every_backend = pytest.mark.parametrize("backend", available_backends())
# Every rule with a decay of its own, and the paper's with all of them.
every_rule = pytest.mark.parametrize(
    ("operator", "decay", "block"),
    [
        (online_scaled_delta_rule, "none", 1),
        (online_scaled_delta_rule, "head", 1),
        (online_scaled_delta_rule, "channel", 1),
        (newton_delta_rule, "channel", 1),
        (newton_delta_rule, "none", 2),
        (newton_delta_rule, "head", 0),
        (pgdn_delta_rule, "head", 1),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)

PER_TOKEN = ("q", "k", "v", "beta", "gain", "log_decay", "retention")


def config(lengths: tuple[int, ...], decay: str, block: int, **changes) -> Config:
    sizes = {"H": 2, "group": 2, "K": 6, "V": 5, "block": block}
    starts = {"initial_state": True, "initial_scale": "each"}
    return Config(lengths, **sizes | starts | changes, decay=decay, retention="head", eta=0.3)


def joined(operator, problem: Problem, leaves: dict[str, torch.Tensor], cuts: list[int], backend: str):
    """The outputs of a batch that is cut and continued from its states."""
    initial = f"initial_{BOTH[operator]}"
    state, carried, outputs = leaves["initial_state"], leaves[initial], []
    rest = {n: x for n, x in leaves.items() if n == "center"} | problem.arguments(operator)[1]
    for a, b in pairwise(cuts):
        piece = {n: x[:, a:b] for n, x in leaves.items() if n in PER_TOKEN}
        o, state, carried = operator(
            **piece, **rest, initial_state=state, **{initial: carried}, backend=backend
        )
        outputs.append(o)
    return torch.cat(outputs, 1), state, carried


@every_backend
@every_rule
@settings(max_examples=8)
@given(lengths=st.lists(st.sampled_from([0, 1, 2, 30, 63, 64, 65, 130]), min_size=1, max_size=5))
def test_packed_sequences_are_separate_sequences(backend, operator, decay, block, lengths):
    packed = make(config(tuple(lengths), decay, block, packed=True))
    got = answer(operator, packed, backend, torch.float64)

    cuts = packed.options.pop("cu_seqlens").tolist()
    tensors, options = packed.arguments(operator)
    starts = {n: x for n, x in tensors.items() if n.startswith("initial_")}
    shared = {n: x.double().requires_grad_() for n, x in tensors.items() if n == "center"}
    leaves = [
        {n: x[:, a:b].double().requires_grad_() for n, x in tensors.items() if n in PER_TOKEN}
        | {n: x[i : i + 1].double().requires_grad_() for n, x in starts.items()}
        for i, (a, b) in enumerate(pairwise(cuts))
    ]
    outputs = [operator(**t, **shared, **options, backend=backend) for t in leaves]
    whole = [torch.cat(x, dim) for x, dim in zip(zip(*outputs), (1, 0, 0))]
    for name, x in zip(OUTPUTS[operator], whole):
        torch.testing.assert_close(got[name], x)

    every = shared | {f"{name}_{i}": x for i, t in enumerate(leaves) for name, x in t.items()}
    grads = gradients(weighted_sum(whole), every)
    for name in leaves[0]:
        alone = [grads[f"grad_{name}_{i}"] for i in range(len(leaves))]
        torch.testing.assert_close(got[f"grad_{name}"], torch.cat(alone, 0 if name in starts else 1))
    for name in shared:
        torch.testing.assert_close(got[f"grad_{name}"], grads[f"grad_{name}"])


@every_backend
@every_rule
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 150), max_size=4))
def test_a_sequence_cut_anywhere_continues_from_its_states(backend, operator, decay, block, cuts):
    problem = make(config((150, 150), decay, block))
    tensors, options = problem.arguments(operator)
    whole = operator(**tensors, **options, backend=backend)
    for a, b in zip(joined(operator, problem, tensors, [0, *sorted(cuts), 150], backend), whole):
        assert relative_error(a, b) < 1e-5


@every_backend
@every_rule
def test_gradients_flow_through_the_states_of_a_cut_sequence(backend, operator, decay, block):
    problem = make(config((90,), decay, block))
    whole = answer(operator, problem, backend, torch.float64)
    tensors, _ = problem.arguments(operator)
    leaves = {n: x.double().requires_grad_() for n, x in tensors.items()}
    outputs = joined(operator, problem, leaves, [0, 13, 77, 90], backend)
    for name, grad in gradients(weighted_sum(outputs), leaves).items():
        torch.testing.assert_close(grad, whole[name])


@every_backend
@every_rule
def test_decoding_token_by_token_is_one_forward(backend, operator, decay, block):
    problem = make(config((70, 70), decay, block))
    tensors, options = problem.arguments(operator)
    whole = operator(**tensors, **options, backend=backend)
    for a, b in zip(joined(operator, problem, tensors, list(range(71)), backend), whole):
        assert relative_error(a, b) < 1e-5


@every_backend
@every_rule
def test_nothing_to_do_passes_the_states_through(backend, operator, decay, block):
    for lengths, packed in (((0, 0), False), ((0, 0, 0), True)):
        problem = make(config(lengths, decay, block, packed=packed))
        tensors, options = problem.arguments(operator)
        o, state, carried = operator(**tensors, **options, backend=backend)
        assert o.shape == tensors["v"].shape
        assert torch.equal(state, tensors["initial_state"])
        assert torch.equal(carried, tensors[f"initial_{BOTH[operator]}"])


@every_backend
@every_rule
def test_an_empty_batch_gives_empty_outputs(backend, operator, decay, block):
    tensors, options = make(config((70,), decay, block)).arguments(operator)
    nobody = {name: (x if name == "center" else x[:0]).requires_grad_() for name, x in tensors.items()}
    o, state, carried = operator(**nobody, **options, backend=backend)
    assert (o.shape, state.shape) == ((0, 70, 4, 5), (0, 4, 6, 5))
    assert carried.shape == nobody[f"initial_{BOTH[operator]}"].shape


@every_backend
@every_rule
def test_the_states_handed_in_are_not_written_to(backend, operator, decay, block):
    tensors, options = make(config((33,), decay, block)).arguments(operator)
    before = {name: x.clone() for name, x in tensors.items()}
    operator(**tensors, **options, backend=backend)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
