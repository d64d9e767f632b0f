"""The residual ratio against a loop over states in float64, and against its closed form on trained models."""

from itertools import product

import pytest
import torch
from torch import Tensor

from osdn.analysis.capture import capture
from osdn.analysis.residuals import residuals, scale_trajectory
from osdn.analysis.theory.runs import Problem
from tests.analysis.models import kimi_linear, qwen3_next, trained
from tests.models.variants import ONLINE_SCALING, VARIANTS, make, tokens

OTHER_RULES = [name for name in VARIANTS if name not in (*ONLINE_SCALING, "comba", "delta product")]
THREE_BACKBONES = ["delta_net", "osdn-apf", "gdn", "osgdn-apf", "kda", "oskda"]


def per_channel(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x[..., None]  # [B, H, K] or [B, H, 1]


def loop(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """f_t before and after each write and the scale it used, in a loop over tokens as in the paper."""
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


def written(inputs):
    """The write keys of Newton's method and PGDN from their definitions, [B, T, HV, K] in float64."""
    if inputs.preconditioner is None:
        return inputs.k if inputs.write_keys is None else inputs.write_keys
    settings = inputs.preconditioner
    k = inputs.k.repeat_interleave(inputs.beta.shape[2] // inputs.k.shape[2], 2)
    B, T, HV, K = k.shape
    keys, r = torch.zeros_like(k), settings["retention"]
    b = settings.get("block_size", 1)
    block = torch.block_diag(*[torch.ones(b, b)] * (K // b)).double()
    for n, h in product(range(B), range(HV)):
        P = settings.get("prior", 0) * torch.eye(K).double()
        gram = torch.zeros(K).double()
        for t in range(T):
            k_t, r_t = k[n, t, h], torch.ones(1) if r is None else r[n, t, h].flatten()
            r_t = r_t.repeat_interleave(K // len(r_t)).double()
            if inputs.rule == "newton":
                y, beta = P @ k_t, inputs.beta[n, t, h]
                size = 1 + beta * k_t @ y
                keys[n, t, h] = y / size
                P = P - beta / size * block * torch.outer(y, y)
                P = r_t[:, None] * P + torch.diag(1 - r_t) * settings["prior"]
            else:
                gram = r_t * gram + settings["gain"][n, t, h] * k_t**2
                z = (gram + settings["eps"]).log() - settings["center"][h]
                keys[n, t, h] = settings["squash"] ** (-z / (1 + z.abs())) * k_t
    return keys


@pytest.mark.parametrize("variant", OTHER_RULES)
def test_ratios_of_other_rules_match_their_definitions(variant):
    """States, write keys and losses are computed by loops in float64."""
    model, seen = make(variant), []
    for block in model.model.layers:
        block.attn.recurrence.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for layer, inputs in zip(capture(model, input_ids=tokens(2, 13)), seen):
        settings = {x: _double(a) for x, a in (inputs.preconditioner or {}).items()}
        inputs = inputs._replace(**{x: _double(getattr(inputs, x)) for x in inputs._fields})
        inputs = inputs._replace(preconditioner=settings or None)
        v, log_decay, w = inputs.v, inputs.log_decay, written(inputs)
        k, w = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (inputs.k, w))
        S, before, after = torch.zeros(*v.shape[:1], *k.shape[2:], v.shape[3]).double(), [], []
        for t in range(v.shape[1]):
            if log_decay is not None:
                S = per_channel(log_decay[:, t]).exp()[..., None] * S
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            S = S + torch.einsum("bhk,bhv->bhkv", w[:, t], inputs.beta[:, t, :, None] * error)
            left = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            before.append(error.square().sum(-1) / 2)
            after.append(left.square().sum(-1) / 2)
        before, after, measured = torch.stack(before, 1), torch.stack(after, 1), residuals(layer)
        assert torch.allclose(measured.before.double(), before, rtol=1e-4, atol=1e-9)
        assert torch.allclose(measured.after.double(), after, rtol=1e-3, atol=1e-8)
        known = ~measured.negligible
        assert torch.allclose(measured.q.double()[known], (after / before)[known], atol=1e-5)
        assert measured.disagreement.max() < 1e-5
        _, settings, shape = VARIANTS[variant]
        assert layer.rule == (settings["rule"] if settings else shape["update_rule"])
        assert not layer.scaled
        if layer.problem.write_keys is not None:
            with pytest.raises(ValueError, match="this layer has no scale"):
                scale_trajectory(layer)


def _double(x):
    return x.double() if isinstance(x, Tensor) else x


@pytest.mark.parametrize(
    ("variant", "why"),
    [("comba", "Comba has no residual ratio"), ("delta product", "writes 2 times per token")],
)
def test_updates_without_a_ratio_per_token_are_rejected_with_the_reason(variant, why):
    with pytest.raises(ValueError, match=why):
        capture(make(variant), input_ids=tokens(1, 5))


@pytest.mark.parametrize("variant", ONLINE_SCALING)
def test_losses_and_scales_match_the_loop(variant):
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


def test_a_zero_value_has_no_ratio_and_spoils_no_other():
    layer = capture(make("osdn"), input_ids=tokens(1, 9))[0]
    silent = layer.problem.with_(v=torch.zeros_like(layer.problem.v))
    r = residuals(silent)
    assert r.negligible.all()
    assert r.disagreement.max() == 0
    assert r.q.isfinite().all()
