"""Runs of the small model: they learn, resume exactly, and fail with a clear message."""

import errno
import fcntl
import json
import logging
import math
import os
import resource
import shutil
import signal
from dataclasses import asdict
from datetime import datetime
from functools import wraps
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from osdn import PRESETS, OSDNConfig, OSDNForCausalLM
from osdn.layers import TokenMixer
from osdn.models.identity import identify
from osdn.models.modeling_osdn import OSDNBlock
from osdn.ops import precondition_keys
from osdn.results.losses import final_loss
from osdn.training import trainer as module
from osdn.training.memory import activation_bytes, check_memory
from osdn.training.monitor import Metrics, Progress, measure
from osdn.training.settings import load_settings
from osdn.training.trainer import PackedTrainer, TrainingError, train
from tests.training import hostile
from tests.training.conftest import CONFIG


def weights(run):
    return Path(run, "model", "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """The directory of the small run, uninterrupted."""
    path = tmp_path_factory.mktemp("whole")
    content = {"output_dir": str(path / "run"), **CONFIG, "data": {"source": str(corpus), **CONFIG["data"]}}
    (path / "run.json").write_text(json.dumps(content))
    train(load_settings(path / "run.json"))
    return path / "run"


def test_the_result_is_a_directory_for_from_pretrained(whole):
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    assert isinstance(model, OSDNForCausalLM)
    assert model.config.use_cache
    assert model.config.run_name == "small"
    assert model.config.eos_token_id == tokenizer.eos_token_id == 256
    ids = tokenizer("abc", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= 6
    assert not list(whole.rglob("*.bin"))  # nothing that needs unpickling
    assert not (whole / ".writing").exists() or not list((whole / ".writing").iterdir())


def test_the_metrics_match_the_recipe(whole):
    lines = Metrics.read(whole)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["tokens"] for line in lines] == [192 * step for step in range(1, 13)]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    for line in lines:
        step = line["step"] - 1  # a warm-up of 3 steps, then half a cosine from 0.003 to a tenth of it
        share = step / 3 if step < 3 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / 9)) / 2
        assert line["learning_rate"] == pytest.approx(0.003 * share)
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert 0 < line["mfu"] < 1
        assert line["skipped_steps"] == 0


def test_a_step_is_adamw_on_the_mean_loss_of_all_its_tokens(whole, write_config):
    """Against an explicit loop: clipping at 1, no decay on vectors, one mean over accumulated batches."""
    settings = load_settings(write_config())
    tokenizer = module.load_tokenizer("bytes")
    rows = iter(module.PackedRows(module.load_pieces(settings, tokenizer), 96))
    torch.manual_seed(42)
    model = OSDNForCausalLM(settings.model_config()).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95), eps=1e-15)
    for line in Metrics.read(whole)[:8]:
        batch = [next(rows) for _ in range(2)]
        targets = sum(int((row["labels"] != -100).sum()) for row in batch)
        total = 0.0
        for row in batch:
            row.pop("position")
            loss = model(**row, num_items_in_batch=targets).loss
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = line["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()
        assert line["loss"] == pytest.approx(total, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    saved = load_file(whole / "checkpoint-8" / "model.safetensors")
    for name, p in model.named_parameters():
        torch.testing.assert_close(saved[name], p.detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_hybrid_learns_from_packed_rows(write_config, tmp_path, checkpointing):
    preset = {"preset": "osgdn-apf-hybrid-tiny", "vocab_size": 260}
    train(load_settings(write_config(model=preset, training={"gradient_checkpointing": checkpointing})))
    losses = [line["loss"] for line in Metrics.read(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.05
    assert (
        OSDNForCausalLM.from_pretrained(tmp_path / "run" / "model").config.layer_types.count("full_attention")
        == 1
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_continued_from_a_checkpoint_ends_with_the_same_weights(write_config, streaming, tmp_path):
    names = ("whole", "again")
    configs = {name: load_settings(write_config(name, data={"streaming": streaming})) for name in names}
    train(configs["whole"])
    train(configs["again"])
    run = tmp_path / "again"
    # as if the run had been killed after step 8, while writing the next checkpoint
    shutil.rmtree(run / "model")
    (run / ".writing").mkdir(exist_ok=True)
    (run / "checkpoint-12").rename(run / ".writing" / "checkpoint-12")
    (run / ".writing" / "checkpoint-12" / "manifest.json").unlink()
    train(configs["again"])
    assert weights(run) == weights(tmp_path / "whole")
    assert [line["step"] for line in Metrics.read(run)] == list(range(1, 13))
    assert [line["loss"] for line in Metrics.read(run)] == [
        line["loss"] for line in Metrics.read(tmp_path / "whole")
    ]


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    write_config, whole, caplog, capsys, tmp_path
):
    settings = load_settings(write_config())
    train(settings)
    run = tmp_path / "run"
    (run / "model" / "model.safetensors").unlink()
    (run / "model").rename(run / "gone")
    content = bytearray((run / "checkpoint-12" / "optimizer.pt").read_bytes())
    content[3000] ^= 1
    (run / "checkpoint-12" / "optimizer.pt").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        train(settings)
    assert "checkpoint-12 is damaged (optimizer.pt has changed since it was written)" in caplog.text
    assert "continuing from step 8" in capsys.readouterr().err
    assert weights(run) == weights(whole)


def test_a_checkpoint_that_is_damaged_again_does_not_block_the_run(write_config, whole, tmp_path):
    settings, run = load_settings(write_config()), shutil.copytree(whole, tmp_path / "run")
    for _ in range(2):
        shutil.rmtree(run / "model")
        (run / "checkpoint-12" / "scheduler.pt").write_bytes(b"")
        train(settings)
        assert weights(run) == weights(whole)
    assert {path.name for path in run.glob("damaged-*")} == {
        "damaged-checkpoint-12",
        "damaged-checkpoint-12-2",
    }


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_code_in_a_file_is_not_run_and_the_previous_checkpoint_is_used(
    write_config, whole, tmp_path, caplog, file
):
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "model")
    settings = load_settings(write_config())
    hostile.poison(run / "checkpoint-12" / file, tmp_path / "proof")
    hostile.sign(run / "checkpoint-12")
    with caplog.at_level(logging.WARNING):
        train(settings)
    assert f"checkpoint-12 is damaged ({file}: " in caplog.text
    assert weights(run) == weights(whole)
    assert not (tmp_path / "proof").exists()


def test_a_checkpoint_that_does_not_fit_the_model_is_reported(write_config, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoint-12")
    torch.save({"state": {}, "param_groups": []}, run / "checkpoint-8" / "optimizer.pt")
    hostile.sign(run / "checkpoint-8")
    with pytest.raises(TrainingError, match=r"checkpoint-8 cannot be loaded .*move it away to continue"):
        train(load_settings(write_config()))


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_a_damaged_result_is_set_aside_and_recreated(write_config, whole, tmp_path, caplog, how):
    run = shutil.copytree(whole, tmp_path / "run")
    file = run / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if how == "remove":
        file.unlink()
    else:
        file.write_bytes(content if how == "flip" else content[:-1])
    with caplog.at_level(logging.WARNING):
        train(load_settings(write_config()))
    reason = "is missing" if how == "remove" else "has changed since it was written"
    assert f"model is damaged (model.safetensors {reason})" in caplog.text
    assert weights(run) == weights(whole)
    assert (run / "damaged-model").is_dir()


def test_a_damaged_result_without_a_checkpoint_is_reported(write_config, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    train(load_settings(write_config()))  # an intact result needs no checkpoint
    (run / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model is damaged, and there is no checkpoint to continue from"):
        train(load_settings(write_config()))
    assert len(Metrics.read(run)) == 12


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_is_not_continued_on_other_data(write_config, corpus, tmp_path, streaming):
    text = corpus.read_text()
    documents = tmp_path / "documents.jsonl"
    documents.write_text(text)
    data = {"source": str(documents), "streaming": streaming}
    settings = load_settings(write_config(data=data, training={"steps": 4}, checkpoints={"every": 2}))
    train(settings)
    run = tmp_path / "run"
    before = weights(run)
    for gone in ("model", "checkpoint-4"):
        shutil.rmtree(run / gone)
    documents.write_text(text.replace("a", "b", 1))
    with pytest.raises(ValueError, match=r"data has changed since .*checkpoint-2 was written"):
        train(settings)
    documents.write_text(text)  # a newer file with the same content
    train(settings)
    assert weights(run) == before


@pytest.mark.parametrize("content", [b"", b"model: {", b"data: 3\n", b"model: {}\ndata: {}\n", b"\xff", b"7"])
def test_a_damaged_config_is_reported(write_config, whole, tmp_path, content):
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "model")
    (run / "config.yaml").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"config.yaml is damaged.* remove the file and run the same command"
    ):
        train(load_settings(write_config()))
    (run / "config.yaml").unlink()
    train(load_settings(write_config()))
    assert weights(run) == weights(whole)


def test_damaged_metrics_do_not_stop_a_run(write_config, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    for gone in ("model", "checkpoint-12"):
        shutil.rmtree(run / gone)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'7\n{}\n\xff\n{"step": "x"}\n{"step": 13')
    train(load_settings(write_config()))
    assert [line["step"] for line in Metrics.read(run)] == list(range(1, 13))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_silently_restarted(write_config, tmp_path):
    settings = load_settings(write_config(training={"steps": 1}))
    train(settings)
    (tmp_path / "run" / "model").rename(tmp_path / "gone")
    (tmp_path / "run" / "checkpoint-1" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        train(settings)


def test_a_finished_run_is_left_alone_and_other_settings_are_rejected(write_config, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(load_settings(write_config(training={"steps": 2})))
    assert "warmup_steps (3) is not below training.steps (2): the learning rate never peaks" in caplog.text
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with caplog.at_level(logging.WARNING):
        train(load_settings(write_config(training={"steps": 2}), ["logging.every=5"]))
    assert "is already finished; a larger training.steps extends it" in caplog.text
    for change, message in (
        ({"training": {"steps": 3, "seed": 7}}, "other settings: training.seed is 42, not 7; choose"),
        ({"training": {"steps": 2}, "name": "other"}, "other settings: name is 'small', not 'other'; choose"),
        ({"training": {"steps": 2}, "validation": {"tokens": 9}}, "validation.tokens is 200, not 9"),
        ({"training": {"steps": 1}}, r"has a run of 2 steps; .* can be increased but not reduced to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            train(load_settings(write_config(**change)))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_run_without_a_checkpoint_can_start_with_other_settings(write_config, monkeypatch, tmp_path):
    poison(monkeypatch, {1, 2})
    with pytest.raises(TrainingError, match="not finite"):
        train(load_settings(write_config(training={"max_skipped_steps": 0})))
    monkeypatch.undo()
    train(load_settings(write_config(training={"steps": 2}, data={"seq_len": 64})))
    assert (tmp_path / "run" / "model").exists()


def test_what_an_error_advises_can_be_changed_in_a_run(write_config, monkeypatch, tmp_path):
    poison(monkeypatch, set(range(5, 13)))
    with pytest.raises(TrainingError, match="max_skipped_steps"):
        train(load_settings(write_config()))
    monkeypatch.undo()
    changes = {"max_skipped_steps": 9, "gradient_checkpointing": True}
    train(load_settings(write_config(training=changes)))
    assert Metrics.read(tmp_path / "run")[-1]["step"] == 12


def test_extending_a_finished_run_warns_about_its_schedule(
    write_config, whole, caplog, monkeypatch, tmp_path
):
    used, step_of = [], torch.optim.AdamW.step

    def step(optimizer, *args, **kwargs):
        used.append(optimizer.param_groups[0]["lr"])
        return step_of(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(load_settings(write_config()))
    run, longer = tmp_path / "run", ["training.steps=20", "checkpoints.every=6"]
    with caplog.at_level(logging.WARNING):
        train(load_settings(run / "config.yaml", longer))
    assert (
        "extending the run from 12 to 20 steps: its cosine schedule now ends later, so the learning rate "
        "jumps from 3.00e-04 to 1.53e-03 at step 12, and the result differs"
    ) in caplog.text
    lines = [line for line in Metrics.read(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["learning_rate"] for line in lines] == used
    for line in lines:
        step, end = line["step"] - 1, 12 if line["step"] <= 12 else 20
        share = step / 3 if step < 3 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / (end - 3))) / 2
        assert line["learning_rate"] == pytest.approx(0.003 * share)
    assert (run / "model-12" / "model.safetensors").read_bytes() == weights(whole)
    record = json.loads((run / "training.json").read_text())
    assert (record["steps"], record["tokens"]) == (20, 20 * 192)
    assert record["extensions"] == [{"at_step": 12, "to_steps": 20}]

    # killed after step 18, it continues the longer run to the same weights
    before, modified = weights(run), (run / "model-12").stat().st_mtime_ns
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoint-20")
    train(load_settings(run / "config.yaml"))
    assert weights(run) == before
    assert (run / "model-12").stat().st_mtime_ns == modified
    with pytest.raises(ValueError, match="a run of 20 steps"):
        train(load_settings(run / "config.yaml", ["training.steps=12"]))


def test_a_run_extended_during_its_warm_up_equals_the_longer_run(write_config, whole, caplog, tmp_path):
    train(load_settings(write_config(training={"steps": 2})))
    with caplog.at_level(logging.WARNING):
        train(load_settings(write_config()))
    assert "extending" not in caplog.text
    assert weights(tmp_path / "run") == weights(whole)
    assert json.loads((tmp_path / "run" / "training.json").read_text())["extensions"] == []


def test_a_model_without_a_checkpoint_is_neither_extended_nor_retrained(write_config, tmp_path):
    train(load_settings(write_config(training={"steps": 2})))
    run = tmp_path / "run"
    before = weights(run)
    shutil.rmtree(run / "checkpoint-2")
    with pytest.raises(ValueError, match="already exists, and there is no checkpoint to continue from"):
        train(load_settings(write_config(training={"steps": 4})))
    (run / "training.json").unlink()
    train(load_settings(write_config(training={"steps": 2})))
    assert weights(run) == before
    assert (run / "training.json").exists()


HELD_OUT = {
    "data": {"split": "train[:80%]"},
    "validation": {"split": "train[80%:]", "every": 5, "tokens": 500},
}


@pytest.fixture(scope="module")
def validated(tmp_path_factory, corpus):
    """The directory of an uninterrupted run with validation and diagnostics."""
    path = tmp_path_factory.mktemp("validated")
    content = {"output_dir": str(path / "run"), **CONFIG, **HELD_OUT}
    content["data"] = {"source": str(corpus), **CONFIG["data"], **HELD_OUT["data"]}
    content["logging"] = {"every": 4, "diagnostics_every": 5}
    (path / "run.json").write_text(json.dumps(content))
    train(load_settings(path / "run.json"))
    return path / "run"


def test_validation_logs_the_mean_loss_of_held_out_rows_at_its_interval_and_at_the_end(validated, corpus):
    lines = Metrics.read(validated)
    found = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert list(found) == [5, 10, 12]
    assert [line["step"] for line in lines] == [4, 5, 8, 10, 12]
    assert all(line["tokens"] == 192 * line["step"] for line in lines)
    assert found[12] < found[5]
    model = AutoModelForCausalLM.from_pretrained(validated / "model")
    corpus = module.load_corpus(load_settings(validated / "config.yaml"), module.load_tokenizer("bytes"))
    assert corpus.validation_tokens == 576  # six rows of 96
    losses = []
    for row in corpus.validation_rows:
        cuts = row["cu_seqlens"].tolist()
        for ids in (row["input_ids"][:, a:b] for a, b in pairwise(cuts)):
            logits = model(ids).logits[0, :-1].double()
            losses += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
    assert found[12] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_validation_does_not_disturb_training(validated, write_config, tmp_path):
    train(load_settings(write_config(data=HELD_OUT["data"])))
    run = tmp_path / "run"
    assert weights(run) == weights(validated)
    for name in ("optimizer.pt", "scheduler.pt", "position.json"):
        states = [(path / "checkpoint-12" / name).read_bytes() for path in (run, validated)]
        assert states[0] == states[1], name
    random = [
        torch.load(path / "checkpoint-12" / "rng_state.pth", weights_only=False)["cpu"]
        for path in (run, validated)
    ]
    assert torch.equal(*random)


def test_validation_time_does_not_count_as_training_time(write_config, monkeypatch, tmp_path):
    class Clock:
        now = 0.0

        def perf_counter(self):
            self.now += 1
            return self.now

    clock, forward = Clock(), OSDNForCausalLM.forward

    @wraps(forward)
    def slow_to_validate(self, *args, **kwargs):
        clock.now += 0 if self.training else 1000
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(OSDNForCausalLM, "forward", slow_to_validate)
    train(load_settings(write_config(**HELD_OUT, training={"steps": 6})))
    assert clock.now > 2 * 6 * 1000  # after step 5 and at the end, on six rows
    assert all(0 < line["seconds"] < 10 for line in Metrics.read(tmp_path / "run"))


def test_diagnostics_do_not_see_validation_batches(validated, write_config, tmp_path):
    train(load_settings(write_config(data=HELD_OUT["data"], logging={"diagnostics_every": 5})))
    expected, found = (
        {
            line["step"]: {k: v for k, v in line.items() if "/" in k}
            for line in Metrics.read(path)
            if "residual_ratio/0" in line
        }
        for path in (tmp_path / "run", validated)
    )
    assert found == expected
    assert list(found) == [5, 10]


def test_a_run_with_validation_continues_to_the_same_weights_and_losses(validated, write_config, tmp_path):
    settings = load_settings(
        write_config(**HELD_OUT, logging={"every": 4, "diagnostics_every": 5}, checkpoints={"every": 8})
    )
    train(settings)
    run = tmp_path / "run"
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoint-12")
    train(settings)
    assert weights(run) == weights(validated)
    names = ("step", "loss", "validation_loss", "loss_steps")
    lines = [[{k: line.get(k) for k in names} for line in Metrics.read(path)] for path in (run, validated)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("split", "message"), [("test", "validation.split is 'test': "), ("train[:0%]", "it has no documents")]
)
def test_a_split_that_cannot_be_validated_on_is_reported_before_anything_is_written(
    write_config, split, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        train(load_settings(write_config(validation={"split": split})))
    assert not (tmp_path / "run").exists()


def test_a_finished_run_records_its_model_data_and_losses(validated):
    record = json.loads((validated / "training.json").read_text())
    settings = load_settings(validated / "config.yaml")
    identity = identify(OSDNConfig.from_pretrained(validated / "model"), validated / "model")
    assert identity.record().items() <= record.items()
    assert (record["kind"], record["model"], record["preset"]) == ("training", "small", None)
    assert record["settings"] == asdict(settings)
    assert (record["steps"], record["tokens"], record["extensions"]) == (12, 12 * 192, [])
    lines = Metrics.read(validated)
    assert record["validation_loss"] == lines[-1]["validation_loss"]
    assert record["final_loss"] == final_loss(lines) != lines[-1]["loss"] / 2
    assert record["seconds"] == pytest.approx(sum(line["seconds"] for line in lines))
    assert record["data"]["documents"] == 48
    assert record["validation"] == {"split": "train[80%:]", "documents": 12, "tokens": 576}
    assert record["versions"]["torch"] == torch.__version__
    assert datetime.fromisoformat(record["date"]).tzinfo is not None


def test_a_run_starts_with_a_header(write_config, capsys, tmp_path):
    changes = HELD_OUT | {"training": {"steps": 4}, "checkpoints": {"every": 2}}
    train(load_settings(write_config(**changes, name="[bold]odd")))
    header = capsys.readouterr().err
    parameters = OSDNForCausalLM.from_pretrained(tmp_path / "run" / "model").num_parameters()
    for text in (
        f"run         [bold]odd in {tmp_path / 'run'}\n",
        f"{parameters:,} parameters",
        "1 × cpu\n",
        "precision   float32: set in the config\n",
        "split train[:80%], 48 documents, ",
        "split train[80%:], 576 tokens every 5 steps and at the end\n",
        "4 of 192 tokens: 768 tokens, 0.0",
        "from the beginning\n",
    ):
        assert text in header
    (tmp_path / "run" / "model").rename(tmp_path / "gone")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    train(load_settings(write_config(**changes, name="[bold]odd")))
    assert "continuing from step 2\n" in capsys.readouterr().err


@pytest.mark.parametrize("directories_can_be_locked", [True, False])
def test_only_one_process_can_train_in_a_directory(
    write_config, tmp_path, monkeypatch, directories_can_be_locked
):
    settings, run = load_settings(write_config(training={"steps": 2})), tmp_path / "run"
    if not directories_can_be_locked:
        lock = fcntl.flock

        def flock(descriptor, how):
            if os.path.isdir(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.EBADF, "as NFS says")
            lock(descriptor, how)

        monkeypatch.setattr(fcntl, "flock", flock)
    with module._locked(run):
        if directories_can_be_locked:
            (run / ".lock").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=r"another process is training in .*run; wait"):
            train(settings)
    train(settings)


def test_tied_embeddings_are_trained_saved_and_converted(write_config, tmp_path):
    tied = {"preset": "osdn-tiny", "num_hidden_layers": 1, "tie_word_embeddings": True}
    train(load_settings(write_config(model=tied, training={"steps": 2})))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.lm_head.weight is model.model.embeddings.weight
    saved = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")["model.embeddings.weight"]
    assert torch.equal(model.lm_head.weight, saved)


def test_a_missing_result_is_created_from_the_last_checkpoint(write_config, tmp_path):
    settings = load_settings(write_config(training={"steps": 2}))
    train(settings)
    before = weights(tmp_path / "run")
    (tmp_path / "run" / "model").rename(tmp_path / "gone")
    train(settings)
    assert weights(tmp_path / "run") == before


def test_the_saving_interval_can_change_during_a_run(write_config, tmp_path):
    train(load_settings(write_config()))
    run = tmp_path / "run"
    (run / "model").rename(tmp_path / "gone")
    shutil.rmtree(run / "checkpoint-12")
    train(load_settings(write_config(), ["checkpoints.every=1", "checkpoints.keep=9", "logging.every=2"]))
    assert {path.name for path in run.glob("checkpoint-*")} == {
        f"checkpoint-{n}" for n in (4, 8, 9, 10, 11, 12)
    }
    assert [line["step"] for line in Metrics.read(run)] == [*range(1, 9), 10, 12]


def poison(monkeypatch, steps):
    """Make the gradient of these steps infinite."""
    step = PackedTrainer.training_step

    def poisoned(self, model, inputs, *args, **kwargs):
        loss = step(self, model, inputs, *args, **kwargs)
        if self.state.global_step + 1 in steps:
            next(model.parameters()).grad.view(-1)[0] = math.inf
        return loss

    monkeypatch.setattr(PackedTrainer, "training_step", poisoned)


def test_a_step_without_a_finite_gradient_changes_nothing_and_is_counted(write_config, monkeypatch, tmp_path):
    poison(monkeypatch, {3})
    train(load_settings(write_config(training={"steps": 4}, checkpoints={"every": 1, "keep": 9})))
    lines = Metrics.read(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert [line["loss_steps"] for line in lines] == [1, 1, 0, 1]
    assert lines[2]["grad_norm"] is None
    assert lines[2]["loss"] is None
    files = [tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors" for step in (1, 2, 3, 4)]
    assert files[1].read_bytes() == files[2].read_bytes()
    assert files[2].read_bytes() != files[3].read_bytes()
    assert json.loads((files[3].parent / "position.json").read_text())["skipped_steps"] == 1


def test_a_logged_loss_is_the_mean_over_the_steps_that_were_not_skipped(write_config, monkeypatch, tmp_path):
    compute = PackedTrainer.compute_loss

    def poisoned(self, *args, **kwargs):
        return compute(self, *args, **kwargs) * (math.nan if self.state.global_step + 1 in (2, 5, 6) else 1)

    monkeypatch.setattr(PackedTrainer, "compute_loss", poisoned)
    for run, every in (("single", 1), ("pairs", 2)):
        train(load_settings(write_config(run, training={"steps": 8}, logging={"every": every})))
    single = [line["loss"] for line in Metrics.read(tmp_path / "single")]
    assert [step for step, loss in enumerate(single, 1) if loss is None] == [2, 5, 6]
    pairs = Metrics.read(tmp_path / "pairs")
    assert [line["loss_steps"] for line in pairs] == [1, 2, 0, 2]
    expected = [single[0], (single[2] + single[3]) / 2, None, (single[6] + single[7]) / 2]
    assert [line["loss"] for line in pairs] == pytest.approx(expected)


def test_too_many_skipped_steps_stop_the_run_with_the_reason(write_config, monkeypatch, tmp_path):
    poison(monkeypatch, set(range(5, 13)))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(TrainingError, match=r"4 steps had a gradient that is not finite.*steps \(3\)"):
        train(load_settings(write_config()))
    assert (tmp_path / "run" / "checkpoint-4").exists()
    assert not (tmp_path / "run" / "model").exists()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("tiny")])
def test_matrices_decay_and_vectors_do_not(preset, write_config):
    model = OSDNForCausalLM(OSDNConfig.from_preset(preset))
    decayed = set(PackedTrainer.get_decay_parameter_names(None, model))
    for name, p in model.named_parameters():
        assert (name in decayed) == (p.ndim > 1), name
    names = [name for name, _ in model.named_parameters() if name not in decayed]
    kinds = {name.rpartition(".")[2] if "norm" not in name else "norm" for name in names}
    assert kinds <= {"A_log", "dt_bias", "bias", "norm"}


@pytest.mark.parametrize("settings", [{"preconditioner": {"rule": "pgdn"}}, {"update_rule": "comba"}])
def test_vectors_of_other_rules_do_not_decay_either(settings):
    config = OSDNConfig.from_preset("gdn-tiny", **settings)
    model = OSDNForCausalLM(config)
    decayed = set(PackedTrainer.get_decay_parameter_names(None, model))
    assert decayed == {name for name, p in model.named_parameters() if p.ndim > 1}
    assert decayed != set(dict(model.named_parameters()))


def test_the_progress_bar_is_gone_after_an_error(write_config, monkeypatch):
    bars = []
    monkeypatch.setattr(module, "Progress", lambda: bars.append(Progress()) or bars[0])
    poison(monkeypatch, {1})
    with pytest.raises(TrainingError):
        train(load_settings(write_config(training={"max_skipped_steps": 0})))
    assert not bars[0].bar.live.is_started


def test_a_vocabulary_that_is_too_small_is_rejected_and_nothing_is_written(write_config, tmp_path):
    with pytest.raises(ValueError, match=r"has 257 tokens, but model\.vocab_size is 100; set it to 257"):
        train(load_settings(write_config(model={"vocab_size": 100})))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("data", {"source": "missing.jsonl"}, "there is no such file"),
        ("data", {"tokenizer": "./missing"}, "there is no such directory"),
        ("data", {"text_column": "body"}, "has the columns text"),
        ("training", {"tokens_per_step": 100}, "not a multiple of the 96 tokens"),
        ("model", {"hidden_size": 2**20}, "needs at least .* GB for weights"),
        ("data", {"seq_len": 10**9, "context_len": 10}, "GB for the activations of 1,000,000,000 tokens"),
    ],
)
def test_an_impossible_run_is_rejected_and_nothing_is_written(
    write_config, section, values, message, tmp_path
):
    sections = {section: values}
    if values.get("seq_len"):
        sections["training"] = {"tokens_per_step": values["seq_len"]}
    with pytest.raises((ValueError, OSError), match=message):
        train(load_settings(write_config(**sections)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preset", ["osdn-apf-tiny", "osgdn-tiny", "kda-tiny"])
def test_the_memory_of_a_row_grows_as_estimated(preset):
    """Against a measurement on a row four times as long."""
    config = OSDNConfig.from_preset(preset)
    block = OSDNBlock(config, 0)
    own = {p.data_ptr() for p in block.parameters()}
    saved = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in own:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = block(torch.randn(1, 256, config.hidden_size))
    total = sum(storage.nbytes() for storage in saved.values())
    assert activation_bytes(config) == pytest.approx(total / 256, rel=0.1)
    assert y.requires_grad


def test_gradient_checkpointing_makes_a_run_fit(write_config, monkeypatch):
    config = OSDNConfig.from_preset("osdn-tiny", num_hidden_layers=40)
    plain, saving = (
        load_settings(write_config(training={"gradient_checkpointing": on}, data={"seq_len": 2**16}))
        for on in (False, True)
    )
    need = 16 * 3.2e6 + activation_bytes(config) * 2**16 * 40
    free = type("Memory", (), {"available": 0.8 * need})
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    check_memory(config, saving, torch.device("cpu"), 1)
    with pytest.raises(ValueError, match=r"gradient_checkpointing"):
        check_memory(config, plain, torch.device("cpu"), 1)


def test_gradient_checkpointing_does_not_change_the_run(whole, write_config, tmp_path):
    train(load_settings(write_config(training={"gradient_checkpointing": True})))
    a, b = (load_file(run / "model" / "model.safetensors") for run in (whole, tmp_path / "run"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def test_a_full_disk_is_reported_and_earlier_checkpoints_survive(write_config, whole, tmp_path):
    settings = load_settings(write_config())
    save = PackedTrainer._save_checkpoint
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(self, *args):
        if self.state.global_step == 8:  # from now on, limit the size of files
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        save(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedTrainer, "_save_checkpoint", full)
        try:
            with pytest.raises(TrainingError, match=r"checkpoint-8 could not be .*checkpoint-4 is intact"):
                train(settings)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "checkpoint-8" not in names
    assert not list((tmp_path / "run" / ".writing").iterdir())
    train(settings)  # there is space again
    assert weights(tmp_path / "run") == weights(whole)


def test_diagnostics_are_the_ratios_of_losses_before_and_after_each_write(write_config, tmp_path):
    torch.manual_seed(0)
    for preset in ("osdn-apf-tiny", "osgdn-apf-tiny", "kda-tiny"):
        config = OSDNConfig.from_preset(preset)
        block = OSDNBlock(config, 0).double()
        x = torch.randn(1, 23, config.hidden_size, dtype=torch.float64)
        cuts = torch.tensor([0, 9, 23])
        expected = residual_ratio(block.attn, x, cuts)
        inputs, _ = block.attn.operator_inputs(x, cu_seqlens=cuts)
        assert measure(inputs)["residual_ratio"] == pytest.approx(expected)
    train(load_settings(write_config(logging={"every": 4, "diagnostics_every": 3}, training={"steps": 4})))
    lines = Metrics.read(tmp_path / "run")
    assert [line["step"] for line in lines] == [3, 4]
    assert {"residual_ratio/0", "residual_ratio/1", "scale_median/1"} <= set(lines[0])
    assert 0.5 <= lines[0]["scale_low/0"] <= lines[0]["scale_median/0"] <= lines[0]["scale_high/0"] <= 2
    assert "residual_ratio/0" not in lines[1]


def test_diagnostics_count_the_layers_of_a_hybrid(write_config, tmp_path):
    types = ["full_attention", *["linear_attention"] * 3]
    model = {"preset": "osgdn-apf-hybrid-tiny", "vocab_size": 260, "layer_types": types}
    train(load_settings(write_config(model=model, logging={"diagnostics_every": 1}, training={"steps": 1})))
    [line] = Metrics.read(tmp_path / "run")
    assert {name for name in line if name.startswith("residual_ratio")} == {
        f"residual_ratio/{i}" for i in (1, 2, 3)
    }


def residual_ratio(mixer: TokenMixer, x, cuts):
    """The paper's ratio f_t(S_t) / f_t(S_{t-1}), f_t(S) = |S^T k_t - v_t|^2 / 2, in a loop over tokens."""
    seen = []
    hook = mixer.recurrence.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    mixer(x, cu_seqlens=cuts)
    hook.remove()
    k, v, beta, g = (getattr(seen[0], name) for name in ("k", "v", "beta", "log_decay"))
    w = k
    if mixer.preconditioner is not None:
        settings = seen[0].preconditioner
        w, _ = precondition_keys(k, beta, **settings, cu_seqlens=cuts, backend="reference")
    ratios = []
    for a, b in zip(cuts.tolist(), cuts.tolist()[1:]):
        S = torch.zeros(k.shape[2], k.shape[3], v.shape[3], dtype=torch.float64)
        for t in range(a, b):
            if g is not None:
                decay = g[0, t].double().exp()
                S = S * (decay[:, :, None] if decay.ndim == 2 else decay[:, None, None])
            before = v[0, t] - torch.einsum("hkv,hk->hv", S, k[0, t])
            S = S + torch.einsum("hk,hv->hkv", w[0, t], beta[0, t, :, None] * before)
            after = v[0, t] - torch.einsum("hkv,hk->hv", S, k[0, t])
            ratios.append(after.square().sum(-1) / before.square().sum(-1))
    return torch.stack(ratios).mean().item()


def test_bfloat16_on_a_cpu_learns_as_well_as_float32(write_config, whole, tmp_path):
    train(load_settings(write_config(training={"precision": "bfloat16"})))
    half, single = ([line["loss"] for line in Metrics.read(run)] for run in (tmp_path / "run", whole))
    assert half == pytest.approx(single, rel=0.01)
    assert half != single
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    assert record["precision"] == "bfloat16"
    tensors = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {x.dtype for x in tensors.values()} == {torch.float32}


@pytest.mark.parametrize(("ratio", "chosen"), [(1.6, "bfloat16"), (1.05, "float32")])
def test_the_faster_precision_is_measured_once_and_kept(
    write_config, tmp_path, monkeypatch, capsys, ratio, chosen
):
    monkeypatch.setattr(module.bfloat16, "speedup", lambda block, x: ratio)
    changes = {"precision": "auto"}
    train(load_settings(write_config(training=changes | {"steps": 2})))
    assert f"{chosen}: bfloat16 was {ratio:.2f} times as fast" in capsys.readouterr().err
    monkeypatch.setattr(module.bfloat16, "speedup", lambda block, x: 1 / ratio)
    train(load_settings(write_config(training=changes | {"steps": 4})))
    assert f"{chosen}: as when the run started" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "training.json").read_text())["precision"] == chosen
