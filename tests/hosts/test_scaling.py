"""Online scaling in loaded models: `osdn.accelerate(model, preconditioner={...})`."""

import copy

import pytest
import torch

import osdn
from osdn.analysis.capture import capture
from osdn.ops import online_scaled_delta_rule
from tests.hosts.families import FAMILIES, make, tokens

families = pytest.mark.parametrize("family", FAMILIES)
STRONG = {"eta": 2.0}  # with which the scale reaches its bounds within a few tokens


@pytest.mark.parametrize(
    "settings", [STRONG, STRONG | {"retention": "tied"}, {"retention": 0.9, "bounds": None}]
)
@families
def test_layers_compute_the_reference(family, settings):
    model, ids = make(family), tokens(2, 20)
    osdn.accelerate(model, preconditioner=settings)
    layers = capture(model, input_ids=ids)
    assert len(layers) == 2
    for layer in layers:
        p = layer.problem
        retention = settings.get("retention")
        arguments = settings | {"retention": p.log_decay.exp() if retention == "tied" else retention}
        expected, _, _ = online_scaled_delta_rule(
            layer.q, p.k, p.v, p.beta, log_decay=p.log_decay, backend="reference", **arguments
        )
        plain, _, _ = online_scaled_delta_rule(layer.q, p.k, p.v, p.beta, log_decay=p.log_decay, eta=0.0)
        torch.testing.assert_close(layer.output, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(expected, plain, rtol=1e-3, atol=1e-3)


@families
@torch.no_grad()
def test_pieces_and_single_tokens_give_what_one_forward_gives(family):
    model, ids = make(family), tokens(2, 21)
    osdn.accelerate(model, preconditioner=STRONG)
    whole = model(ids, use_cache=False).logits
    cache, pieces = None, []
    for piece in ids.split([9, 7, 1, 1, 1, 2], 1):
        out = model(piece, past_key_values=copy.deepcopy(cache), use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-3, atol=1e-3)


@families
def test_beam_search_takes_the_scales_along(family):
    model, ids = make(family), tokens(2, 9)
    osdn.accelerate(model, preconditioner=STRONG)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 3}
    cached = model.generate(ids, **settings)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))


def test_packed_sequences_are_each_alone():
    model, ids = make("kimi_linear"), tokens(1, 12)
    osdn.accelerate(model, preconditioner=STRONG)
    position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(ids, position_ids=position_ids, use_cache=False).logits
    alone = [model(ids[:, :5], use_cache=False).logits, model(ids[:, 5:], use_cache=False).logits]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_it_is_switched_off_and_other_models_are_left_alone():
    model, other, ids = make("qwen3_5"), make("qwen3_5"), tokens(1, 15)
    plain = model(ids).logits
    osdn.accelerate(model, preconditioner={"eta": 0.0})
    torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-4)
    osdn.accelerate(model, preconditioner=STRONG)
    scaled = model(ids).logits
    assert not torch.allclose(scaled, plain, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(other(ids).logits, plain, rtol=1e-4, atol=1e-4)
    osdn.accelerate()  # changes nothing
    assert torch.equal(model(ids).logits, scaled)
    osdn.accelerate(model, undo=True)
    torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-4)


def test_a_model_whose_functions_were_restored_does_not_go_on_without_it():
    model = make("qwen3_5")
    osdn.accelerate(model, preconditioner=STRONG)
    osdn.accelerate(undo=True)
    with pytest.raises(RuntimeError, match="online scaling is switched on in this model, but"):
        model(tokens(1, 5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"preconditioner": {"retention": "learned"}},
            "retention='learned', which needs more than this model",
        ),
        ({"preconditioner": {"initial_scale": "free"}}, "initial_scale='free', which needs more than this"),
        ({"preconditioner": {"rule": "newton"}}, "a loaded model can have the rule hypergradient"),
        ({"preconditioner": {"eat": 1}}, "preconditioner has no setting eat"),
        ({"preconditioner": STRONG, "undo": True}, "preconditioner goes with a model, and not with undo"),
    ],
)
def test_what_cannot_be_is_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        osdn.accelerate(make("qwen3_5"), **arguments)
    with pytest.raises(ValueError, match="preconditioner"):
        osdn.accelerate(**arguments)


def test_a_model_without_such_layers_is_told():
    with pytest.raises(ValueError, match="Linear has no delta-rule layer of qwen3_next"):
        osdn.accelerate(torch.nn.Linear(2, 2), preconditioner=STRONG)
