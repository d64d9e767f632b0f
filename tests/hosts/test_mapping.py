"""Models that request kernels (`use_kernels=True`); needs an environment with the package `kernels`."""

from collections import Counter

import pytest
import torch
from torch import nn

import osdn
from osdn.hosts import functions
from tests.hosts.families import FAMILIES, make, module, tokens

kernels = pytest.importorskip("kernels")

from osdn.hosts import mapping  # noqa: E402


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Fetch nothing, and restore what a model changed in the modules of `kernels`."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    osdn.accelerate(undo=True)
    for family in FAMILIES:
        for x in vars(module(family)).values():
            if isinstance(x, nn.Module):
                vars(x).pop("forward", None)


def load(model, path, **settings):
    """Save and load the model, as users do."""
    model.save_pretrained(path)
    return type(model).from_pretrained(path, **settings)


def count(monkeypatch, calls):
    layer = mapping._layer

    def counting(original, make):
        wrapped = layer(original, make)
        forward = wrapped.forward

        def counted(*args, **kwargs):
            calls["mapped"] += 1
            return forward(*args, **kwargs)

        counted.__signature__ = forward.__signature__
        wrapped.forward = counted
        return wrapped

    rule = functions.delta_rule

    def counted_rule(*args, **kwargs):
        calls["delta_rule"] += 1
        return rule(*args, **kwargs)

    monkeypatch.setattr(mapping, "_layer", counting)
    monkeypatch.setattr(functions, "delta_rule", counted_rule)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_asks_for_kernels_gets_ours_through_the_mapping(family, monkeypatch, tmp_path):
    calls = Counter()
    count(monkeypatch, calls)
    model, ids = make(family), tokens(1, 9)
    expected = model(ids).logits
    osdn.accelerate()
    asking = load(model, tmp_path, use_kernels=True).eval()
    with torch.no_grad():
        out = asking(ids, use_cache=True)
        assert calls == {"mapped": 2, "delta_rule": 2}  # one per layer
        torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-4)
        asking(ids[:, :1], past_key_values=out.past_key_values)
    assert calls == {"mapped": 4, "delta_rule": 4}
    asking(ids).logits.sum().backward()
    assert calls == {"mapped": 6, "delta_rule": 6}
    osdn.accelerate(undo=True)
    torch.testing.assert_close(asking(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert calls["delta_rule"] == 6


def test_without_a_request_our_functions_are_called_by_name(monkeypatch):
    calls = Counter()
    count(monkeypatch, calls)
    osdn.accelerate()
    make("qwen3_5")(tokens(1, 9))
    assert calls == {"delta_rule": 2}


def test_another_mapping_is_respected(monkeypatch, tmp_path):
    class Other(nn.Module):
        def forward(
            self,
            query,
            key,
            value,
            g,
            beta,
            chunk_size=64,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
            **kwargs,
        ):
            return 0 * value, None

    calls = Counter()
    count(monkeypatch, calls)
    osdn.accelerate()
    other = {"chunk_gated_delta_rule": {"cpu": mapping.Repository(Other)}}
    with kernels.use_kernel_mapping(other):
        asking = load(make("qwen3_5"), tmp_path, use_kernels=True)
    asking(tokens(1, 9), use_cache=False)
    assert calls == {}


def test_models_of_other_families_that_request_kernels_are_left_alone():
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "vocab_size": 61,
    }
    model, ids = Mamba2ForCausalLM(Mamba2Config(**sizes, num_hidden_layers=1)).eval(), tokens(1, 9)
    expected = model(ids).logits
    make("qwen3_5")
    osdn.accelerate()
    model.set_use_kernels(True)
    torch.testing.assert_close(model(ids).logits, expected)
