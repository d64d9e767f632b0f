"""A run that is killed at any moment continues to the same weights, bit for bit."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from osdn.training import checkpoints
from osdn.training.monitor import Metrics
from osdn.training.settings import load_settings
from osdn.training.trainer import train
from tests.training.conftest import CONFIG, start

STEPS = 24
LONG = {"training": CONFIG["training"] | {"steps": STEPS}, "checkpoints": {"every": 2, "keep": 3}}


def weights(run):
    return Path(run, "model", "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """The uninterrupted run."""
    path = tmp_path_factory.mktemp("whole")
    content = {**CONFIG, **LONG, "output_dir": str(path / "run")}
    content["data"] = {"source": str(corpus), **CONFIG["data"]}
    (path / "run.json").write_text(json.dumps(content))
    train(load_settings(path / "run.json"))
    return path / "run"


def wait_for(condition, process):
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"the run ended before it could be stopped:\n{process.stdout.read()}")
        time.sleep(0.0005)


def writing(run):
    return list(run.glob(".writing/checkpoint-*/*"))


def test_a_run_killed_while_writing_a_checkpoint_continues(write_config, whole, tmp_path):
    config, run = write_config("killed", **LONG), tmp_path / "killed"
    process = start(config)
    wait_for(lambda: checkpoints.checkpoints(run) and writing(run), process)
    process.kill()
    process.wait()
    assert not (run / "model").exists()
    assert 2 <= checkpoints.step_of(checkpoints.newest_good(run)) < STEPS
    train(load_settings(config))
    assert weights(run) == weights(whole)
    assert not writing(run)


def test_sigterm_saves_and_exits_and_the_run_continues(write_config, whole, tmp_path):
    config, run = write_config("stopped", **LONG), tmp_path / "stopped"
    process = start(config, "checkpoints.every=1000")
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(Metrics.read(run)) > 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    step = checkpoints.step_of(checkpoints.newest_good(run))
    assert 3 < step < STEPS
    assert f"stopped by SIGTERM; checkpoint-{step} is saved, run the same command to continue" in output
    train(load_settings(config))
    assert weights(run) == weights(whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_repeatedly_at_random_moments_continues(write_config, whole, tmp_path, seed):
    generator = random.Random(seed)
    config, run = write_config("killed", **LONG), tmp_path / "killed"
    kills, done = 0, 0
    while True:
        process = start(config)
        # every fourth kill happens during loading, the others anywhere in the next few steps
        goal = 0 if kills % 4 == 3 else done + generator.randint(1, 7)
        while process.poll() is None and _last_step(run) < goal:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.3))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        for checkpoint in checkpoints.checkpoints(run):
            assert checkpoints.damage(checkpoint) is None
        done = max(map(checkpoints.step_of, checkpoints.checkpoints(run)), default=0)
    assert process.returncode == 0, process.stdout.read()
    assert kills > 2
    assert weights(run) == weights(whole)
    assert [line["step"] for line in Metrics.read(run)] == list(range(1, STEPS + 1))


def _last_step(run):
    lines = Metrics.read(run) if (run / "metrics.jsonl").exists() else []
    return lines[-1]["step"] if lines else 0
