"""The whole path, for real: commands in processes, a kill in the middle, and the same numbers twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console

from osdn.reproduction.finished import read_run
from osdn.reproduction.plan import Plan
from osdn.reproduction.profiles import MINUTES
from osdn.reproduction.results import load
from osdn.reproduction.runner import JobError, Layout, Runner

TINIEST = replace(MINUTES, seeds={"osdn": 1}, steps=6, questions=2, books=1, prompts=1)


@pytest.fixture
def runner(tmp_path):
    with (tmp_path / ".lock").open("wb") as lock:
        yield Runner(tmp_path, Console(file=(tmp_path / "said").open("w")), lock)


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)


@pytest.mark.slow
def test_a_killed_run_continues_and_ends_with_a_report(tmp_path):
    command = [sys.executable, "-m", "osdn", "reproduce", "--profile", "minutes", "--output", str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    trained = tmp_path / "runs" / "delta_net" / "seed0" / "training.json"
    wait_for(lambda: trained.exists() and json.loads(trained.read_text())["finished"], 600)
    wait_for(lambda: list(tmp_path.glob("runs/*/seed*/eval")) or first.poll() is not None, 120)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = trained.stat().st_mtime_ns
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert trained.stat().st_mtime_ns == before
    assert "commands" in done.stdout  # the plan with its hours
    content = load(tmp_path)
    assert [(run["model"], run["seed"]) for run in content["runs"]] == MINUTES.runs
    assert all("code_alone" in run["scores"] and "pg19_ppl" in run["scores"] for run in content["runs"])
    assert {len(content["throughput"][model]["changes"]) for model in ("osdn", "osdn-d0")} == {5}
    assert "Main results" in (tmp_path / "report.html").read_text()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "commands" not in again.stdout  # nothing was left to do
    assert load(tmp_path)["runs"] == content["runs"]
    # On another machine there are only the small files.
    for large in ("runs", "books", "tokenizer", "text.jsonl", "throughput.json", "results.json"):
        path = tmp_path / large
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tmp_path / "finished" / "osdn-seed1.json").unlink()
    (tmp_path / "finished" / "throughput.json").unlink()
    elsewhere = subprocess.run(command, capture_output=True, text=True, check=False)
    assert elsewhere.returncode == 0, elsewhere.stdout + elsewhere.stderr
    assert [path.name for path in tmp_path.glob("runs/*/*")] == ["seed1"]
    assert load(tmp_path)["runs"] == content["runs"]
    assert load(tmp_path)["throughput"].keys() == content["throughput"].keys()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(tmp_path):
    results = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        plan = Plan(TINIEST, folder)
        plan.begin()
        with (folder / ".lock").open("wb") as lock:
            commands = Runner(folder, Console(quiet=True), lock)
            commands.run([[plan.vocabulary()]], Layout(1, 1), "vocabulary")
            plan.write_books()
            commands.run(plan.chains("float32"), Layout(1, 1), "runs")
        results.append(read_run(plan.run_folder("osdn", 0), "osdn", 0))
    assert results[0] == results[1]
    assert results[0]["scores"]["validation_loss"] > 0
    assert not list((tmp_path / "a" / "runs").rglob("checkpoint-*"))


@pytest.mark.slow
def test_a_command_that_fails_is_shown_with_what_it_said(tmp_path, runner):
    job = replace(Plan(TINIEST, tmp_path).vocabulary(), arguments=("train", "no/such-config"))
    with pytest.raises(
        JobError, match=r"(?s)`osdn train no/such-config` failed with status 1.*no config no/such"
    ) as e:
        runner.run([[job]], Layout(1, 1), "")
    assert str(tmp_path / "logs") in str(e.value)
    assert json.loads((tmp_path / "jobs.jsonl").read_text())["status"] == 1


def test_stopping_ends_the_commands_and_continuing_does_what_is_left(tmp_path, runner, monkeypatch):
    plan = Plan(TINIEST, tmp_path)
    real = subprocess.Popen
    started = []

    def popen(command, **options):
        started.append(real([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        runner.run([[plan.vocabulary()]], Layout(1, 1), "")
    assert started[0].poll() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
