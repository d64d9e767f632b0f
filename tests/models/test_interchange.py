"""Checkpoints in flash-linear-attention's form: its configurations, its parameter names and shapes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from osdn import OSDNForCausalLM, load_flash_linear_attention, save_flash_linear_attention
from tests.models.variants import make, tokens

# What its `save_pretrained` writes, in the fields that say what is computed, and its parameters' shapes.
COMMON = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 50, "conv_size": 4,
    "hidden_act": "swish",
    "hidden_ratio": 4, "intermediate_size": None, "norm_eps": 1e-6, "use_short_conv": True, "attn": None,
    "attn_mode": "chunk", "fuse_norm": True, "fuse_swiglu": True, "fuse_cross_entropy": True,
    "use_l2warp": False,
    "initializer_range": 0.02, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32", "transformers_version": "4.53.0",
}  # fmt: skip
CONFIGS = {
    "delta_net": {
        "expand_k": 1.0, "expand_v": 1.0, "use_gate": False, "use_beta": True, "use_output_norm": True,
        "qk_norm": "l2",
        "qk_activation": "silu", "architectures": ["DeltaNetForCausalLM"],
    },
    "gated_deltanet": {
        "head_dim": 12, "expand_v": 2.0, "num_v_heads": None, "use_gate": True, "allow_neg_eigval": False,
        "architectures": ["GatedDeltaNetForCausalLM"],
    },
    "kda": {
        "head_dim": 16, "expand_v": 1.0, "num_v_heads": None, "allow_neg_eigval": False,
        "architectures": ["KDAForCausalLM"],
    },
    "precond_gated_deltanet": {
        "head_dim": 12, "expand_v": 2.0, "num_v_heads": None, "use_gate": True, "allow_neg_eigval": False,
        "squash_x": 1.75, "squash_eps": 1e-5, "log_atk_scale_init": -0.1,
        "architectures": ["PrecondGatedDeltaNetForCausalLM"],
    },
    "precond_kda": {
        "head_dim": 16, "expand_v": 1.0, "num_v_heads": None, "allow_neg_eigval": False,
        "squash_x": 1.5, "squash_eps": 1e-6, "log_atk_scale_init": -0.2,
        "architectures": ["PrecondKDAForCausalLM"],
    },
}  # fmt: skip
SHELL = {
    "model.embeddings.weight": (50, 32), "model.norm.weight": (32,), "lm_head.weight": (50, 32),
    "model.layers.0.attn_norm.weight": (32,), "model.layers.0.mlp_norm.weight": (32,),
    "model.layers.0.mlp.gate_proj.weight": (256, 32), "model.layers.0.mlp.up_proj.weight": (256, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 256),
}  # fmt: skip
MIXERS = {
    "delta_net": {
        "q_proj.weight": (32, 32), "k_proj.weight": (32, 32), "v_proj.weight": (32, 32),
        "b_proj.weight": (2, 32),
        "q_conv1d.weight": (32, 1, 4), "k_conv1d.weight": (32, 1, 4), "v_conv1d.weight": (32, 1, 4),
        "o_norm.weight": (16,), "o_proj.weight": (32, 32),
    },
    "gated_deltanet": {
        "q_proj.weight": (24, 32), "k_proj.weight": (24, 32), "v_proj.weight": (48, 32),
        "b_proj.weight": (2, 32),
        "a_proj.weight": (2, 32), "g_proj.weight": (48, 32), "A_log": (2,), "dt_bias": (2,),
        "q_conv1d.weight": (24, 1, 4), "k_conv1d.weight": (24, 1, 4), "v_conv1d.weight": (48, 1, 4),
        "o_norm.weight": (24,), "o_proj.weight": (32, 48),
    },
    "kda": {
        "q_proj.weight": (32, 32), "k_proj.weight": (32, 32), "v_proj.weight": (32, 32),
        "b_proj.weight": (2, 32),
        "q_conv1d.weight": (32, 1, 4), "k_conv1d.weight": (32, 1, 4), "v_conv1d.weight": (32, 1, 4),
        "f_proj.0.weight": (16, 32), "f_proj.1.weight": (32, 16), "A_log": (2,), "dt_bias": (32,),
        "g_proj.0.weight": (16, 32), "g_proj.1.weight": (32, 16), "g_proj.1.bias": (32,),
        "o_norm.weight": (16,), "o_proj.weight": (32, 32),
    },
}  # fmt: skip
ATK = {"b_atk_proj.weight": (2, 32), "A_log_atk": (2,), "dt_bias_atk": (2,), "log_atk_scale": (2,)}
MIXERS["precond_gated_deltanet"] = MIXERS["gated_deltanet"] | ATK | {"a_atk_proj.weight": (2, 32)}
MIXERS["precond_kda"] = MIXERS["kda"] | ATK | {"a_proj.weight": (2, 32)}
kinds = pytest.mark.parametrize("kind", ["delta_net", "gated_deltanet", "kda"])
preconditioned = pytest.mark.parametrize("kind", ["precond_gated_deltanet", "precond_kda"])


def checkpoint(path, kind, config=(), drop=(), add=()):
    """Write a checkpoint as flash-linear-attention does."""
    torch.manual_seed(0)
    shapes = SHELL | {f"model.layers.0.attn.{name}": shape for name, shape in MIXERS[kind].items()}
    shapes = {name: shape for name, shape in (shapes | dict(add)).items() if name not in drop}
    weights = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    settings = {**COMMON, **CONFIGS[kind], "model_type": kind, **dict(config)}
    (path / "config.json").write_text(json.dumps(settings))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return weights


@kinds
def test_a_checkpoint_loads_whole(kind, tmp_path):
    weights = checkpoint(tmp_path, kind)
    model = load_flash_linear_attention(tmp_path)
    assert model.config.preconditioner is None
    assert set(model.state_dict()) == set(weights)
    assert all(torch.equal(model.state_dict()[name], w) for name, w in weights.items())
    assert model.config.intermediate_size == 256
    with torch.no_grad():
        assert model(tokens(1, 5) % 50).logits.isfinite().all()


@preconditioned
def test_a_preconditioned_checkpoint_loads_whole_and_goes_back(kind, tmp_path):
    weights = checkpoint(tmp_path, kind)
    model = load_flash_linear_attention(tmp_path).eval()
    assert model.config.preconditioner["rule"] == "pgdn"
    assert model.config.preconditioner["squash"] == CONFIGS[kind]["squash_x"]
    attn = model.model.layers[0].attn
    a_proj = "a_atk_proj" if kind == "precond_gated_deltanet" else "a_proj"
    for ours, theirs in (
        (attn.preconditioner.a_proj.weight, f"{a_proj}.weight"),
        (attn.preconditioner.b_proj.weight, "b_atk_proj.weight"),
        (attn.preconditioner.A_log, "A_log_atk"),
        (attn.preconditioner.dt_bias, "dt_bias_atk"),
        (attn.preconditioner.center, "log_atk_scale"),
        (attn.A_log, "A_log"),
    ):
        assert torch.equal(ours, weights[f"model.layers.0.attn.{theirs}"])
    ids = tokens(1, 9) % 50
    with torch.no_grad():
        want = model(ids).logits
        model.save_pretrained(tmp_path / "ours")
        assert torch.equal(OSDNForCausalLM.from_pretrained(tmp_path / "ours")(ids).logits, want)
        save_flash_linear_attention(model, tmp_path / "theirs")
        again = load_file(tmp_path / "theirs" / "model.safetensors")
        assert again.keys() == weights.keys()
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        assert torch.equal(load_flash_linear_attention(tmp_path / "theirs")(ids).logits, want)


@preconditioned
def test_a_preconditioned_checkpoint_is_loaded_strictly_and_as_it_is(kind, tmp_path):
    checkpoint(tmp_path, kind)
    with pytest.raises(ValueError, match="preconditioner of its own"):
        load_flash_linear_attention(tmp_path, preconditioner={})
    checkpoint(tmp_path, kind, drop=["model.layers.0.attn.log_atk_scale"])
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.attn\.preconditioner\.center"):
        load_flash_linear_attention(tmp_path)


@kinds
def test_online_scaling_can_be_switched_on(kind, tmp_path):
    weights = checkpoint(tmp_path, kind)
    ids = tokens(1, 9) % 50
    model = load_flash_linear_attention(tmp_path, preconditioner={"eta": 0.3})
    assert set(model.state_dict()) == set(weights)
    with torch.no_grad():
        difference = model(ids).logits - load_flash_linear_attention(tmp_path)(ids).logits
    assert 1e-6 < difference.abs().max() < 1
    learned = load_flash_linear_attention(
        tmp_path, preconditioner={"retention": "learned"}, dtype=torch.bfloat16
    )
    assert set(learned.state_dict()) - set(weights) == {
        f"model.layers.0.attn.preconditioner.retention.{name}" for name in ("weight", "bias")
    }
    assert learned.dtype == torch.bfloat16


@kinds
def test_anything_missing_unexpected_or_misshapen_is_refused_with_the_list(kind, tmp_path):
    checkpoint(
        tmp_path,
        kind,
        drop=["model.norm.weight", "model.layers.0.attn.b_proj.weight"],
        add={"model.layers.0.attn.D": (2,), "model.layers.0.mlp.up_proj.weight": (100, 32)},
    )
    with pytest.raises(ValueError, match="is not a checkpoint of this model") as refusal:
        load_flash_linear_attention(tmp_path)
    text = str(refusal.value)
    assert "missing: model.layers.0.attn.b_proj.weight, model.norm.weight;" in text
    assert "unexpected: model.layers.0.attn.D;" in text
    assert "mismatched: model.layers.0.mlp.up_proj.weight" in text


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("delta_net", {"use_gate": True}, r"use_gate = True \(we compute False\)"),
        ("delta_net", {"qk_activation": "relu"}, "qk_activation = 'relu'"),
        ("delta_net", {"hidden_ratio": 3}, "hidden_ratio = 3"),
        ("delta_net", {"expand_k": 0.7}, "whole numbers"),
        ("gated_deltanet", {"allow_neg_eigval": True}, "allow_neg_eigval = True"),
        ("gated_deltanet", {"attn": {"layers": [0], "num_heads": 2}}, "attn = "),
        ("kda", {"safe_gate": True}, "safe_gate = True"),
        ("kda", {"use_short_conv": False}, "use_short_conv = False"),
        ("kda", {"num_v_heads": 4}, "num_v_heads can differ"),
        ("kda", {"model_type": "gla"}, "model_type is 'gla'"),
    ],
)
def test_a_model_that_computes_something_else_is_refused_with_the_reason(kind, config, reason, tmp_path):
    checkpoint(tmp_path, kind, config=config)
    with pytest.raises(ValueError, match=reason):
        load_flash_linear_attention(tmp_path)


def test_pickles_are_not_read(tmp_path):
    weights = checkpoint(tmp_path, "kda")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_flash_linear_attention(tmp_path)


@pytest.mark.parametrize(
    ("variant", "kind"), [("delta_net", "delta_net"), ("gdn", "gated_deltanet"), ("kda", "kda")]
)
def test_a_baseline_is_saved_in_its_form_and_comes_back(variant, kind, tmp_path):
    shape = {
        "hidden_size": 32,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 50,
        "intermediate_size": 256,
    }
    shape |= (
        {"head_k_dim": 12, "head_v_dim": 24} if variant == "gdn" else {"head_k_dim": 16, "head_v_dim": 16}
    )
    model, ids = make(variant, **shape), tokens(2, 7) % 50
    save_flash_linear_attention(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = COMMON | CONFIGS[kind] | {"model_type": kind, "intermediate_size": 256}
    ignored = {"attn_mode", "transformers_version", "num_v_heads", "max_position_embeddings"}
    ignored |= {name for name in expected if name.startswith(("fuse_", "use_l2warp"))}
    assert {k: config.get(k, "absent") for k in expected if k not in ignored} == {
        k: v for k, v in expected.items() if k not in ignored
    }
    shapes = SHELL | {f"model.layers.0.attn.{name}": shape for name, shape in MIXERS[kind].items()}
    assert {name: tuple(w.shape) for name, w in load_file(tmp_path / "model.safetensors").items()} == shapes
    with torch.no_grad():
        again = load_flash_linear_attention(tmp_path)(ids).logits
        assert torch.equal(again, model(ids).logits)


def test_a_preconditioned_model_is_not_saved_in_a_form_without_preconditioners(tmp_path):
    with pytest.raises(ValueError, match="no online preconditioner"):
        save_flash_linear_attention(make("osdn"), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_write_gate_of_ours_is_not_saved_in_a_form_without_it(tmp_path):
    with pytest.raises(ValueError, match="beta_bias is -2"):
        save_flash_linear_attention(make("delta_net, write gate"), tmp_path / "model")


def test_a_preconditioned_model_keeps_the_names(tmp_path):
    model = make("osdn-apf")
    names = {name for name in model.state_dict() if ".preconditioner." not in name}
    assert names == set(make("delta_net").state_dict())
    assert isinstance(model, OSDNForCausalLM)


def test_other_updates_are_not_saved_as_plain_delta_rules(tmp_path):
    with pytest.raises(ValueError, match="update_rule is 'comba'; flash-linear-attention is given plain"):
        save_flash_linear_attention(make("comba"), tmp_path / "model")
    assert not (tmp_path / "model").exists()
