"""Captures are exactly what the layer computed with, for our models and those of transformers."""

import sys
from threading import Thread

import pytest
import torch

from osdn.analysis.capture import RECURRENCES, capture, capturing, recurrent_layers
from osdn.analysis.theory.runs import Problem
from osdn.ops import delta_rule, precondition_keys
from tests.analysis.models import kimi_linear, qwen3_next
from tests.models.variants import ONLINE_SCALING, VARIANTS, make, tokens


def replay(problem: Problem, q: torch.Tensor) -> torch.Tensor:
    """The outputs of the reference recurrence over captured tensors, in float64."""
    p = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in vars(problem).items()}
    phase_1 = ("eta", "bounds", "retention", "initial_scale", "beta_aware", "eps")
    write_keys, _ = precondition_keys(
        p["k"], p["beta"], **{name: p[name] for name in phase_1}, backend="reference"
    )
    state = {"initial_state": p["initial_state"], "log_decay": p["log_decay"]}
    o, _ = delta_rule(
        q.double(), p["k"], p["v"], p["beta"], write_keys=write_keys, **state, backend="reference"
    )
    return o


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x - truth).norm() / truth.norm())


@pytest.mark.parametrize("variant", ONLINE_SCALING)
def test_captured_tensors_reproduce_the_layers_output(variant):
    model = make(variant)
    captures = capture(model, input_ids=tokens(2, 23))
    assert [c.name for c in captures] == list(recurrent_layers(model))
    assert len(captures) == model.config.linear_layers
    for c in captures:
        assert c.scaled == (VARIANTS[variant][1] is not None)
        assert error(c.output, replay(c.problem, c.q)) < 1e-5


@pytest.mark.parametrize("make_model", [qwen3_next, kimi_linear])
def test_captured_tensors_reproduce_the_output_of_transformers_layers(make_model):
    model = make_model()
    captures = capture(model, input_ids=tokens(2, 71), use_cache=False)  # more than one of its chunks
    assert [c.name for c in captures] == list(recurrent_layers(model))
    for c in captures:
        assert not c.scaled
        assert error(c.output, replay(c.problem, c.q)) < 1e-5


def test_a_continued_prompt_is_captured_with_the_state_it_continues_from():
    model, ids = make("osgdn-apf"), tokens(1, 19)
    first = model(ids[:, :8], use_cache=True)
    whole = capture(model, input_ids=ids)
    rest = capture(model, input_ids=ids[:, 8:], past_key_values=first.past_key_values)
    for a, b in zip(whole, rest):
        assert b.problem.initial_state is not None
        assert error(replay(b.problem, b.q), replay(a.problem, a.q)[:, 8:]) < 1e-5


def test_capturing_changes_nothing_and_ends_with_its_context():
    model, other, ids = make("oskda"), make("oskda", seed=3), tokens(1, 9)
    before, seen = model(ids).logits, []
    with capturing(model, seen.append):
        assert torch.equal(model(ids).logits, before)
        other(ids)  # not the model being captured
    assert len(seen) == 2
    model(ids)
    assert len(seen) == 2
    with pytest.raises(IndexError), capturing(model, seen.append):
        model(ids + 10_000)  # a failure in the model leaves no hooks behind
    model(ids)
    assert len(seen) == 2


def test_functions_of_transformers_are_replaced_only_while_capturing():
    model, ids, seen = qwen3_next(), tokens(1, 9), []
    *_, last = recurrent_layers(model).values()
    source = sys.modules[type(last).__module__]
    before = {name: getattr(source, name) for name in RECURRENCES if hasattr(source, name)}
    with torch.no_grad(), capturing(model, seen.append):
        with capturing(model, seen.append):
            model(ids, use_cache=False)
        assert len(seen) == 2 * len(recurrent_layers(model))
        assert {name: getattr(source, name) for name in before} != before
    with pytest.raises(IndexError), capturing(model, seen.append):
        model(ids + 10_000)
    assert {name: getattr(source, name) for name in before} == before


def test_a_model_of_transformers_that_runs_in_another_thread_is_not_captured():
    model, other, ids, seen = qwen3_next(), qwen3_next(), tokens(1, 9), []
    *_, last = recurrent_layers(model).values()

    def run_the_other(*_: object) -> None:
        thread = Thread(target=other, kwargs={"input_ids": ids, "use_cache": False})
        thread.start()
        thread.join()

    with torch.no_grad(), capturing(model, seen.append):
        last.register_forward_pre_hook(run_the_other)
        model(ids, use_cache=False)
    assert [layer.name for layer in seen] == list(recurrent_layers(model))


def test_models_and_batches_that_cannot_be_captured_are_rejected():
    with pytest.raises(ValueError, match="Linear has no recurrent layer"):
        capture(torch.nn.Linear(2, 2))
    ids = tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="one prompt at a time"):
        capture(make("osdn"), input_ids=ids, attention_mask=mask)
