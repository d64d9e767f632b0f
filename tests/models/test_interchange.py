"""Checkpoints in the format of flash-linear-attention: configurations, parameter names and shapes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from osdn import OSDNForCausalLM, load_flash_linear_attention, save_flash_linear_attention
from osdn.models.interchange import config_from_flash_linear_attention
from tests.models.variants import make, tokens

# The fields of its `save_pretrained` that affect the results, and the shapes of its parameters.
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
    """Write a checkpoint like flash-linear-attention."""
    torch.manual_seed(0)
    shapes = SHELL | {f"model.layers.0.attn.{name}": shape for name, shape in MIXERS[kind].items()}
    shapes = {name: shape for name, shape in (shapes | dict(add)).items() if name not in drop}
    weights = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    settings = {**COMMON, **CONFIGS[kind], "model_type": kind, **dict(config)}
    (path / "config.json").write_text(json.dumps(settings))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return weights


@kinds
def test_a_checkpoint_loads_completely(kind, tmp_path):
    weights = checkpoint(tmp_path, kind)
    model = load_flash_linear_attention(tmp_path)
    assert model.config.preconditioner is None
    assert set(model.state_dict()) == set(weights)
    assert all(torch.equal(model.state_dict()[name], w) for name, w in weights.items())
    assert model.config.intermediate_size == 256
    with torch.no_grad():
        assert model(tokens(1, 5) % 50).logits.isfinite().all()


@preconditioned
def test_a_preconditioned_checkpoint_survives_a_round_trip(kind, tmp_path):
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
def test_a_preconditioned_checkpoint_is_loaded_strictly_and_unchanged(kind, tmp_path):
    checkpoint(tmp_path, kind)
    with pytest.raises(ValueError, match="already has a preconditioner"):
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
def test_the_error_lists_everything_missing_unexpected_or_misshapen(kind, tmp_path):
    checkpoint(
        tmp_path,
        kind,
        drop=["model.norm.weight", "model.layers.0.attn.b_proj.weight"],
        add={"model.layers.0.attn.D": (2,), "model.layers.0.mlp.up_proj.weight": (100, 32)},
    )
    with pytest.raises(ValueError, match=r"the weights of .* do not fit its config\.json") as refusal:
        load_flash_linear_attention(tmp_path)
    text = str(refusal.value)
    assert "missing: model.layers.0.attn.b_proj.weight, model.norm.weight;" in text
    assert "unexpected: model.layers.0.attn.D;" in text
    assert "mismatched: model.layers.0.mlp.up_proj.weight" in text


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("delta_net", {"use_gate": True}, r"use_gate = True \(only False is supported\)"),
        ("delta_net", {"qk_activation": "relu"}, "qk_activation = 'relu'"),
        ("delta_net", {"head_dim": 16}, "it has head_dim = 16, whose meaning is not known"),
        (
            "kda",
            {"output_gate_activation": "relu"},
            "it has output_gate_activation = 'relu', .*known keys are",
        ),
        ("gated_deltanet", {"lower_bound": -5.0, "new_gate": 1}, "it has lower_bound = -5.0, new_gate = 1, "),
        ("delta_net", {"expand_k": 0.7}, "whole numbers"),
        ("gated_deltanet", {"output_gate_activation": "relu"}, "must be one of swish, silu, sigmoid"),
        ("gated_deltanet", {"attn": {"layers": [0], "num_heads": 2, "nope": 1}}, "attn has nope = 1"),
        (
            "gated_deltanet",
            {"attn": {"layers": [1], "num_heads": 2}},
            "the model has 1 layers, counted from 0",
        ),
        (
            "gated_deltanet",
            {"attn": [{"layers": [0], "num_heads": n} for n in (1, 2)]},
            "may only differ in whether they have the window",
        ),
        ("kda", {"safe_gate": True}, "safe_gate = True needs a lower_bound"),
        ("kda", {"lower_bound": 5.0}, "decay_lower_bound is 5.0; it must be below 0"),
        ("kda", {"use_short_conv": False}, "use_short_conv = False"),
        ("precond_kda", {"num_v_heads": 4}, r"num_v_heads = 4 \(only None is supported\)"),
        ("kda", {"model_type": "gla"}, "model_type is 'gla'"),
    ],
)
def test_a_model_that_computes_something_else_is_rejected_with_the_reason(kind, config, reason, tmp_path):
    checkpoint(tmp_path, kind, config=config)
    with pytest.raises(ValueError, match=reason):
        load_flash_linear_attention(tmp_path)


def logits_by_hand(weights, settings, ids):  # [T] -> [T, vocabulary], in float64
    """The models of flash-linear-attention, implemented independently from their definitions."""
    w = {name: x.double() for name, x in weights.items()}
    heads, D = settings["num_heads"], settings["hidden_size"]
    kind = settings["model_type"]
    value_heads = settings.get("num_v_heads") or heads
    strongest = 2 if settings.get("allow_neg_eigval") else 1

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + settings["norm_eps"]).sqrt() * weight

    def linear_layer(x, p):
        def convolved(name):
            y = x @ w[f"{p}{name}_proj.weight"].T
            past = F.pad(y, (0, 0, 3, 0))
            taps = w[f"{p}{name}_conv1d.weight"][:, 0]
            return F.silu(sum(past[i : i + len(y)] * taps[:, i] for i in range(4)))

        def unit(y):
            return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()

        q, k = (unit(convolved(name).view(len(x), heads, -1)) for name in "qk")
        q, k = (y.repeat_interleave(value_heads // heads, 1) for y in (q, k))
        v = convolved("v").view(len(x), value_heads, -1)
        beta = strongest * (x @ w[f"{p}b_proj.weight"].T).sigmoid()
        K, V = k.shape[-1], v.shape[-1]
        g = torch.zeros(len(x), value_heads, K, dtype=torch.float64)
        if kind != "delta_net":
            names = ["a_proj.weight"] if kind == "gated_deltanet" else ["f_proj.0.weight", "f_proj.1.weight"]
            f = x
            for name in names:
                f = f @ w[p + name].T
            f = (f + w[f"{p}dt_bias"]).view(len(x), value_heads, -1)
            rate = w[f"{p}A_log"].exp()[:, None]
            bound = settings.get("lower_bound")
            g = g + (-rate * F.softplus(f) if bound is None else bound * (rate * f).sigmoid())
        S, out = torch.zeros(value_heads, K, V, dtype=torch.float64), []
        for t in range(len(x)):
            S = g[t].exp()[..., None] * S
            error = v[t] - torch.einsum("hkv,hk->hv", S, k[t])
            S = S + beta[t][:, None, None] * k[t][..., None] * error[:, None]
            out.append(torch.einsum("hkv,hk->hv", S, q[t]) * K**-0.5)
        o = norm(torch.stack(out), w[f"{p}o_norm.weight"])
        if kind == "gated_deltanet":
            gate = x @ w[f"{p}g_proj.weight"].T
            sigmoid = settings.get("output_gate_activation") == "sigmoid"
            o = o * (gate.sigmoid() if sigmoid else F.silu(gate)).view(o.shape)
        if kind == "kda":
            gate = x @ w[f"{p}g_proj.0.weight"].T @ w[f"{p}g_proj.1.weight"].T + w[f"{p}g_proj.1.bias"]
            o = o * gate.sigmoid().view(o.shape)
        return o.flatten(1) @ w[f"{p}o_proj.weight"].T

    def attention_layer(x, p, spec):
        d = D // spec["num_heads"]
        q, k, v = (
            (x @ w[f"{p}{n}_proj.weight"].T + w.get(f"{p}{n}_proj.bias", 0)).view(len(x), -1, d)
            for n in "qkv"
        )
        angle = torch.arange(len(x)).double()[:, None] * spec["rope_theta"] ** (
            -torch.arange(0, d, 2).double() / d
        )
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        pairs = [torch.complex(*y.chunk(2, -1)) * turn for y in (q, k)]
        q, k = (torch.cat([y.real, y.imag], -1) for y in pairs)
        k, v = (y.repeat_interleave(spec["num_heads"] // y.shape[1], 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        ages = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = (ages >= 0) & (ages < (spec.get("window_size") or len(x)))
        o = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        return o.flatten(1) @ w[f"{p}o_proj.weight"].T

    attn = settings.get("attn") or []
    specs = {i: spec for spec in ([attn] if isinstance(attn, dict) else attn) for i in spec["layers"]}
    x = w["model.embeddings.weight"][ids]
    for i in range(settings["num_hidden_layers"]):
        p = f"model.layers.{i}."
        y = norm(x, w[f"{p}attn_norm.weight"])
        x = x + (attention_layer(y, f"{p}attn.", specs[i]) if i in specs else linear_layer(y, f"{p}attn."))
        y = norm(x, w[f"{p}mlp_norm.weight"])
        gate, up = (y @ w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{p}mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def two_layers(kind, shapes):
    """The shapes of a checkpoint whose second layer is like its first, or has `shapes` instead."""
    second = {
        name.replace("layers.0", "layers.1"): shape for name, shape in SHELL.items() if "layers.0" in name
    }
    return second | {f"model.layers.1.attn.{name}": shape for name, shape in (shapes or MIXERS[kind]).items()}


QKVO = {
    "q_proj.weight": (32, 32), "k_proj.weight": (16, 32), "v_proj.weight": (16, 32),
    "o_proj.weight": (32, 32),
}  # fmt: skip
BIASES = {"q_proj.bias": (32,), "k_proj.bias": (16,), "v_proj.bias": (16,)}
ATTN = {
    "layers": [1],
    "num_heads": 4,
    "num_kv_heads": 2,
    "qkv_bias": False,
    "window_size": None,
    "rope_theta": 500.0,
}
GROUPED = {
    "v_proj.weight": (64, 32), "b_proj.weight": (4, 32), "v_conv1d.weight": (64, 1, 4),
    "o_proj.weight": (32, 64), "f_proj.1.weight": (64, 16), "A_log": (4,), "dt_bias": (64,),
    "g_proj.1.weight": (64, 16), "g_proj.1.bias": (64,),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "second"),
    [
        ("delta_net", {}, None),
        ("delta_net", {"allow_neg_eigval": True}, None),
        ("gated_deltanet", {"output_gate_activation": "sigmoid"}, None),
        ("gated_deltanet", {"output_gate_activation": "silu", "allow_neg_eigval": True}, None),
        ("kda", {"lower_bound": -5.0}, None),
        ("kda", {"lower_bound": -2.0, "safe_gate": True, "allow_neg_eigval": True}, None),
        ("kda", {"num_v_heads": 4}, None),
        ("delta_net", {"attn": ATTN}, QKVO),
        ("gated_deltanet", {"attn": ATTN | {"window_size": 3, "qkv_bias": True}}, QKVO | BIASES),
        ("kda", {"attn": [ATTN], "lower_bound": -5.0}, QKVO),
    ],
)
@torch.no_grad()
def test_its_options_have_their_effect_and_survive_a_round_trip(kind, config, second, tmp_path):
    settings = COMMON | CONFIGS[kind] | {"model_type": kind, "num_hidden_layers": 2} | config
    add = two_layers(kind, second)
    if "num_v_heads" in config:
        add |= {f"model.layers.{i}.attn.{name}": shape for i in range(2) for name, shape in GROUPED.items()}
    weights = checkpoint(tmp_path, kind, settings, add=add)
    model, ids = load_flash_linear_attention(tmp_path).eval(), tokens(1, 9) % 50
    expected = logits_by_hand(weights, settings, ids[0])
    torch.testing.assert_close(model(ids).logits[0].double(), expected, rtol=1e-4, atol=1e-5)
    if config and second is None:  # the options affect these logits
        plain = {k: v for k, v in settings.items() if k not in config or k == "num_v_heads"}
        if "num_v_heads" not in config:
            assert (logits_by_hand(weights, plain, ids[0]) - expected).abs().max() > 1e-3
    save_flash_linear_attention(model, tmp_path / "again")
    again = load_flash_linear_attention(tmp_path / "again").eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == weights.keys()


@pytest.mark.parametrize("ratio", [3, 6, None])
def test_the_width_of_the_mlp_follows_from_its_ratio(ratio):
    mlp = {3: 256, 6: 512, None: 512}[ratio]  # int(width * ratio * 2 / 3), rounded up to a multiple of 256
    config = config_from_flash_linear_attention(
        {"model_type": "kda", "hidden_size": 128, "hidden_ratio": ratio}
    )
    assert config.intermediate_size == mlp


def test_a_hybrid_that_its_attention_cannot_compute_is_not_saved(tmp_path):
    for variant, reason in (
        ("osdn-apf, hybrid", "has no qk_norm = True"),
        ("oskda, hybrid without positions", "has no output_gate = True"),
    ):
        with pytest.raises(ValueError, match=reason):
            save_flash_linear_attention(make(variant, preconditioner=None), tmp_path / "model")


def test_pickles_are_not_read(tmp_path):
    weights = checkpoint(tmp_path, "kda")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_flash_linear_attention(tmp_path)


@pytest.mark.parametrize(
    ("variant", "kind"), [("delta_net", "delta_net"), ("gdn", "gated_deltanet"), ("kda", "kda")]
)
def test_a_baseline_survives_a_round_trip(variant, kind, tmp_path):
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


def test_a_preconditioned_model_is_not_saved_in_a_format_without_preconditioners(tmp_path):
    with pytest.raises(ValueError, match="no online preconditioner"):
        save_flash_linear_attention(make("osdn"), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_our_write_gate_is_not_saved_in_a_format_without_it(tmp_path):
    with pytest.raises(ValueError, match="beta_bias is -2"):
        save_flash_linear_attention(make("delta_net, write gate"), tmp_path / "model")


def test_a_preconditioned_model_keeps_the_names(tmp_path):
    model = make("osdn-apf")
    names = {name for name in model.state_dict() if ".preconditioner." not in name}
    assert names == set(make("delta_net").state_dict())
    assert isinstance(model, OSDNForCausalLM)


def test_other_updates_are_not_saved_as_plain_delta_rules(tmp_path):
    with pytest.raises(
        ValueError, match="update_rule is 'comba'; only plain delta rules can be saved for flash"
    ):
        save_flash_linear_attention(make("comba"), tmp_path / "model")
    assert not (tmp_path / "model").exists()
