"""The throughput protocol: what is timed, what is shared, and what the numbers mean."""

import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.benchmarks import throughput
from osdn.cli import app
from osdn.models.checkpoints import load_model
from osdn.models.describe import PAPER_STATE_MIB, describe_model
from osdn.models.identity import identify
from osdn.models.presets import VARIANTS
from osdn.results.paper import THROUGHPUT


def test_models_are_grouped_by_block_with_the_baseline_first():
    asked = ["oskda-tiny", "osdn-apf-tiny", "kda-tiny", "osdn-340m", "delta_net-tiny", "delta_net-340m"]
    assert throughput.blocks(asked) == [
        ["kda-tiny", "oskda-tiny"],
        ["delta_net-tiny", "osdn-apf-tiny"],
        ["delta_net-340m", "osdn-340m"],
    ]


def test_presets_of_a_block_share_only_their_weights():
    models = [
        entry.model for entry in throughput.build(["delta_net-tiny", "osdn-tiny", "osdn-apf-tiny"], "cpu")
    ]
    base, plain, apf = (dict(model.named_parameters()) for model in models)
    assert base.keys() == plain.keys()
    assert {name for name in apf if name not in base} == {
        f"model.layers.{i}.attn.preconditioner.retention.{leaf}"
        for i in range(2)
        for leaf in ("weight", "bias")
    }
    for name, parameter in base.items():
        assert parameter.data_ptr() == plain[name].data_ptr() == apf[name].data_ptr()
    ids = torch.arange(9)[None]
    logits = [model(ids).logits for model in models]
    assert not torch.equal(logits[0], logits[1])  # online scaling is active


def save(variant: str, folder: Path, **fields: object) -> str:
    torch.manual_seed(7)
    config = OSDNConfig.from_preset(f"{variant}-tiny", **fields)
    OSDNForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_saved_models_are_timed_with_their_own_weights_alongside_presets(tmp_path):
    ours = save("osdn", tmp_path / "ours", run_name="long run")
    other = save("osdn", tmp_path / "other", vocab_size=300)
    assert throughput.blocks(["osdn-tiny", other, ours, "delta_net-tiny"]) == [
        ["delta_net-tiny", "osdn-tiny", ours],
        [other],
    ]
    *_, preset, saved = throughput.build(["delta_net-tiny", "osdn-tiny", ours], "cpu")
    assert torch.equal(saved.model.lm_head.weight, load_model(ours).lm_head.weight)
    assert not torch.equal(saved.model.lm_head.weight, preset.model.lm_head.weight)
    result = throughput.throughput(
        [ours, other, "delta_net-tiny"], prefill=8, decode=2, warm_ups=1, repeats=3
    )
    base, mine, alone = result["rows"]
    assert (base["model"], base["checkpoint"], base["weights"]) == ("delta_net-tiny", "delta_net-tiny", None)
    assert (mine["model"], mine["preset"], mine["checkpoint"]) == ("long run", "osdn-tiny", ours)
    assert mine["weights"] == identify(load_model(ours), ours).weights
    assert mine["block"] == base["block"] != alone["block"]
    assert [row["compared_with"] for row in result["rows"]] == [None, "delta_net-tiny", None]
    assert "change" in mine
    assert "change" not in alone  # no other model of its block was timed
    assert all(len(row["times_ms"]) == 3 for row in result["rows"])
    with pytest.raises(ValueError, match="there is no preset 'nothing'"):
        throughput.throughput(["nothing"])


def test_one_prefill_then_one_call_per_token_through_the_cache(monkeypatch):
    model = throughput.build(["osgdn-tiny"], "cpu")[0].model
    ids, calls = torch.arange(11)[None], []
    original = type(model).forward

    def spy(self, input_ids, **kwargs):
        calls.append((input_ids.clone(), kwargs["past_key_values"]))
        return original(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", spy)
    prefill, decode = throughput.generate(model, ids, 5)
    monkeypatch.undo()
    assert [x.shape[1] for x, _ in calls] == [11, 1, 1, 1, 1, 1]
    assert len({id(cache) for _, cache in calls}) == 1
    assert isinstance(calls[0][1], DynamicCache)
    assert prefill > 0 < decode
    greedy = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)[0, 11:]
    assert torch.equal(torch.cat([x[0] for x, _ in calls[1:]]), greedy)


def timed(name: str, *times: tuple[float, float]) -> throughput.Timed:
    with torch.device("meta"):
        model = OSDNForCausalLM(OSDNConfig.from_preset(name))
    return throughput.Timed(identify(model, name), model, list(times))


def test_the_rows_follow_the_papers_formula():
    base, osdn = throughput.summarise(
        [
            timed("delta_net-340m", (100.0, 900.0), (110.0, 890.0), (120.0, 1000.0)),
            timed("osdn-340m", (100.0, 900.0), (121.0, 979.0), (140.0, 1100.0)),
        ],
        2176,
    )
    assert base["prefill_ms"] == 110
    assert base["decode_ms"] == 900
    assert base["tokens_per_second"] == pytest.approx(2176 / (110 + 900) * 1e3)
    assert osdn["change"] == pytest.approx(100 * ((110 + 900) / (121 + 979) - 1))
    assert osdn["paired_change"] == pytest.approx(100 * (1000 / 1100 - 1))  # of 1, 1000/1100, 1120/1240
    assert base["compared_with"] is None
    assert osdn["compared_with"] == "delta_net-340m"


def test_without_a_baseline_there_is_no_change():
    for row in throughput.summarise([timed("osdn-340m", (1.0, 2.0)), timed("osdn-apf-340m", (1.0, 3.0))], 9):
        assert row["compared_with"] is None
        assert "change" not in row


def test_state_sizes_match_the_paper():
    assert THROUGHPUT.rows.keys() == PAPER_STATE_MIB.keys()
    for name, mib in PAPER_STATE_MIB.items():
        row = throughput.summarise([timed(name, (1.0, 1.0))], 2)[0]
        assert row["state_mib"] == pytest.approx(mib, abs=5.1e-4)


def test_a_hybrids_state_includes_keys_and_values():
    short, long = (
        throughput.summarise([timed("gdn-hybrid-tiny", (1.0, 1.0))], tokens)[0]["state_mib"]
        for tokens in (1, 1025)
    )
    costs = describe_model("gdn-hybrid-tiny")
    assert costs.cache_kib_per_token > 0
    assert long - short == pytest.approx(costs.cache_kib_per_token)


def test_the_papers_changes_follow_from_its_throughputs():
    for base, variant in (("delta_net-340m", "osdn-340m"), ("kda-340m", "oskda-340m")):
        ours, theirs = THROUGHPUT.rows[variant], THROUGHPUT.rows[base]
        change = 100 * (ours["tokens_per_second"] / theirs["tokens_per_second"] - 1)
        assert change == pytest.approx(ours["throughput_change"], abs=0.06)


def test_the_command_measures_presets_and_sizes(tmp_path):
    sizes = ["--prefill", "16", "--decode", "3", "--repeats", "2"]
    done = CliRunner().invoke(app, ["bench", "throughput", "tiny", *sizes, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "throughput.json").read_text())
    blocks = {
        backbone: [name for name in VARIANTS if VARIANTS[name][0] == backbone]
        for backbone in ("delta_net", "gated_delta_net", "kda")
    }
    blocks["delta_net"].append("osdn-newton-block-8")
    names = [f"{name}-tiny" for block in blocks.values() for name in block]
    assert [row["model"] for row in result["rows"]] == names
    assert all(len(row["times_ms"]) == 2 for row in result["rows"])
    assert throughput.expand(["hybrid-tiny"]) == [f"{name}-hybrid-tiny" for name in VARIANTS]
    (row,) = throughput.throughput(["gdn-hybrid-tiny"], prefill=16, decode=3, repeats=1)["rows"]
    assert row["state_mib"] == describe_model("gdn-hybrid-tiny").memory_mib(19)
    done = CliRunner().invoke(app, ["bench", "throughput", "huge"])
    assert done.exit_code == 1
    assert "no preset, size or folder huge" in done.output
