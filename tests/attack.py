"""Attacks on the whole project for a given number of minutes: `make attack MINUTES=5`.

A trial kills a training run or an evaluation at some moment, damages checkpoints or result files, plants
files that would run code, feeds nonsense to the readers of data, or compares operators with the float64
reference.  It passes if nothing is lost, no planted code is run, and every failure is a clear message.  Each
trial prints its seed; `python -m tests.attack --replay KIND SEED` repeats it (the seed also fixes when a kill
happens, but not what the process is doing at that moment).
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see tests/conftest.py

import argparse
import io
import json
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cached_property
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import datasets
import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given
from transformers.utils.logging import disable_progress_bar
from typer.testing import CliRunner

from osdn.cli import app
from osdn.training import checkpoints
from osdn.training.data import load_source, load_tokenizer
from osdn.training.monitor import Metrics
from osdn.training.packing import PackedRows, Pieces
from osdn.training.settings import RunSettings, load_settings
from osdn.training.trainer import train
from tests.evaluation.mirror import save_osdn, write_mirror
from tests.ops.test_agreement import BOXES, OPERATORS, TAME, all_agree, configs
from tests.training.conftest import CONFIG, start
from tests.training.hostile import poison, sign
from tests.training.test_checkpoints import make as make_checkpoint

STEPS, KEPT = 12, 5
SUITE = "retrieval"
RESUMED = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
SHARDED = tuple(
    f"{folder}/{file}"
    for folder in (checkpoints.SHARDS, checkpoints.OPTIMIZER_SHARDS)
    for file in (".metadata", "__0_0.distcp")
)


class Arena:
    """A folder with a finished run and a finished evaluation, which trials copy before damaging them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, list[Path]()
        datasets.config.HF_DATASETS_CACHE = folder / "datasets"
        os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")  # for the processes that trials start
        datasets.disable_progress_bars()
        disable_progress_bar()
        logging.disable(logging.CRITICAL)
        torch.set_num_threads(1)  # as in these processes, for the same order of summation

    def place(self) -> Path:
        """An empty folder for a trial."""
        self.places.append(Path(tempfile.mkdtemp(dir=self.folder)))
        return self.places[-1]

    def clear(self) -> None:
        while self.places:
            shutil.rmtree(self.places.pop())

    @cached_property
    def corpus(self) -> Path:
        words = Random(0)
        texts = ["".join(words.choices("abcdefgh ", k=words.randint(1, 400))) for _ in range(60)]
        path = self.folder / "corpus.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    def config(self, run: Path) -> Path:
        """A config for a run in this folder."""
        content = {
            **CONFIG,
            "output_dir": str(run),
            "data": {"source": str(self.corpus), **CONFIG["data"]},
            "training": {**CONFIG["training"], "steps": STEPS},
            "checkpoints": {"every": 1, "keep": KEPT},
        }
        path = run.with_suffix(".json")
        path.write_text(json.dumps(content))
        return path

    def settings(self, run: Path) -> RunSettings:
        return load_settings(self.config(run))

    @cached_property
    def whole(self) -> Path:
        """A run that was not attacked."""
        run = self.folder / "whole"
        quietly(train, self.settings(run))
        return run

    def interrupted(self, place: Path, lost: int) -> Path:
        """A copy of the run without its result and its last checkpoints."""
        run: Path = shutil.copytree(self.whole, place / "run")
        shutil.rmtree(run / "model")
        for checkpoint in checkpoints.checkpoints(run)[:lost]:
            shutil.rmtree(checkpoint)
        Metrics.forget(run, after=last_step(run))
        return run

    @cached_property
    def model(self) -> str:
        return save_osdn(self.folder / "evaluated")

    @cached_property
    def mirror(self) -> Path:
        return write_mirror(self.folder / "mirror")

    @cached_property
    def evaluated(self) -> Path:
        """The results of an evaluation that was not attacked."""
        output = self.folder / "results"
        done = osdn(*self.evaluation(output))
        assert done.exit_code == 0, done.output
        return output

    def evaluation(self, output: Path) -> list[str]:
        return ["eval", self.model, "--suite", SUITE, "--data-dir", str(self.mirror), "--output", str(output)]


def kill_training(draw: Random, arena: Arena) -> str:
    run = arena.interrupted(arena.place(), lost=draw.randint(1, KEPT))
    began = last_step(run)
    goal = draw.randint(began, STEPS - 1)  # where it began: while it is loading
    process = start(arena.config(run))
    wait(lambda: Metrics.read(run)[goal:] != [], process, draw.uniform(1, 5) if goal == began else 60)
    time.sleep(draw.uniform(0, 0.1))
    kill(process)
    for checkpoint in checkpoints.checkpoints(run):
        assert checkpoints.damage(checkpoint) is None, checkpoint
    reached = last_step(run)
    quietly(train, arena.settings(run))
    same_run(run, arena.whole)
    return f"from step {began} to {reached} of {STEPS}, killed, same weights"


def kill_evaluation(draw: Random, arena: Arena) -> str:
    output, tasks = arena.place() / "results", draw.randint(0, 2)
    want = scores(arena.evaluated)
    process = subprocess.Popen(
        [sys.executable, "-m", "osdn", *arena.evaluation(output)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    file = output / f"{SUITE}.json"
    wait(lambda: file.exists() and len(scores(output)) > tasks, process, draw.uniform(1, 60))
    time.sleep(draw.uniform(0, 0.5))
    kill(process)
    done = scores(output) if file.exists() else {}
    assert done.items() <= want.items()
    again = osdn(*arena.evaluation(output))
    assert again.exit_code == 0, again.output
    assert scores(output) == want
    return f"killed after {len(done)} tasks, same scores"


def damage_checkpoints(draw: Random, arena: Arena) -> str:
    run = arena.interrupted(arena.place(), lost=0)
    victims = draw.sample(checkpoints.checkpoints(run), draw.randint(1, KEPT))
    how = [
        damage(draw, draw.choice([path for path in victim.rglob("*") if path.is_file()]))
        for victim in victims
    ]
    good = [path for path in checkpoints.checkpoints(run) if checkpoints.damage(path) is None]
    before = {path.name for path in checkpoints.checkpoints(run)}
    if not good:
        with pytest.raises(ValueError, match="every checkpoint"):
            quietly(train, arena.settings(run))
        assert before == {path.name for path in checkpoints.checkpoints(run)}
        return f"{', '.join(how)}; none left, reported"
    quietly(train, arena.settings(run))
    same_run(run, arena.whole)
    aside = {path.name.removeprefix("damaged-") for path in run.glob("damaged-*")}
    assert aside == {name for name in before if int(name.partition("-")[2]) > checkpoints.step_of(good[0])}
    return f"{', '.join(how)}; {len(aside)} set aside, same weights"


def damage_results(draw: Random, arena: Arena) -> str:
    output = shutil.copytree(arena.evaluated, arena.place() / "results")
    file = output / f"{SUITE}.json"
    if draw.random() < 0.5:
        how = damage(draw, file, kinds=("cut", "empty", "zeros", "noise"))
    else:
        content = json.loads(file.read_text())
        part = draw.choice([content, content["tasks"], *content["tasks"].values()])
        key = draw.choice(list(part))
        if draw.random() < 0.5:
            how = f"{key} removed"
            del part[key]
        else:
            how = f"{key} replaced"
            part[key] = draw.choice([None, 3, "x", [], {}])
        file.write_text(json.dumps(content))
    before = file.read_bytes()
    done = osdn(*arena.evaluation(output))
    if done.exit_code == 0:
        assert scores(output) == scores(arena.evaluated)
        return f"{how}; same scores"
    sentence(done)
    assert file.read_bytes() == before
    return f"{how}; reported"


def plant_code(draw: Random, arena: Arena) -> str:
    place = arena.place()
    proof = place / "proof"
    if draw.random() < 0.5:
        file, run = draw.choice(RESUMED), arena.interrupted(place, lost=1)
        newest = checkpoints.checkpoints(run)[0]
        poison(newest / file, proof)
        sign(newest)
        quietly(train, arena.settings(run))
        same_run(run, arena.whole)
    else:
        file = draw.choice(SHARDED)
        checkpoint = make_checkpoint(place, 1)
        poison(checkpoint / file, proof)
        sign(checkpoint)
        done = osdn("convert", str(checkpoint), str(place / "model"))
        assert done.exit_code == 1
        sentence(done)
    assert not proof.exists(), "code from a file was run"
    return f"{file}; not run"


def feed_nonsense(draw: Random, arena: Arena) -> str:
    """Malformed data is either read or rejected with a clear message."""
    values = ["text", "\x1b[2J", "", None, 3, 0.5, True, ["a"], {"a": 1}, "🎈" * 9, "\u202e", "\x00"]
    name = draw.choice(["text", "text", "text", "body", "\x1b]0;x\x07"])
    lines = [json.dumps({name: draw.choice(values)}) for _ in range(draw.randint(0, 6))]
    content = "\n".join(lines).encode()
    if draw.random() < 0.3:
        content = content[: draw.randint(0, len(content))] + draw.randbytes(draw.randint(0, 3))
    path = arena.place() / f"\x1b[31m{draw.choice(['a.jsonl', 'a.json', 'a.txt', 'a.parquet'])}"
    path.write_bytes(content)
    try:
        data = load_source(str(path), streaming=draw.random() < 0.5)
        next(iter(PackedRows(Pieces(data, load_tokenizer("bytes"), 9, 0), 4)))
    except (ValueError, OSError) as error:
        done = osdn("tokenizer", "train", str(path), str(arena.place() / "bpe"), "--vocab-size", "300")
        if done.exit_code:
            sentence(done)
        return f"{path.suffix[1:]} of {len(content)} bytes rejected ({type(error).__name__})"
    return f"{path.suffix[1:]} of {len(content)} bytes read"


def compare_operators(draw: Random, arena: Arena) -> str:
    operator, count = draw.choice(OPERATORS), 5

    @hypothesis.seed(draw.getrandbits(32))
    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(config=configs(TAME, [*BOXES, None]))
    def check(config: Any) -> None:
        all_agree(operator, config, torch.float32)

    check()
    return f"{count} configurations of {operator.__name__} agree"


ATTACKS: dict[str, Callable[[Random, Arena], str]] = {
    attack.__name__: attack
    for attack in (
        kill_training,
        kill_evaluation,
        damage_checkpoints,
        damage_results,
        plant_code,
        feed_nonsense,
        compare_operators,
    )
}


def damage(
    draw: Random, file: Path, kinds: tuple[str, ...] = ("flip", "cut", "gone", "empty", "zeros", "noise")
) -> str:
    """Damage a file in one of several ways; a manifest may also lose entries."""
    content, how = bytearray(file.read_bytes()), draw.choice(kinds)
    if file.name == checkpoints.MANIFEST and draw.random() < 0.5:
        how = "shortened"
        listed = json.loads(content)
        file.write_text(
            json.dumps({name: listed[name] for name in draw.sample(list(listed), draw.randint(0, 3))})
        )
    elif how == "gone":
        file.unlink()
    else:
        if how == "flip":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(
            {
                "flip": content,
                "cut": content[: draw.randrange(len(content))],
                "empty": b"",
                "zeros": bytes(len(content)),
                "noise": draw.randbytes(len(content)),
            }[how]
        )
    return f"{file.name} {how}"


def last_step(run: Path) -> int:
    return max(map(checkpoints.step_of, checkpoints.checkpoints(run)), default=0)


def quietly(function: Callable[[Any], Any], argument: Any) -> None:
    """Call the function without its progress output."""
    with redirect_stderr(io.StringIO()):
        function(argument)


def osdn(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def sentence(done: Any) -> None:
    """Check that a command failed properly: an exit code, a clear message, no control characters."""
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert "Error:" in done.output, done.output
    assert not set(done.output) & {"\x1b", "\x07", "\x00"}, done.output


def scores(output: Path) -> dict[str, Any]:
    """The results by task."""
    content = json.loads((output / f"{SUITE}.json").read_text())
    return {name: json.dumps(task["results"]) for name, task in content["tasks"].items()}


def same_run(run: Path, whole: Path) -> None:
    for name in ("model/model.safetensors", f"checkpoint-{STEPS}/optimizer.pt"):
        if (run / name).exists() or name.startswith("model"):
            assert (run / name).read_bytes() == (whole / name).read_bytes(), f"{name} differs"
    assert [line["step"] for line in Metrics.read(run)] == list(range(1, STEPS + 1))


def wait(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float) -> None:
    """Wait until the condition holds, the process ends, or time is up."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end and not condition():
        time.sleep(0.002)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode in (0, -signal.SIGKILL), process.stdout and process.stdout.read()


def trial(kind: str, seed: int, arena: Arena) -> bool:
    began = time.monotonic()
    try:
        outcome, survived = ATTACKS[kind](Random(seed), arena), True
    except (Exception, SystemExit) as error:
        outcome, survived = f"FAILED: {error!r:.300}", False
        traceback.print_exc()
    arena.clear()
    print(f"{time.monotonic() - began:6.1f} s  {kind:18}  {seed:10}  {outcome}", flush=True)
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5, help="how long to run")
    parser.add_argument("--seed", type=int, help="seed of the trials' seeds; from the clock if not given")
    parser.add_argument("--only", choices=ATTACKS, action="append", help="kinds to try; all if not given")
    parser.add_argument("--replay", nargs=2, metavar=("KIND", "SEED"), help="repeat one trial")
    arguments = parser.parse_args()
    seed = SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    end, draw = time.monotonic() + 60 * arguments.minutes, Random(seed)
    kinds = arguments.only or list(ATTACKS)
    tried, survived = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        arena = Arena(Path(folder))
        if arguments.replay:
            kind, number = arguments.replay
            return 0 if trial(kind, int(number), arena) else 1
        print(f"seed {seed}, {arguments.minutes:g} minutes", flush=True)
        while time.monotonic() < end:
            for kind in draw.sample(kinds, len(kinds)):
                if time.monotonic() < end:
                    tried[kind] += 1
                    survived[kind] += trial(kind, draw.getrandbits(32), arena)
    print("\n".join(f"{kind:18}  {survived[kind]} of {n} survived" for kind, n in sorted(tried.items())))
    return 0 if tried == survived else 1


if __name__ == "__main__":
    sys.exit(main())
