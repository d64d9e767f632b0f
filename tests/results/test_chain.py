"""The whole chain of commands: train, evaluate, diagnose, time, report."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from osdn import hub
from osdn.cli import app
from osdn.results.store import read_results
from tests.evaluation.mirror import write_mirror
from tests.results.test_report import Cells

RUNS = {"delta_net": "delta_net-tiny", "osdn": "osdn-tiny", "osdn-d0": "osdn-d0-tiny"}
LABELS = ("DeltaNet tiny", "OSDN tiny", "OSDN+D0 tiny")
SHORT = ["training.steps=2", "data.seq_len=256", "training.tokens_per_step=256", "data.context_len=128"]
SHORT += ["checkpoints.every=2", "logging.every=1", "validation.tokens=256"]
SHORT += ["data.split='train[:1]'", "validation.split='train[1:]'"]


def osdn(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Two models and an ablation, through every command; two limits and two data sources."""
    folder = tmp_path_factory.mktemp("chain")
    mirror, other = write_mirror(folder / "mirror"), write_mirror(folder / "other", rows=4)
    books = folder / "books"
    books.mkdir()
    for name in ("a.txt", "b.txt"):
        (books / name).write_text(f"{name}: " + "one two three four five " * 1200)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small lose more to synchronisation than they gain from threads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.chdir(folder)
        for config in RUNS:
            osdn("train", f"tiny/{config}", f"data.source={books}", *SHORT)
            model = f"runs/tiny/{config}/model"
            osdn("eval", model, "--suite", "recall", "--data-dir", mirror)
            osdn("diagnose", model, "--count", 2, "--length", 64)
        model = "runs/tiny/osdn/model"
        osdn("eval", model, "--suite", "recall", "--data-dir", mirror, "--limit", 2, "--output", "runs/limit")
        osdn("eval", model, "--suite", "recall", "--data-dir", other, "--output", "runs/other")
        osdn("eval", model, "--suite", "pg19", "--books", books, "--output", "runs/books")
        models = [f"runs/tiny/{config}/model" for config in RUNS]
        osdn("bench", "throughput", *models, "--prefill", 32, "--decode", 2)
        osdn("report", "runs")
        printed = osdn("compare", "runs")
    torch.set_num_threads(threads)
    return folder, printed


def test_every_model_has_one_label(chain):
    folder, _ = chain
    store = read_results([folder / "runs"])
    assert store.unreadable == {}
    assert [model.model for model in store.models()] == list(RUNS.values())
    assert {path.name for path in (folder / "runs/diagnose").iterdir()} == set(RUNS.values())
    assert {path.name for path in (folder / "runs/eval").iterdir()} == set(RUNS.values())


def test_the_report_shows_the_values_in_the_files(chain):
    folder, _ = chain
    page = Cells((folder / "runs/report.html").read_text())
    for config, label in zip(RUNS, LABELS):
        saved = json.loads((folder / f"runs/eval/{RUNS[config]}/recall.json").read_text())["results"]
        shown = page.row_of("In-context recall", label)
        for head, key in (("FDA ↑", "fda"), ("SQuAD twice ↑", "squad_twice"), ("overall ↑", "recall")):
            assert shown[head] == f"{saved[key]:.3f}"
        trained = json.loads((folder / f"runs/tiny/{config}/training.json").read_text())
        losses = [f"{trained[key]:.3f}" for key in ("final_loss", "validation_loss")]
        assert page.tables["Training loss"][label][:2] == losses
        diagnosis = json.loads((folder / f"runs/diagnose/{RUNS[config]}/diagnosis.json").read_text())
        title = next(title for title in page.tables if title.startswith("Mechanism diagnostic"))
        assert page.tables[title][label][0] == f"{diagnosis['all']['q_geo']['value']:.3f}"
    timed = json.loads((folder / "runs/bench/throughput.json").read_text())["rows"]
    assert [row["model"] for row in timed] == list(RUNS.values())
    for row, label in zip(timed, LABELS):
        shown = page.tables["Inference throughput (prefill 32, decode 2)"][label]
        assert shown[0] == f"{row['tokens_per_second']:,.1f}"
    assert set(page.tables["Ablations"]) == set(LABELS)
    assert page.row_of("Ablations", "OSDN+D0 tiny")["Δ loss ↓"] != "–"


def test_results_with_another_limit_or_other_data_stay_separate(chain):
    folder, _ = chain
    text = (folder / "runs/report.html").read_text()
    full = json.loads((folder / "runs/eval/osdn-tiny/recall.json").read_text())
    limited = json.loads((folder / "runs/limit/recall.json").read_text())
    assert limited["tasks"]["fda"]["data"]["documents"] == 2
    page = Cells(text)
    other = json.loads((folder / "runs/other/recall.json").read_text())
    shown = page.row_of("In-context recall", "OSDN tiny")
    assert shown["FDA ↑"] == f"{full['results']['fda']:.3f}"
    assert shown["FDA (2) ↑"] == f"{other['results']['fda']:.3f}"  # four documents instead of three
    assert page.row_of("In-context recall", "DeltaNet tiny")["FDA (2) ↑"] == "–"
    shown = page.row_of("In-context recall (limit 2)", "OSDN tiny")
    assert shown["FDA ↑"] == f"{limited['results']['fda']:.3f}"
    assert re.search(r"FDA \(2\), FDA twice \(2\): [^.]*4 documents", text)
    assert f"{folder / 'books'}" in page.tables["What was read"]["books/pg19.json"][1]


def test_compare_prints_the_same_numbers_as_the_report(chain):
    folder, printed = chain
    tables = Cells((folder / "runs/report.html").read_text()).tables
    for label in LABELS:
        assert set(tables["In-context recall"][label]) <= set(printed.split())


def test_the_diagnosis_of_another_model_with_the_same_name_is_not_replaced(chain, monkeypatch):
    folder, _ = chain
    monkeypatch.chdir(folder)
    options = ["--name", "osdn-d0-tiny", "--count", "1", "--length", "32"]
    done = CliRunner().invoke(app, ["diagnose", "runs/tiny/osdn/model", *options])
    assert done.exit_code == 1
    assert "same name and other weights" in done.output
