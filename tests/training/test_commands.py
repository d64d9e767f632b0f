"""The commands around training: what they write, and their errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from osdn.cli import app
from osdn.results.losses import loss_curve, rolling_mean
from osdn.results.store import read_run, save_json
from tests.results.files import identity


def osdn(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_from_a_vocabulary_to_a_model_to_a_figure(write_config, corpus, tmp_path):
    code, output = osdn("tokenizer", "train", corpus, tmp_path / "bpe", "--vocab-size", 300)
    assert code == 0, output
    assert len(AutoTokenizer.from_pretrained(tmp_path / "bpe")) == 300
    config = write_config(data={"tokenizer": str(tmp_path / "bpe")})
    code, output = osdn("train", config, "training.steps=2", "checkpoints.every=1")
    assert code == 0, output
    assert "is ready for from_pretrained" in output
    run = tmp_path / "run"
    assert osdn("convert", run / "checkpoint-1", tmp_path / "converted")[0] == 0
    first, last = (
        AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "converted", run / "model")
    )
    assert first.num_parameters() == last.num_parameters()
    assert first.config.run_name == last.config.run_name == "small"
    assert not (first.lm_head.weight == last.lm_head.weight).all()
    code, output = osdn("plot", run, run, "--output", tmp_path / "loss.png")
    assert code == 0, output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_shipped_config_is_trained_by_its_name_in_an_empty_directory(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["data.seq_len=64", "training.tokens_per_step=64", "training.steps=1", "validation.split=null"]
    code, output = osdn("train", "tiny/osdn-d0", f"data.source={corpus}", *small)
    assert code == 0, output
    assert "runs/tiny/osdn-d0/model is ready for from_pretrained" in output
    assert "osdn-d0-tiny in runs/tiny/osdn-d0" in output
    model = AutoModelForCausalLM.from_pretrained("runs/tiny/osdn-d0/model")
    assert model.config.run_name == "osdn-d0-tiny"
    assert model.config.preconditioner["initial_scale"] == "projected"
    # the saved config is complete
    code, output = osdn("train", "runs/tiny/osdn-d0/config.yaml", "output_dir=again")
    assert code == 0, output
    weights = [Path(run, "model/model.safetensors").read_bytes() for run in ("runs/tiny/osdn-d0", "again")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "missing.yaml"], "Error: there is no config missing.yaml"),
        (["convert", "missing", "model"], "Error: missing is not a checkpoint of `osdn train`"),
        (["plot", "missing"], "Error: missing is not the folder of a run"),
        (
            ["tokenizer", "train", "./missing", "bpe"],
            "Error: data.source is ./missing, but there is no such file",
        ),
    ],
)
def test_errors_are_one_line_without_a_traceback(arguments, message):
    code, output = osdn(*arguments)
    assert code == 1
    assert message in output


def test_curves_are_centred_means_of_what_was_logged(tmp_path):
    x = np.random.default_rng(0).normal(size=40)
    expected = [x[max(0, i - 3) : i + 4].mean() for i in range(40)]
    np.testing.assert_allclose(rolling_mean(x, 7), expected)
    lines = [{"step": i, "tokens": 10 * i, "loss": None if i == 2 else float(i)} for i in range(1, 5)]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 5, "tok'  # the last line was cut off
    (tmp_path / "metrics.jsonl").write_text(text)
    save_json(tmp_path / "training.json", identity("osdn-tiny").record())
    curve = loss_curve(read_run(tmp_path).lines)
    assert curve.tokens.tolist() == [10, 30, 40]
    assert curve.losses.tolist() == [1, 3, 4]
