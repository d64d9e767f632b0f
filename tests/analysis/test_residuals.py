"""The residual ratio against a loop over states in float64, and against its closed form on trained models."""

import pytest
import torch
from torch import Tensor

from osdn.analysis.capture import capture
from osdn.analysis.residuals import residuals, scale_trajectory
from osdn.analysis.theory.runs import Problem
from tests.analysis.models import kimi_linear, qwen3_next, trained
from tests.models.variants import ONLINE_SCALING, make, tokens

THREE_BACKBONES = ["delta_net", "osdn-apf", "gdn", "osgdn-apf", "kda", "oskda"]


def per_channel(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x[..., None]  # [B, H, K] or [B, H, 1]


def loop(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """f_t before and after each write and the scale it used, token by token, as the paper defines them."""
    p = Problem(**{k: v.double() if isinstance(v, Tensor) else v for k, v in vars(p).items()})
    B, T, H, K = p.k.shape
    S = torch.zeros(B, H, K, p.v.shape[-1], dtype=torch.float64)
    d, before, after, scales = p.start, [], [], []
    for t in range(T):
        k, v, beta = p.k[:, t], p.v[:, t], p.beta[:, t, :, None]
        if p.log_decay is not None:
            S = per_channel(p.log_decay[:, t]).exp()[..., None] * S
        error = v - torch.einsum("bhkv,bhk->bhv", S, k)
        before.append(error.square().sum(-1) / 2)
        S = S + torch.einsum("bhk,bhv->bhkv", d * k, beta * error)
        after.append((v - torch.einsum("bhkv,bhk->bhv", S, k)).square().sum(-1) / 2)
        scales.append(d)
        b, n = beta if p.beta_aware else 1.0, k.square().sum(-1, keepdim=True).clamp_min(p.eps)
        r = p.retention if p.retention is not None else 1.0
        r = per_channel(r[:, t]) if isinstance(r, Tensor) else r
        d = r * d + p.eta * b * (1 - b * (d * k**2).sum(-1, keepdim=True)) / n * k**2
        d = d if p.bounds is None else d.clamp(*p.bounds)
    return torch.stack(before, 1), torch.stack(after, 1), torch.stack(scales, 1)


@pytest.mark.parametrize("variant", ["osdn-newton", "pkda"])
def test_other_rules_than_online_scaling_are_refused_by_name(variant):
    with pytest.raises(ValueError, match="this measures online scaling; the rule of this layer is"):
        capture(make(variant), input_ids=tokens(1, 5))


@pytest.mark.parametrize("variant", ONLINE_SCALING)
def test_losses_and_scales_are_those_of_the_loop(variant):
    for layer in capture(make(variant), input_ids=tokens(2, 17)):
        before, after, scales = loop(layer.problem)
        measured = residuals(layer)
        assert torch.allclose(measured.before.double(), before, rtol=1e-4, atol=1e-9)
        assert torch.allclose(measured.after.double(), after, rtol=1e-3, atol=1e-9)
        assert torch.allclose(scale_trajectory(layer).double(), scales, rtol=1e-5)


@pytest.mark.parametrize("variant", THREE_BACKBONES)
def test_measured_and_closed_form_agree_on_a_trained_model(variant):
    check_agreement(*trained(variant, steps=25))


@pytest.mark.slow
@pytest.mark.parametrize("variant", THREE_BACKBONES)
def test_measured_and_closed_form_agree_after_a_minute_of_training(variant):
    check_agreement(*trained(variant, steps=400))


def check_agreement(model, ids):
    for layer in capture(model, input_ids=ids):
        r = residuals(layer)
        assert r.disagreement.max() < 1e-5
        assert r.negligible.double().mean() < 0.5
        assert r.q[~r.negligible].std() > 0.01  # there is something to agree on


@pytest.mark.parametrize("make_model", [qwen3_next, kimi_linear])
def test_transformers_layers_are_measured(make_model):
    for layer in capture(make_model(), input_ids=tokens(1, 40), use_cache=False):
        before, after, _ = loop(layer.problem)
        r = residuals(layer)
        known = ~r.negligible
        assert torch.allclose(r.q.double()[known], (after / before)[known], atol=1e-5)
        assert r.disagreement.max() < 1e-5


def test_a_value_of_zero_has_no_ratio_and_breaks_none():
    layer = capture(make("osdn"), input_ids=tokens(1, 9))[0]
    silent = layer.problem.with_(v=torch.zeros_like(layer.problem.v))
    r = residuals(silent)
    assert r.negligible.all()
    assert r.disagreement.max() == 0
    assert r.q.isfinite().all()
