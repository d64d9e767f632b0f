"""The preconditioner's settings and parameters."""

import math

import pytest
import torch

from osdn.layers import Preconditioner, PreconditionerConfig


def make(**settings):
    return Preconditioner(
        PreconditionerConfig(**settings), hidden_size=6, num_heads=3, head_k_dim=4, has_decay=True
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"eta": -0.1}, "eta is -0.1"),
        ({"eta": math.nan}, "eta is nan"),
        ({"bounds": (2.0, 0.5)}, "lower bound must not exceed"),
        ({"bounds": 0.5}, "bounds is 0.5"),
        ({"retention": 1.5}, "retention is 1.5"),
        ({"retention": 0.0}, "in \\(0, 1\\]"),
        ({"retention": "lerned"}, "retention is 'lerned'"),
        ({"initial_scale": "learned"}, "initial_scale is 'learned'"),
        ({"initial_scale": "projected", "bounds": None}, "needs bounds"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(settings, reason):
    with pytest.raises(ValueError, match=reason):
        PreconditionerConfig(**settings)


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(ValueError, match="no setting step_size; it has eta, bounds"):
        PreconditionerConfig.of({"step_size": 0.1})
    with pytest.raises(TypeError, match="beta_aware"):
        PreconditionerConfig(beta_aware="yes")
    with pytest.raises(TypeError, match="None or a dictionary, got float"):
        PreconditionerConfig.of(0.003)


def test_tied_retention_needs_a_decay():
    with pytest.raises(ValueError, match="state decays"):
        Preconditioner(PreconditionerConfig(retention="tied"), 6, 3, 4, has_decay=False)


def test_only_learned_settings_have_parameters():
    assert not list(make().parameters())
    assert not list(make(retention=0.999).parameters())
    assert not list(make(retention="tied").parameters())
    assert sum(p.numel() for p in make(retention="learned").parameters()) == 3 * (6 + 1)
    assert sum(p.numel() for p in make(retention="learned_per_channel").parameters()) == 3 * 4 * (6 + 1)
    assert sum(p.numel() for p in make(initial_scale="free").parameters()) == 3 * 4


@pytest.mark.parametrize("kind", ["learned", "learned_per_channel"])
def test_learned_retention_starts_at_the_papers_constant(kind):
    retention = make(retention=kind)(torch.randn(2, 5, 6), None, None)["retention"]
    assert retention.shape == ((2, 5, 3) if kind == "learned" else (2, 5, 3, 4))
    torch.testing.assert_close(retention, torch.full_like(retention, 0.999))


def test_learned_retention_is_a_sigmoid_of_the_input_in_float32():
    module = make(retention="learned").bfloat16()
    torch.nn.init.normal_(module.retention.weight)
    x = torch.randn(2, 5, 6, dtype=torch.bfloat16)
    retention = module(x, None, None)["retention"]
    assert retention.dtype == torch.float32
    torch.testing.assert_close(retention, module.retention(x).float().sigmoid())
    # bfloat16 has no number between 0.99609375 and 1
    assert not torch.equal(retention, retention.bfloat16().float())


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 5, 3, 4)])
def test_tied_retention_is_the_decay_of_the_state(shape):
    log_decay = -torch.rand(shape)
    torch.testing.assert_close(
        make(retention="tied")(torch.zeros(2, 5, 6), log_decay, None)["retention"], log_decay.exp()
    )


def test_initial_scale_is_projected_or_free():
    for kind, expected in [("projected", [0.5, 1.0, 2.0]), ("free", [math.exp(-3), 1.0, math.exp(3)])]:
        module = make(initial_scale=kind)
        assert torch.equal(module.initial_scale(), torch.ones(3, 4))
        module.log_scale.data[0, :3] = torch.tensor([-3.0, 0.0, 3.0])
        torch.testing.assert_close(module.initial_scale()[0, :3], torch.tensor(expected))


def test_a_given_scale_takes_the_place_of_the_initial_one():
    scale = torch.rand(2, 3, 4)
    assert make(initial_scale="free")(torch.zeros(2, 5, 6), None, scale)["initial_scale"] is scale
