"""Many runs in parallel: one process per core, one thread each, and one file per run.

Tiny tensors do not benefit from threads, and runs are independent.  A single thread also makes results
independent of how many runs there are.  A finished run is a file named by a hash of its settings, so a
restart only runs what is missing.  Contests have thousands of runs, and pack them into one file in the end.
"""

import gzip
import hashlib
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from queue import Empty
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from osdn.lab.training import Run, execute
from osdn.ops import available_backends
from osdn.results.store import save_json

REPORT_EVERY = 5  # steps between messages from a worker
PACKED = "runs.jsonl.gz"  # finished runs, a line each: the name of the file it was, and its content


def file_of(run: Run, folder: Path) -> Path:
    """The file of a run's result, whether or not it exists yet."""
    settings = json.dumps(run.settings(), sort_keys=True)
    name = re.sub(r"[^a-z0-9.+]+", "-", run.variant.label)
    return folder / f"{name}-seed{run.seed}-{hashlib.sha256(settings.encode()).hexdigest()[:10]}.json"


def is_finished(run: Run, folder: Path) -> bool:
    path = file_of(run, folder)
    return path.exists() or path.name in _packed(folder)


def read_result(run: Run, folder: Path) -> dict[str, Any]:
    """The result of a finished run."""
    path = file_of(run, folder)
    return dict(json.loads(path.read_text()) if path.exists() else _packed(folder)[path.name])


def count_finished(folder: Path) -> int:
    return len({path.name for path in _files(folder)} | _packed(folder).keys())


def pack(folder: Path) -> None:
    """Put all finished runs of a folder into one file."""
    files = _files(folder)
    runs = _packed(folder) | {path.name: json.loads(path.read_text()) for path in files}
    partial = folder / f".{PACKED}"
    with gzip.GzipFile(partial, "wb", mtime=0) as file:  # without a date, the same runs are the same bytes
        file.writelines(f"{json.dumps(entry)}\n".encode() for entry in sorted(runs.items()))
    partial.replace(folder / PACKED)
    for path in files:
        path.unlink()


def _files(folder: Path) -> list[Path]:
    return list(folder.glob("*-seed*.json"))


def _packed(folder: Path) -> dict[str, Any]:
    """The content of the packed runs, by the names of their files."""
    path = folder / PACKED
    return _read_packed(path, path.stat().st_mtime_ns) if path.exists() else {}


@lru_cache(maxsize=1)
def _read_packed(path: Path, changed: int) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return dict(map(json.loads, file))


def progress_bar(console: Console) -> Progress:
    """A progress bar with a known total, measured in tokens, which all experiments share."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[live]}"),
        console=console,
    )


def cost(run: Run) -> int:
    """How much a run adds to the progress bar."""
    return run.updates * run.batch * run.task.length


def run_all(
    runs: Sequence[Run], folder: Path, progress: Progress, bar: Any, jobs: int | None = None
) -> list[dict[str, Any]]:
    """The results of `runs`, in order; finished ones are read from `folder`."""
    missing = []
    for run in runs:
        if is_finished(run, folder):
            progress.advance(bar, cost(run))
        else:
            missing.append(run)
    if missing:
        available_backends()  # compile the kernels here once instead of in every worker
        _run_in_processes(missing, folder, progress, bar, min(jobs or os.cpu_count() or 1, len(missing)))
    return [read_result(run, folder) for run in runs]


def _run_in_processes(runs: Sequence[Run], folder: Path, progress: Progress, bar: Any, jobs: int) -> None:
    # A child forked from a process that has used OpenMP may hang.  The fork server has only done imports,
    # once for all workers, so the workers it forks are clean.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "osdn.lab.text"])
    messages, stop = context.Queue(), context.RawValue("b", 0)  # no lock, which a killed worker could hold
    pool = ProcessPoolExecutor(jobs, context, _start_worker, (messages, stop))
    # Limiting OpenMP to one thread before it loads is a fifth cheaper than doing so later.
    environment = patch.dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    try:
        with environment:  # the server starts with the first run and stays alive
            waiting: set[Future[None]] = {pool.submit(_work, run, folder) for run in runs}
        while waiting or not messages.empty():
            try:
                label, share, live = messages.get(timeout=0.1)
                progress.update(bar, advance=share, live=f"{label}: {live}")
            except Empty:
                pass
            for future in [f for f in waiting if f.done()]:
                future.result()  # re-raises the run's exception
                waiting.remove(future)
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


def _start_worker(messages: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group; only the parent reports it
    torch.set_num_threads(1)
    _worker.update(messages=messages, stop=stop)


_worker: dict[str, Any] = {}


def _work(run: Run, folder: Path) -> None:
    label, step, reported = f"{run.variant.label}, seed {run.seed}", 0, 0

    def on_step(loss: float, accuracy: float) -> None:
        nonlocal step, reported
        if _worker["stop"].value:
            raise SystemExit
        step += 1
        if step % REPORT_EVERY == 0 or step == run.updates:
            share = cost(run) * (step - reported) / run.updates
            reported = step
            _worker["messages"].put((label, share, f"loss {loss:.2f}, accuracy {accuracy:.2f}"))

    save_json(file_of(run, folder), execute(run, on_step))
