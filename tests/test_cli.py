"""The command line: what it prints, writes and returns."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import osdn
from osdn import OSDNConfig, OSDNForCausalLM, hub
from osdn.analysis.theory import suite
from osdn.cli import app
from osdn.models import checkpoints
from osdn.training.data import load_tokenizer

runner = CliRunner()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model and its tokenizer in the folder `model` of a run."""
    folder = tmp_path_factory.mktemp("run") / "model"
    OSDNForCausalLM(OSDNConfig.from_preset("osdn-tiny", num_hidden_layers=1)).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return str(folder)


def test_zoo_lists_every_row_with_its_state_size():
    result = runner.invoke(app, ["zoo", "--key-dim", "7", "--value-dim", "5", "--slots", "3"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line.split()[-1] for line in result.output.splitlines() if line.strip()}
    assert lines["gla"] == "35"
    assert lines["osdn"] == "42"
    assert lines["gsa"] == "36"
    assert lines["mesa_net"] == "84"


def test_the_zoo_page_is_what_the_command_prints():
    result = runner.invoke(app, ["zoo", "--markdown"])
    page = Path(__file__).parents[1] / "docs" / "zoo.md"
    assert page.read_text() == result.output, "regenerate it: osdn zoo --markdown > docs/zoo.md"


def test_version():
    assert runner.invoke(app, ["--version"]).output == f"osdn {osdn.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["theory"],
        ["demo"],
        ["lab", "recall"],
        ["lab", "text"],
        ["lab", "needle"],
        ["lab", "referee"],
        ["diagnose", "MODEL"],
        ["bench", "throughput", "tiny"],
        ["bench", "ops"],
        ["eval", "MODEL"],
    ],
    ids=" ".join,
)
def test_a_folder_that_cannot_be_created_is_reported_before_the_work(arguments, tmp_path, saved):
    (tmp_path / "file").write_text("")
    command = [saved if word == "MODEL" else word for word in arguments]
    done = runner.invoke(app, [*command, "--output", str(tmp_path / "file" / "inside")])
    assert done.exit_code == 1, done.exception
    assert "cannot create the folder" in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["diagnose", "MODEL", "--device", "nowhere"], "device is 'nowhere', which cannot be used here"),
        (["bench", "throughput", "tiny", "--device", "nowhere"], "device is 'nowhere'"),
        (["theory", "--backend", "gpu"], "backend is 'gpu'"),
        (["theory", "--model", "RUN"], "whose model is"),
        (["diagnose", "RUN"], "it is the folder of a run, whose model is"),
        (["eval", "RUN"], "it is the folder of a run, whose model is"),
        (["diagnose", "no/model"], "no directory no/model, it is not cached, and the hub cannot be reached"),
        (["eval", "no/model"], "no directory no/model, it is not cached, and the hub cannot be reached"),
        (["train", "RUN"], "is a directory; name a config in it"),
        (["lab", "recall", "--width", "9"], "which is not divisible by num_heads = 2"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_mistakes_are_reported_in_one_line(arguments, reason, saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    monkeypatch.setattr(checkpoints, "hub_answers", lambda: False)
    places = {"MODEL": saved, "RUN": str(Path(saved).parent)}
    done = runner.invoke(app, [places.get(word, word) for word in arguments])
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert reason in re.sub(r"[\s│]+", " ", done.output)


@pytest.mark.slow
def test_theory_prints_both_sides_and_writes_report_and_figures(tmp_path):
    result = runner.invoke(app, ["theory", "--output", str(tmp_path), "--problems", "4"])
    assert result.exit_code == 0, result.output
    assert "Theorem 2" in result.output
    assert json.loads((tmp_path / "theory.json").read_text())["passed"]
    assert (tmp_path / "theorem_2.svg").exists()


@pytest.mark.slow
def test_theory_fails_when_a_statement_does(tmp_path, monkeypatch):
    monkeypatch.setattr(suite.Report, "passed", False)
    assert runner.invoke(app, ["theory", "--output", str(tmp_path), "--problems", "2"]).exit_code == 1
