"""Configurations: what is rejected, what is saved, and the presets against the paper's sizes."""

import json

import pytest
import torch
from transformers import AutoConfig, GPT2Config
from typer.testing import CliRunner

from osdn import PRESETS, OSDNConfig, OSDNForCausalLM, describe, save_flash_linear_attention
from osdn.cli import app
from osdn.layers import PreconditionerConfig

# For each family: millions of parameters, and MiB of state and of scale in bfloat16.
FAMILIES = {
    "340m": {
        "delta_net": (374.36, 6.0, 0.047),
        "gated_delta_net": (379.89, 7.875, 0.031),
        "kda": (373.60, 5.75, 0.045),
    },
    "1.3b": {"delta_net": (1365.68, 12.0, 0.094)},
}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"backbone": "mamba"}, "backbone is 'mamba'; it must be one of delta_net, gated_delta_net, kda"),
        ({"hidden_size": 100, "num_heads": 3}, "hidden_size is 100, which is not divisible by num_heads = 3"),
        ({"backbone": "gated_delta_net", "num_heads": 4, "num_v_heads": 6}, "multiple of num_heads, 4"),
        ({"backbone": "delta_net", "num_v_heads": 16}, "not in delta_net"),
        ({"decay_lower_bound": -5.0}, "decay_lower_bound is an option of kda; the backbone is delta_net"),
        ({"allow_neg_eigval": True, "preconditioner": {"bounds": (0.5, 2)}}, "must not exceed 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a positive whole number"),
        ({"head_k_dim": 2.5}, "head_k_dim is 2.5"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"pad_token_id": 32_000}, "pad_token_id is 32000; it must be below vocab_size"),
        ({"backend": "gpu"}, "backend is 'gpu'"),
        ({"hiden_size": 64}, "no field hiden_size; did you mean hidden_size"),
        ({"num_layers": 2}, "no field num_layers; did you mean num_hidden_layers"),
        ({"preconditioner": {"eta": -1.0}}, "eta is -1.0"),
        ({"preconditioner": {"bounds": (2, 1)}}, "lower bound must not exceed"),
        ({"preconditioner": {"retention": "tied"}}, "delta_net has none"),
        ({"preconditioner": {"retention": 2.0}}, "retention is 2.0"),
        ({"preconditioner": {"decay": 0.9}}, "no setting decay"),
        ({"retention": 0.999}, "retention must be set inside preconditioner"),
        ({"eta": 0.003, "bounds": None}, "bounds, eta must be set inside preconditioner"),
        ({"update_rule": "adam"}, "update_rule is 'adam'; it must be None, the plain delta rule, or one of"),
        ({"update_rule": "product-1"}, "another number of writes per token, from 2 to 9"),
        ({"update_rule": "comba", "preconditioner": {}}, "set one of them to None"),
    ],
)
def test_impossible_configurations_are_rejected_at_construction_with_the_reason(settings, reason):
    with pytest.raises(ValueError, match=reason):
        OSDNConfig(**settings)


def test_the_error_for_an_unknown_preset_lists_the_presets():
    with pytest.raises(ValueError, match=r"no preset 'osdn-7b'; choose from delta_net-340m, osdn-340m"):
        OSDNConfig.from_preset("osdn-7b")


def test_a_preset_accepts_fields_of_every_model_and_rejects_others():
    config = OSDNConfig.from_preset("osdn-tiny", num_attention_heads=4, dtype="float32", vocab_size=300)
    assert (config.num_heads, config.num_v_heads, config.head_k_dim, config.vocab_size) == (4, 4, 16, 300)
    with pytest.raises(ValueError, match="no field dropout, width; choose from backbone, preconditioner"):
        OSDNConfig.from_preset("osdn-tiny", width=3, dropout=0.1)


def test_unknown_fields_of_a_later_version_are_kept(tmp_path):
    OSDNConfig.from_preset("osdn-tiny").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"something_new": 1}))
    assert OSDNConfig.from_pretrained(tmp_path).something_new == 1


def test_a_configuration_survives_saving_and_loading(tmp_path):
    settings = PreconditionerConfig(eta=0.01, bounds=(0.25, 4), retention="learned", initial_scale="free")
    config = OSDNConfig(preconditioner=settings, hidden_size=64, num_heads=4)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "osdn"
    assert saved["preconditioner"] == {
        "eta": 0.01, "bounds": [0.25, 4], "retention": "learned", "initial_scale": "free", "beta_aware": True
    }  # fmt: skip
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, OSDNConfig)
    assert loaded.to_dict() == config.to_dict() | {"_name_or_path": loaded.name_or_path}
    assert (loaded.head_k_dim, loaded.head_v_dim, loaded.intermediate_size) == (16, 16, 256)


NEWTON = ["osdn-newton", "osgdn-newton", "oskda-newton"]
HYBRIDS = [name for name in PRESETS if "-hybrid-" in name]
RECOMMENDED = "osdn-newton-block-8"
PAPER = [
    name for name in PRESETS if name.rsplit("-", 1)[0] not in (*NEWTON, RECOMMENDED) and name not in HYBRIDS
]


def test_there_are_twenty_presets_from_the_paper_six_with_newton_their_hybrids_and_the_recommended_one():
    assert len(PRESETS) == 52
    nine = ["delta_net", "osdn", "osdn-apf", "gdn", "osgdn", "osgdn-apf", "kda", "oskda", "oskda-apf"]
    names = [f"{name}-{size}" for size in ("340m", "tiny") for name in (*nine, *NEWTON)] + [
        "delta_net-1.3b",
        "osdn-apf-1.3b",
    ]
    names += [f"{name}-hybrid-{size}" for size in ("340m", "tiny") for name in (*nine, *NEWTON)]
    names += [f"{RECOMMENDED}-{size}" for size in ("340m", "tiny")]
    assert sorted(PRESETS) == sorted(names)


@pytest.mark.parametrize("preset", [name for name in PRESETS if "tiny" not in name and name not in HYBRIDS])
def test_presets_have_the_papers_sizes(preset):
    config = OSDNConfig.from_preset(preset)
    millions, state, scale = FAMILIES[preset.rsplit("-", 1)[1]][config.backbone]
    with torch.device("meta"):
        model = OSDNForCausalLM(config)
    count = sum(p.numel() for p in model.parameters())
    retention = (config.preconditioner or {}).get("retention") == "learned"
    initial_scale = bool((config.preconditioner or {}).get("initial_scale"))
    expected_extra = (
        config.num_hidden_layers
        * config.num_heads
        * (retention * (config.hidden_size + 1) + initial_scale * config.head_k_dim)
    )
    assert round((count - expected_extra) / 1e6, 2) == millions
    assert expected_extra < 0.003 * count
    d = describe(preset)
    assert (d.preset, d.parameters, d.preconditioner_parameters) == (preset, count, expected_extra)
    assert d.state_mib == state
    block_size = (config.preconditioner or {}).get("block_size", 1)  # of a covariance
    assert d.scale_mib == pytest.approx(
        block_size * scale if config.preconditioner is not None else 0, abs=block_size * 5e-4
    )
    if preset in PAPER:
        assert d.paper_state_mib is not None
        assert round(d.state_mib + d.scale_mib, 3) == pytest.approx(d.paper_state_mib, abs=1e-3)
    assert {m.weight.dtype for m in model.modules() if hasattr(m, "weight")} == {torch.float32}


def test_newton_presets_add_no_parameters_and_forget_like_their_states():
    for name in NEWTON:
        config = OSDNConfig.from_preset(f"{name}-340m")
        retention = None if config.backbone == "delta_net" else "tied"
        assert config.preconditioner == {
            "rule": "newton", "prior": 1.0, "block_size": 1, "retention": retention
        }  # fmt: skip
        assert describe(f"{name}-340m").preconditioner_parameters == 0


def test_a_block_diagonal_covariance_is_counted_in_full():
    plain, blocks = (
        describe(
            OSDNConfig.from_preset("osdn-newton-340m", preconditioner={"rule": "newton", "block_size": b})
        )
        for b in (1, 16)
    )
    assert blocks.scale_mib == 16 * plain.scale_mib
    assert blocks.forward_flops > plain.forward_flops


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"preconditioner": {"rule": "newtonian"}}, "rule is 'newtonian'; it must be one of hypergradient"),
        ({"preconditioner": {"rule": "newton", "eta": 0.1}}, "newton has no setting eta; it has prior"),
        ({"preconditioner": {"rule": "newton", "block_size": 3}}, "block_size is 3; it must divide the 16"),
        (
            {"preconditioner": {"rule": "newton", "retention": "learned_per_channel"}},
            "retention is 'learned_",
        ),
        ({"preconditioner": {"rule": "newton", "retention": "tied"}}, "tied"),
        ({"preconditioner": {"rule": "newton", "prior": 0}}, "prior is 0"),
        ({"preconditioner": {"rule": "pgdn", "squash": 0.5}}, "squash is 0.5"),
        ({"beta_bias": float("nan")}, "beta_bias is nan"),
        ({"write_scale": -1}, "write_scale is -1"),
        ({"block_size": 4}, "block_size must be set inside preconditioner"),
    ],
)
def test_impossible_rules_and_write_gates_are_rejected(settings, reason):
    with pytest.raises(ValueError, match=reason):
        OSDNConfig(hidden_size=64, num_heads=4, **settings)


@pytest.mark.parametrize("rule", ["newton", "pgdn"])
def test_the_settings_of_other_rules_survive_saving_and_loading(rule, tmp_path):
    config = OSDNConfig(preconditioner={"rule": rule}, hidden_size=64, num_heads=4, beta_bias=-2)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.preconditioner == config.preconditioner
    assert loaded.preconditioner["rule"] == rule
    assert (loaded.beta_bias, loaded.write_scale) == (-2, 1.0)


def test_preset_preconditioners_match_the_paper():
    for name in PAPER:
        variant = name.rsplit("-", 1)[0]
        settings = OSDNConfig.from_preset(name).preconditioner
        if variant in ("delta_net", "gdn", "kda"):
            assert settings is None
            continue
        large = name == "osdn-apf-1.3b"
        retention = {"osgdn-apf": "tied"}.get(variant, "learned" if variant.endswith("apf") else None)
        assert settings == {
            "eta": 0.003,
            "bounds": [0.5, 2.0],
            "retention": retention,
            "initial_scale": "projected" if large else None,
            "beta_aware": not large,
        }


def test_describe_counts_flops_from_the_shapes():
    # One layer by hand: q, k, v, o, b and SwiGLU weights, three convolutions of width 4, and the recurrence.
    config = OSDNConfig(
        hidden_size=32,
        num_heads=2,
        num_hidden_layers=1,
        vocab_size=10,
        intermediate_size=48,
        preconditioner={},
    )
    weights = 4 * 32 * 32 + 2 * 32 + 3 * 32 * 48 + 3 * 32 * 4 + 10 * 32
    assert describe(config).forward_flops == 2 * weights + 2 * (6 * 16 * 16 + 8 * 16)
    assert describe(OSDNForCausalLM(config)) == describe(config)


@pytest.mark.parametrize(
    ("preset", "rule", "more"),
    [
        ("delta_net", "longhorn", 0),
        ("gdn", "comba", 8),
        ("kda", "gdn2", 16_128),
        ("delta_net", "product-2", 17_664),
    ],
)
def test_updates_add_as_many_parameters_as_documented(preset, rule, more):
    plain = describe(f"{preset}-tiny")
    other = describe(OSDNConfig.from_preset(f"{preset}-tiny", update_rule=rule))
    assert other.parameters - plain.parameters == more
    assert other.state_mib == plain.state_mib
    assert other.preset is None


def test_describe_accepts_the_directory_of_a_saved_model(tmp_path):
    OSDNConfig.from_preset("oskda-apf-340m").save_pretrained(tmp_path)
    assert describe(tmp_path) == describe(str(tmp_path)) == describe("oskda-apf-340m")


def test_describe_reads_flash_linear_attention_and_rejects_anything_else(tmp_path):
    save_flash_linear_attention(OSDNForCausalLM(OSDNConfig.from_preset("gdn-tiny")), tmp_path / "fla")
    assert str(describe(tmp_path / "fla")) == str(describe("gdn-tiny"))
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match=r"run is not a checkpoint: it has no config.json$"):
        describe(tmp_path / "run")
    OSDNConfig.from_preset("gdn-tiny").save_pretrained(tmp_path / "run" / "model")
    with pytest.raises(ValueError, match=r"it is the folder of a run, whose model is .*run/model"):
        describe(tmp_path / "run")
    GPT2Config().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="contains a model of type 'gpt2'; it must be one of osdn"):
        describe(tmp_path / "other")


def test_the_describe_command_shows_the_same_rows_or_lists_the_presets():
    shown = CliRunner().invoke(app, ["describe", "osgdn-340m"])
    assert shown.exit_code == 0
    for label, value in describe("osgdn-340m").rows():
        assert label in shown.output
        assert value.split(" (")[0] in shown.output
    refused = CliRunner().invoke(app, ["describe", "osdn-7b"])
    assert refused.exit_code == 1
    assert "there is no preset 'osdn-7b'" in refused.output.replace("\n", " ")


def test_describe_prints_a_table_with_the_papers_figures():
    text = str(describe("osdn-apf-340m"))
    assert "374,558,912" in text
    assert "196,800, 0.053 % (the paper: at most 0.3 %)" in text
    assert "0.047 MiB, 0.78 % (the paper: at most 0.05 %)" in text
    assert "6.047 MiB (the paper: 6.047 MiB)" in text
    assert "not a preset" in str(describe(OSDNConfig.from_preset("kda-tiny", num_hidden_layers=1)))
