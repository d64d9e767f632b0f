"""The diagnostic: its averages against a plain computation, its prompts, its command and its memory use."""

import gc
import json
import statistics

import pytest
import torch
from typer.testing import CliRunner

from osdn import OSDNForCausalLM
from osdn.analysis.capture import capture
from osdn.analysis.diagnose import BINS, diagnose
from osdn.analysis.prompts import Prompt, encode, file_prompts, find_second_reading, select, task_texts
from osdn.analysis.residuals import FLOOR, residuals, scale_trajectory
from osdn.cli import app
from osdn.models import save_flash_linear_attention
from osdn.models.identity import block, identify
from tests.analysis.models import byte_tokenizer, kimi_linear, qwen3_next
from tests.models.variants import make, tokens


def prompts(*lengths: int, task: str = "a") -> list[Prompt]:
    return [Prompt(task, tokens(T, seed=T), T // 3) for T in lengths]


def plain_geometric_mean(values: torch.Tensor) -> float:
    return statistics.geometric_mean(values.tolist())


def test_averages_are_those_of_all_measurements():
    model = make("osdn")
    read = [*prompts(31, 44), *prompts(52, task="b")]
    result = diagnose(model, iter(read))
    q, position, layer, second = [], [], [], []
    for prompt in read:
        for i, c in enumerate(capture(model, input_ids=prompt.ids[None])):
            r = residuals(c)
            keep = ~r.negligible
            t = torch.arange(len(prompt.ids))[None, :, None].expand_as(r.q)
            q.append(r.q[keep])
            position.append((t / len(prompt.ids))[keep])
            second.append((t >= prompt.second_reading)[keep])
            layer.append(torch.full_like(q[-1], i))
    q, position, layer, second = (torch.cat(x) for x in (q, position, layer, second))
    everything = result["all"]
    close = {"rel": 1e-4}
    assert everything["q_geo"]["value"] == pytest.approx(plain_geometric_mean(q), **close)
    assert everything["q_arith"]["value"] == pytest.approx(float(q.double().mean()), **close)
    assert everything["second_reading"]["value"] == pytest.approx(plain_geometric_mean(q[second]), **close)
    assert everything["first_reading"]["value"] == pytest.approx(plain_geometric_mean(q[~second]), **close)
    assert everything["by_layer"][1] == pytest.approx(plain_geometric_mean(q[layer == 1]), **close)
    last = q[position >= (BINS - 1) / BINS]
    assert everything["by_position"][-1]["value"] == pytest.approx(plain_geometric_mean(last), **close)
    assert everything["measurements"] == (31 + 44 + 52) * 2 * 3
    assert everything["prompts"] == 3
    assert list(result["tasks"]) == ["a", "b"]
    assert result["agreement"]["largest_difference"] < 1e-5


def test_a_model_that_has_diverged_is_reported():
    model = make("osdn")
    with torch.no_grad():
        model.model.layers[1].attn.k_proj.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"layers\.1\.attn: its residual ratios are not finite"):
        diagnose(model, iter(prompts(31)))


def test_the_interval_contains_the_value_and_is_a_point_for_equal_prompts():
    model = make("gdn")
    q = diagnose(model, prompts(20, 21, 22, 23))["all"]["q_geo"]
    assert q["low"] < q["value"] < q["high"]
    q = diagnose(model, prompts(20, 20, 20))["all"]["q_geo"]
    assert q["low"] == pytest.approx(q["value"])
    assert q["high"] == pytest.approx(q["value"])


@pytest.mark.parametrize(("variant", "wall"), [("osdn-apf", "share_at_low"), ("osdn", "share_at_high")])
def test_the_scale_and_where_the_box_binds(variant, wall):
    model, read = make(variant), prompts(64)
    scale = diagnose(model, read)["scale"]
    assert max(map(max, scale[wall])) > 0  # the test models are built to reach it
    for i, c in enumerate(capture(model, input_ids=read[0].ids[None])):
        d = scale_trajectory(c)[0]  # [T, H, K]
        low, high = scale["bounds"]
        share = ((d <= low) | (d >= high)).double().mean()
        assert sum(scale["share_bound_by_head"][i]) / 3 == pytest.approx(float(share))
        assert scale["range"][i] == pytest.approx((float(d.min()), float(d.max())))
        assert scale["mean"][i][0] == pytest.approx(float(d[:4].mean()), rel=1e-6)  # 64 tokens, 20 bins
    assert diagnose(make("kda"), read)["scale"] is None


@pytest.mark.parametrize(
    ("variant", "rule"), [("osgdn-newton", "newton"), ("pkda", "pgdn"), ("efla", "efla")]
)
def test_other_rules_are_diagnosed_without_scale_columns(variant, rule):
    model, read = make(variant), prompts(31, 44)
    result = diagnose(model, read)
    assert result["rule"] == rule
    assert result["scale"] is None
    measured = [residuals(c) for p in read for c in capture(model, input_ids=p.ids[None])]
    q = torch.cat([r.q[~r.negligible] for r in measured]).clamp_min(FLOOR)
    assert result["all"]["q_geo"]["value"] == pytest.approx(plain_geometric_mean(q), rel=1e-4)
    assert result["agreement"]["largest_difference"] < 1e-5


@pytest.mark.parametrize("make_model", [qwen3_next, kimi_linear])
def test_models_of_transformers_are_diagnosed(make_model):
    result = diagnose(make_model(), prompts(30, 33))
    assert 0 < result["all"]["q_geo"]["value"] < 1
    assert result["agreement"]["largest_difference"] < 1e-5


def test_the_second_reading_is_found_without_annotation():
    context = " ".join(f"The value of item {i} is {i * i % 97}." for i in range(40))
    for before, between, after in [("", "\n", ""), ("About item 7. ", "\n", " Item 7:"), ("", " ", "")]:
        text = before + context + between + context + after
        assert find_second_reading(text) == len(before + context + between)
    assert find_second_reading(context) is None
    assert find_second_reading("short") is None
    assert find_second_reading(100 * "a" + context) is None


def test_a_long_prompt_loses_its_beginning():
    tokenizer = byte_tokenizer()
    context = " ".join(f"The value of item {i} is {i * i % 97}." for i in range(40))
    text = f"{context}\n{context}"
    whole = encode("t", text, tokenizer, 10_000)
    assert whole.second_reading == len(context) + 1
    cut = encode("t", text, tokenizer, len(context) + 100)
    assert len(cut.ids) == len(context) + 100
    assert tokenizer.decode(cut.ids) == text[-len(cut.ids) :]
    assert cut.second_reading == 100
    assert encode("t", text, tokenizer, 50).second_reading is None


def test_prompts_cannot_come_from_a_file_and_from_tasks():
    with pytest.raises(ValueError, match="not from both: drop one"):
        select(byte_tokenizer(), object(), ["fda_twice"], 1, 8)


def test_prompts_of_a_task_are_those_of_its_evaluation(tmp_path):
    """`fda_twice` as `osdn eval` reads it: the question, the document twice, the cue."""
    folder = tmp_path / "hazyresearch/based-fda"
    folder.mkdir(parents=True)
    row = {"text": "Device: pump. Maker: Acme\nmaker:", "key": "maker", "value": "Acme"}
    (folder / "validation.jsonl").write_text(json.dumps(row))
    texts = task_texts("fda_twice", byte_tokenizer(), 1, tmp_path)
    text = "Device: pump. Maker: Acme."
    assert texts == [f"Information about Maker. {text}\n{text} Maker:"]
    count, prompts = select(byte_tokenizer(), None, ["fda_twice", "topics_twice"], 1, 200, tmp_path)
    assert count == 2
    assert [prompt.task for prompt in prompts] == ["fda_twice", "topics_twice"]


def test_the_result_records_what_was_read_and_truncated(tmp_path):
    model, tokenizer, file = make("osdn", vocab_size=300), byte_tokenizer(), tmp_path / "mine.jsonl"
    texts = ["one " * 9, "two " * 12, "three " * 5]
    rows = [{"text": text, "task": task} for text, task in zip(texts, "aab")]

    def diagnosed(rows: list[dict], length: int) -> dict:
        file.write_text("\n".join(map(json.dumps, rows)))
        _, chosen = select(tokenizer, file, [], 1, length)
        return diagnose(model, chosen, identity=identify(model, "x", "mine"), protocol={"length": length})

    whole, cut = diagnosed(rows, 100), diagnosed(rows, 32)
    assert (whole["model"], whole["block"], whole["protocol"]) == (
        "mine",
        block(model.config),
        {"length": 100},
    )
    assert whole["truncated"] == {"prompts": 0, "tokens": 0}
    assert cut["truncated"] == {"prompts": 2, "tokens": (36 - 32) + (48 - 32)}
    assert cut["tasks"]["a"]["truncated"] == cut["truncated"]
    assert cut["tasks"]["b"]["truncated"] == {"prompts": 0, "tokens": 0}
    assert whole["data"] == {"source": str(file), "documents": 3, "digest": whole["data"]["digest"]}
    assert whole["data"] == cut["data"]  # the texts are the same
    assert whole["tasks"]["a"]["data"]["documents"] == 2
    others = diagnosed([*rows[:2], {"text": "three, " * 5, "task": "b"}], 100)
    assert others["data"]["digest"] != whole["data"]["digest"]
    assert others["tasks"]["a"]["data"] == whole["tasks"]["a"]["data"]
    _, chosen = select(tokenizer, None, [], 2, 64)
    assert diagnose(model, chosen)["data"]["source"].startswith("documentation of Python 3.")


@pytest.mark.slow  # lm_eval reads thousands of task files first
def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match="nothing is not a task"):
        task_texts("nothing", byte_tokenizer(), 1)


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("osdn.analysis.prompts.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install"):
        task_texts("fda_twice", byte_tokenizer(), 1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A model of ours and one in flash-linear-attention's format, each with a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make("osdn-apf", vocab_size=300).save_pretrained(folder / "ours")
    make("osdn-newton", vocab_size=300).save_pretrained(folder / "newton")
    save_flash_linear_attention(make("gdn", vocab_size=300), folder / "fla")
    for name in ("ours", "newton", "fla"):
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def test_the_command_writes_its_result_and_figures(checkpoints, tmp_path):
    for name in ("ours", "newton", "fla"):
        out = tmp_path / name
        options = ["--count", "2", "--length", "90", "--output", str(out)]
        done = CliRunner().invoke(app, ["diagnose", str(checkpoints / name), *options])
        assert done.exit_code == 0, done.output
        assert "q_geo" in done.output
        assert ("this model's rule, newton, keeps no scale" in done.output) == (name == "newton")
        result = json.loads((out / "diagnosis.json").read_text())
        assert result["tasks"]["topics_twice"]["prompts"] == 2
        assert result["all"]["boundary"] == 0.5
        assert result["versions"]["torch"]
        figures = {path.name for path in out.glob("*.svg")}
        assert figures == {"contraction.svg", "tasks.svg", "heads.svg", *(["scale.svg"] * (name == "ours"))}


def test_attention_layers_of_a_hybrid_are_left_out_and_counted(tmp_path):
    make("osdn-apf, hybrid", vocab_size=300).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    options = ["--count", "2", "--length", "60", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path / "model"), *options])
    assert done.exit_code == 0, done.output
    assert "left out: 1 attention layer has no writes to measure" in done.output
    result = json.loads((tmp_path / "diagnosis.json").read_text())
    assert result["attention_layers_left_out"] == 1
    assert len(result["all"]["by_layer"]) == 1
    assert diagnose(qwen3_next(), prompts(20))["attention_layers_left_out"] == 1
    assert diagnose(make("osdn"), prompts(20))["attention_layers_left_out"] == 0


def test_the_command_reads_prompts_from_a_file(checkpoints, tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [{"text": "some words " * 9}, {"text": "others " * 9, "task": "other"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    out = ["--output", str(tmp_path)]
    done = CliRunner().invoke(app, ["diagnose", str(checkpoints / "ours"), "--prompts", str(file), *out])
    assert done.exit_code == 0, done.output
    assert set(json.loads((tmp_path / "diagnosis.json").read_text())["tasks"]) == {"mine", "other"}
    file.write_text('{"question": 1}\n')
    done = CliRunner().invoke(app, ["diagnose", str(checkpoints / "ours"), "--prompts", str(file), *out])
    assert done.exit_code == 1
    assert "line 1" in done.output


def test_a_missing_tokenizer_is_reported_without_a_traceback(tmp_path):
    make("osdn").save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path)])
    assert done.exit_code == 1
    assert "no tokenizer" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("line", ["not json", "[1]", '{"task": "x"}'])
def test_a_malformed_prompt_is_rejected_with_its_line_number(line, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "a good one"}\n' + line + "\n")
    with pytest.raises(ValueError, match='line 2: a prompt must be an object with a string "text"'):
        list(file_prompts(file, byte_tokenizer(), 100))


def test_memory_does_not_grow_with_the_number_of_prompts():
    model = OSDNForCausalLM(make("osdn").config).eval()
    seen = []

    def count(prompt: Prompt) -> None:
        gc.collect()
        seen.append(sum(x.numel() for x in gc.get_objects() if type(x) is torch.Tensor))

    diagnose(model, (p for _ in range(6) for p in prompts(40)), count)
    assert max(seen[2:]) - seen[1] <= 6 * (BINS + 2) * 5  # one row of sums per prompt
