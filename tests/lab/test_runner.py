"""Files, resuming and interrupting many runs."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from osdn.cli import app
from osdn.lab import runner, summary
from osdn.lab.recall import RecallTask
from osdn.lab.text import TextTask
from osdn.lab.training import Run, execute
from osdn.lab.variants import Variant

TASK = RecallTask(vocab_size=24, pairs=3, length=21, passes=2, evaluation=7)
VARIANTS = [Variant("delta_net"), Variant("osdn", eta=0.1)]
RUNS = [Run(TASK, v, seed, width=16, steps=3, batch=2) for v in VARIANTS for seed in range(2)]
COMMAND = [
    "lab",
    "recall",
    "--vocab-size",
    "24",
    "--pairs",
    "3",
    "--length",
    "21",
    "--width",
    "16",
    "--batch",
    "2",
]


def run_all(folder):
    with runner.progress_bar(Console(quiet=True)) as progress:
        bar = progress.add_task("", total=sum(map(runner.cost, RUNS)), live="")
        return runner.run_all(RUNS, folder, progress, bar, jobs=2), progress.tasks[0]


def test_each_run_is_done_once_and_agrees_with_one_in_this_process(tmp_path, monkeypatch):
    first, task = run_all(tmp_path)
    assert task.completed == pytest.approx(task.total)
    here = execute(RUNS[3])
    assert first[3]["log_q"] == pytest.approx(here["log_q"], rel=1e-6)
    assert first[3]["settings"] == json.loads(json.dumps(here["settings"]))

    lost = runner.file_of(RUNS[1], tmp_path)
    lost.unlink()
    done = []
    monkeypatch.setattr(
        runner, "_run_in_processes", lambda runs, *_: done.extend(runs) or lost.write_text("{}")
    )
    again, task = run_all(tmp_path)
    assert done == [RUNS[1]]
    assert again[0] == first[0]
    assert again[2:] == first[2:]


def test_packed_runs_are_read_and_more_can_be_packed(tmp_path, monkeypatch):
    first, _ = run_all(tmp_path)
    lost = runner.file_of(RUNS[1], tmp_path)
    result = json.loads(lost.read_text())
    lost.unlink()
    runner.pack(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [runner.PACKED]
    assert [runner.is_finished(run, tmp_path) for run in RUNS] == [True, False, True, True]
    lost.write_text(json.dumps(result))
    assert runner.count_finished(tmp_path) == 4
    runner.pack(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [runner.PACKED]
    monkeypatch.setattr(runner, "_run_in_processes", None)  # nothing is left to run
    assert run_all(tmp_path)[0] == first


def test_every_setting_changes_the_file_name(tmp_path):
    run = RUNS[0]
    others = [
        replace(run, seed=1), replace(run, steps=4), replace(run, width=32), replace(run, learning_rate=1e-4),
        replace(run, variant=Variant("osdn")), replace(run, variant=Variant("osdn", eta=0.1)),
        replace(run, variant=Variant("osdn", bounds=(0.25, 4.0))), replace(run, task=replace(TASK, pairs=2)),
    ]  # fmt: skip
    names = {runner.file_of(r, tmp_path) for r in [run, *others]}
    assert len(names) == 1 + len(others)
    assert runner.file_of(replace(run), tmp_path) in names


def test_the_place_of_a_corpus_does_not_change_the_file_name(tmp_path):
    here, there = (replace(RUNS[0], task=TextTask(folder)) for folder in ("a/corpus", "b/corpus"))
    assert runner.file_of(here, tmp_path) == runner.file_of(there, tmp_path)
    longer = replace(here, task=TextTask("a/corpus", length=64))
    assert runner.file_of(here, tmp_path) != runner.file_of(longer, tmp_path)


def test_summaries_pair_seeds_with_the_baseline_of_the_backbone(tmp_path):
    variants = [Variant("gdn"), Variant("osdn"), Variant("delta_net")]
    values = [[0.1, 0.2], [0.6, 0.9], [0.5, 0.7]]
    settings = {"steps": 2, "width": 8, "task": {"length": 4}}
    results = summary.group(
        variants, [{"x": v, "settings": {"seed": i, **settings}} for m in values for i, v in enumerate(m)]
    )
    rows = {row.variant: row for row in summary.summarize(results, ["x"])}
    assert rows["osdn"].baseline == "delta_net"
    assert rows["osdn"].difference.mean == pytest.approx(0.15)
    assert rows["gdn"].difference is None
    summary.write(results, list(rows.values()), tmp_path, "recall")
    lines = (tmp_path / "summary.csv").read_text().splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("osdn,x,2,0.75,")
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 7


def test_the_command_sweeps_and_writes_tables_and_figures(tmp_path):
    options = ["--variants", "delta_net", "osdn", "gla", "--eta", "0.01", "0.1"]
    options += ["--steps", "2", "--seeds", "2"]
    result = CliRunner().invoke(app, [*COMMAND, *options, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    names = {path.name for path in tmp_path.iterdir()}
    assert {
        "summary.json",
        "summary.csv",
        "runs.csv",
        "accuracy.svg",
        "residual.png",
        "eta_q_geo.svg",
    } <= names
    assert sum(name.endswith(".json") for name in names) == 1 + 4 * 2
    variants = {row["variant"] for row in json.loads((tmp_path / "summary.json").read_text())["rows"]}
    assert variants == {"delta_net", "osdn eta=0.01", "osdn eta=0.1", "gla"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--variants", "osdm"], "osdm"),
        (["--box", "2"], "box"),
        (["--box", "2:0.5"], "bounds"),
        (["--eta", "-1"], "eta"),
        (["--length", "12"], "length"),
    ],
)
def test_bad_options_give_helpful_errors(options, word):
    result = CliRunner().invoke(app, [*COMMAND, *options])
    assert result.exit_code == 2
    assert word in result.output


@pytest.mark.slow
def test_an_interrupted_experiment_keeps_its_finished_runs_and_continues(tmp_path):
    options = [*COMMAND, "--steps", "150", "--seeds", "3", "--jobs", "1", "--variants", "osdn"]
    command = [sys.executable, "-m", "osdn", *options, "--output", str(tmp_path)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not list(tmp_path.glob("osdn-seed0-*.json")) and time.time() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) != 0
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("osdn-seed*.json")}
    assert 1 <= len(finished) < 3
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    assert len(list(tmp_path.glob("osdn-seed*.json"))) == 3
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in finished.items())
