"""Online scaling in loaded models: `osdn.accelerate(model, preconditioner={...})`."""

import copy

import pytest
import torch

import osdn
from osdn.analysis.capture import capture
from osdn.hosts.scaling import configure
from osdn.ops import delta_rule, newton_delta_rule, online_scaled_delta_rule
from tests.hosts.families import FAMILIES, make, tokens

families = pytest.mark.parametrize("family", FAMILIES)
STRONG = {"eta": 2.0}  # the scale reaches its bounds within a few tokens
NEWTON = {"rule": "newton", "prior": 3.0, "block_size": 2, "retention": 0.9}
both = pytest.mark.parametrize("settings", [STRONG, NEWTON])


@pytest.mark.parametrize(
    "settings",
    [
        *(STRONG, STRONG | {"retention": "tied"}, {"retention": 0.9, "bounds": None}),
        *(NEWTON, {"rule": "newton"}, {"rule": "newton", "block_size": 3, "retention": "tied"}),
    ],
)
@families
def test_layers_match_the_reference(family, settings):
    model, ids = make(family), tokens(2, 20)
    if family == "olmo_hybrid" and "rule" not in settings:  # its write strengths reach 2
        settings = settings | {"bounds": (0.5, 1.0)}
    osdn.accelerate(model, preconditioner=settings)
    layers = capture(model, input_ids=ids)
    assert len(layers) == 2
    for layer in layers:
        p = layer.problem
        arguments, operator = dict(settings), online_scaled_delta_rule
        if arguments.pop("rule", None):
            operator = newton_delta_rule
        if settings.get("retention") == "tied":
            decay = p.log_decay
            if decay.ndim == 4 and operator is newton_delta_rule:  # one per block
                decay = decay.unflatten(-1, (-1, settings["block_size"])).mean(-1)
            arguments["retention"] = decay.exp()
        inputs = (layer.q, p.k, p.v, p.beta)
        expected, _, _ = operator(*inputs, log_decay=p.log_decay, backend="reference", **arguments)
        plain, _ = delta_rule(*inputs, log_decay=p.log_decay)
        torch.testing.assert_close(layer.output, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(expected, plain, rtol=1e-3, atol=1e-3)


@both
@families
@torch.no_grad()
def test_pieces_and_single_tokens_match_one_forward(family, settings):
    model, ids = make(family), tokens(2, 21)
    osdn.accelerate(model, preconditioner=settings)
    whole = model(ids, use_cache=False).logits
    cache, pieces = None, []
    for piece in ids.split([9, 7, 1, 1, 1, 2], 1):
        out = model(piece, past_key_values=copy.deepcopy(cache), use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "preconditioner"),
    [*((family, STRONG) for family in FAMILIES), ("qwen3_5", NEWTON), ("kimi_linear", NEWTON)],
)
def test_beam_search_reorders_the_preconditioners_state(family, preconditioner):
    model, ids = make(family), tokens(2, 9)
    osdn.accelerate(model, preconditioner=preconditioner)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 3}
    cached = model.generate(ids, **settings)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))


@both
def test_packed_sequences_are_independent(settings):
    model, ids = make("kimi_linear"), tokens(1, 12)
    osdn.accelerate(model, preconditioner=settings)
    position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(ids, position_ids=position_ids, use_cache=False).logits
    alone = [model(ids[:, :5], use_cache=False).logits, model(ids[:, 5:], use_cache=False).logits]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_it_can_be_switched_off_and_other_models_are_left_alone():
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


def test_a_model_whose_functions_were_restored_does_not_silently_continue():
    model = make("qwen3_5")
    osdn.accelerate(model, preconditioner=STRONG)
    osdn.accelerate(undo=True)
    with pytest.raises(
        RuntimeError, match="this model has a preconditioner, but its layers call the original functions"
    ):
        model(tokens(1, 5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"preconditioner": {"retention": "learned"}},
            "retention='learned', which needs parameters that this model does not have",
        ),
        ({"preconditioner": {"initial_scale": "free"}}, "initial_scale='free', which needs parameters"),
        ({"preconditioner": {"rule": "newton", "retention": "learned"}}, "retention='learned', which needs"),
        ({"preconditioner": {"rule": "newton", "block_size": 4}}, "block_size is 4; it must divide the 6"),
        ({"preconditioner": {"rule": "pgdn"}}, "the rule pgdn, whose gates are parameters"),
        ({"preconditioner": {"eat": 1}}, "preconditioner has no setting eat"),
        (
            {"preconditioner": STRONG, "undo": True},
            "preconditioner needs a model and cannot be combined with undo",
        ),
    ],
)
def test_impossible_settings_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        osdn.accelerate(make("qwen3_5"), **arguments)
    with pytest.raises(ValueError, match="preconditioner needs a model"):
        osdn.accelerate(**arguments)


def test_the_box_fits_write_strengths_up_to_two():
    model = make("olmo_hybrid")
    layer = next(m for m in model.modules() if hasattr(m, "allow_neg_eigval"))
    assert layer.allow_neg_eigval
    with pytest.raises(ValueError, match="write strengths reach 2, so the scale must not exceed 1"):
        osdn.accelerate(model, preconditioner={"bounds": (0.5, 2.0)})
    assert configure({}, [layer]).bounds == (0.5, 1.0)
    layer.allow_neg_eigval = False
    assert configure({}, [layer]).bounds == (0.5, 2.0)


def test_a_model_without_delta_rule_layers_is_rejected():
    with pytest.raises(ValueError, match="Linear has no delta-rule layer of qwen3_next"):
        osdn.accelerate(torch.nn.Linear(2, 2), preconditioner=STRONG)
