"""Runs the plan: processes side by side, files as the only state, and hours that are known beforehand.

A few real steps are trained first, in one process with all cores and in one process per core, to choose the
faster layout and precision and to estimate the hours.  The choice is written down: started again, the same
command uses it, so that all runs of a reproduction are computed alike.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from osdn.reproduction.finished import save_finished, save_speeds
from osdn.reproduction.plan import Job, Plan, cost_key
from osdn.reproduction.profiles import baseline_of
from osdn.results.store import environment, save_json
from osdn.results.tables import Cell, Row, Table
from osdn.terminal import printable
from osdn.training.monitor import Metrics

MACHINE, JOURNAL = "machine.json", "jobs.jsonl"
PATIENCE = 60  # seconds that a stopped command may take to save its work
BUSY = 0.5  # load from which on we warn
SAID = 12  # lines of a failed command that are shown
# On Linux a command gets SIGTERM when this process dies, however that happens.
LINKED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, [sys.executable, "
    "*sys.argv[1:]])"
)


class JobError(RuntimeError):
    """A command failed; the message has the end of what it printed."""


@dataclass(frozen=True)
class Layout:
    """How the cores are shared out."""

    processes: int
    threads: int  # of each process

    def __str__(self) -> str:
        return f"{self.processes} × {self.threads} thread{'s' * (self.threads > 1)}"


@dataclass(frozen=True)
class Machine:
    """What was chosen, and the measurements behind it."""

    layout: Layout
    precision: str
    trials: list[dict[str, Any]]  # layout, precision and tokens per second of all processes together
    seconds: dict[str, float]  # that a command takes, by `cost_key`
    cpu: str  # of the machine on which all of this was measured

    def __str__(self) -> str:
        rates = [f"{t['tokens_per_second']:,.0f} as {t['layout']} in {t['precision']}" for t in self.trials]
        return f"{self.layout} in {self.precision}; tokens per second: {', '.join(rates)}"

    def expected(self, job: Job) -> float:
        """Seconds that a job still takes."""
        return self.seconds[cost_key(job)] * (1 - job.share())


def reproduce(plan: Plan, console: Console, show: Callable[[Table], None]) -> None:
    """Run what is missing of a plan."""
    with _alone(plan.folder, console) as lock:
        plan.begin()
        runner = Runner(plan.folder, console, lock)
        cores = Layout(1, _cores())
        runner.run([[plan.vocabulary()]], cores, "vocabulary")
        plan.write_books()
        machine = measure(plan, runner)
        save_finished(plan, machine.precision)
        chains, timing = plan.chains(machine.precision), plan.throughput(machine.precision)
        if missing := [job for chain in (*chains, timing) for job in chain if not job.is_done()]:
            show(plan_table(plan, machine, missing))
            console.print(f"{escape(str(machine))}\nstop at any time; the same command continues")
        save = partial(save_finished, plan, machine.precision)
        runner.run(chains, machine.layout, plan.profile.name, machine.expected, save)
        runner.run([timing], cores, "throughput", machine.expected)
        save_speeds(plan)


def plan_table(plan: Plan, machine: Machine, jobs: Sequence[Job]) -> Table:
    """What will be run, and how long it takes."""
    p, rows, total = plan.profile, [], 0.0
    for key, number in Counter(map(cost_key, jobs)).items():
        processes = 1 if key == "time" else machine.layout.processes
        hours = sum(machine.expected(job) for job in jobs if cost_key(job) == key) / processes / 3600
        total += hours
        cells = (f"{number}", f"{machine.seconds[key]:,.0f}", f"{hours:.2f}")
        rows.append(Row(key, [Cell(text) for text in cells]))
    rows.append(Row("all", [Cell(f"{len(jobs)}"), Cell(""), Cell(f"{total:.2f}", best=True)], rule=True))
    same = machine.cpu == environment()["machine"]["cpu"]
    where = "this machine" if same else f"another machine ({machine.cpu}), where this folder was begun"
    note = (
        f"{len(p.runs)} runs of {p.tokens / 1e6:.2f} million tokens, layers × width {p.layers} × {p.width}. "
        f"Estimated from {p.measured_steps} steps per backbone and one evaluation on {where}."
    )
    return Table(f"What is left of {p.name}", ["commands", "seconds each", "hours"], rows, note)


def measure(plan: Plan, runner: "Runner") -> Machine:
    """The choice for this folder, from its file or else from short runs."""
    path = plan.folder / MACHINE
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        return _machine(saved)
    if (load := os.getloadavg()[0]) > BUSY:
        runner.console.print(f"the machine is busy (load {load:.1f}): estimates and timings will suffer")
    p, cores, folder = plan.profile, _cores(), plan.folder / "measure"
    shutil.rmtree(folder, ignore_errors=True)
    first = next(iter(p.seeds))
    # All cores in one process first: it also prepares the data, which two at once would do twice.
    layouts = [Layout(1, cores), *([Layout(cores, 1)] if cores > 1 else [])]
    trials = [_trial(plan, runner, first, layout, p.precisions[0]) for layout in layouts]
    layout = layouts[trials.index(max(trials, key=_rate))]
    trials += [_trial(plan, runner, first, layout, precision) for precision in p.precisions[1:]]
    best = max(trials, key=_rate)
    start = min(trial.pop("start_seconds") for trial in trials)
    seconds = {"make": start}  # a model with a step of training
    blocks = {baseline_of(model): model for model in reversed(p.seeds)}  # the first model of each
    for plain, model in blocks.items():
        known = best if model == first else _trial(plan, runner, model, layout, best["precision"])
        seconds[f"train {plain}"] = start + p.tokens * layout.processes / _rate(known)
    copies = [_trial_folder(plan, best, i) for i in range(layout.processes)]
    timed = runner.run([plan.evaluations(first, 0, copy) for copy in copies], layout, "trial evaluation")
    for kind in ("evaluate", "diagnose"):
        seconds[kind] = max(t for job, t in timed if job.kind == kind)
    [(_, t)] = runner.run([[plan.timing(copies[:1], copies[0])]], Layout(1, cores), "trial timing")
    seconds["time"] = t * len(p.seeds)
    shutil.rmtree(folder)
    content = {"layout": asdict(layout), "precision": best["precision"], "trials": trials, "seconds": seconds}
    save_json(path, {"kind": "reproduction-machine", **content})
    return _machine(json.loads(path.read_text(encoding="utf-8")))


def _machine(saved: dict[str, Any]) -> Machine:
    fields = {name: saved[name] for name in ("precision", "trials", "seconds")}
    return Machine(layout=Layout(**saved["layout"]), cpu=saved["machine"]["cpu"], **fields)


def _trial(plan: Plan, runner: "Runner", model: str, layout: Layout, precision: str) -> dict[str, Any]:
    """Train a few steps in every process at once."""
    p, trial = plan.profile, {"model": model, "layout": str(layout), "precision": precision}
    folders = [_trial_folder(plan, trial, i) for i in range(layout.processes)]
    few = (f"validation.tokens={p.seq_len}", "logging.every=1")
    jobs = [plan.training(model, 0, precision, run, *few, steps=p.measured_steps) for run in folders]
    seconds = dict(runner.run([[job] for job in jobs], layout, f"trial: {model}, {layout}, {precision}"))
    rates, starts = [], []
    for run, job in zip(folders, jobs):
        lines = [line for line in Metrics.read(run) if "tokens_per_second" in line]
        steady = lines[len(lines) // 4 :]  # the first steps are slow
        rates.append(p.tokens_per_step * len(steady) / sum(line["seconds"] for line in steady))
        starts.append(seconds[job] - sum(line["seconds"] for line in lines))
    return {**trial, "tokens_per_second": sum(rates), "start_seconds": min(starts)}


def _trial_folder(plan: Plan, trial: dict[str, Any], copy: int) -> Path:
    layout = trial["layout"].replace(" ", "")
    return plan.folder / "measure" / f"{trial['model']}-{layout}-{trial['precision']}-{copy}"


def _rate(trial: dict[str, Any]) -> float:
    return float(trial["tokens_per_second"])


@dataclass
class Running:
    job: Job
    chain: list[Job]  # what follows it
    process: subprocess.Popen[bytes]
    log: Path
    beside: int  # processes that run at once
    start: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Runner:
    folder: Path
    console: Console
    lock: IO[bytes]  # which commands hold too: it is free when the last of them has ended

    def run(
        self,
        chains: Sequence[Sequence[Job]],
        layout: Layout,
        words: str,
        expected: Callable[[Job], float] = lambda job: 1.0,
        on_end: Callable[[], None] = lambda: None,
    ) -> list[tuple[Job, float]]:
        """Run the jobs that are not done, each chain in order, and return the seconds of each job.

        `on_end` is called at the end of every chain.
        """
        waiting = [[job for job in chain if not job.is_done()] for chain in chains]
        waiting = [chain for chain in waiting if chain]
        if not waiting:
            return []
        left = {job: expected(job) for chain in waiting for job in chain}
        running: list[Running] = []
        timed: list[tuple[Job, float]] = []
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        bar = Progress(
            *columns,
            TextColumn("{task.fields[live]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with bar, _stoppable() as stop_if_asked:
            total = sum(left.values())
            task = bar.add_task(words, total=total, live="")
            try:
                while waiting or running:
                    while waiting and len(running) < layout.processes:
                        running.append(self._start(waiting.pop(0), layout))
                    time.sleep(0.2)
                    stop_if_asked()
                    for command in [command for command in running if command.process.poll() is not None]:
                        running.remove(command)
                        timed.append((command.job, self._end(command)))
                        del left[command.job]
                        if command.chain:
                            running.append(self._start(command.chain, layout))
                        else:
                            on_end()
                    begun = {command.job: command.job.share() for command in running}
                    open_ = sum(t * (1 - begun.get(job, 0.0)) for job, t in left.items())
                    live = "; ".join(escape(printable(command.job.name)) for command in running)
                    bar.update(task, completed=total - open_, live=live)
            except BaseException:
                self._stop(running)
                raise
        return timed

    def _start(self, chain: Sequence[Job], layout: Layout) -> Running:
        job = chain[0]
        place = job.leaves[0][0].parent.relative_to(self.folder)
        log = self.folder / "logs" / f"{'-'.join([*place.parts, job.kind])}.log"
        log.parent.mkdir(exist_ok=True)
        command = [sys.executable, *(["-c", LINKED] if sys.platform == "linux" else []), "-m", "osdn"]
        threads = {name: str(layout.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with log.open("ab") as file:
            file.write(f"$ {job.command}\n".encode())
            file.flush()
            process = subprocess.Popen(
                [*command, *job.arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads},
                start_new_session=True,  # Ctrl-C is ours to pass on
                pass_fds=(self.lock.fileno(),),
            )
        return Running(job, list(chain[1:]), process, log, layout.processes)

    def _end(self, command: Running) -> float:
        """The seconds of a job that has ended; an error if it left no result."""
        seconds = time.perf_counter() - command.start
        self._note(command, seconds)
        if command.process.returncode != 0 or not command.job.is_done():
            last_lines = command.log.read_text(errors="replace").splitlines()[-SAID:]
            raise JobError(
                f"`{command.job.command}` failed with status {command.process.returncode}:\n"
                + "\n".join(last_lines)
                + f"\nAll it printed is in {command.log}. The same command continues once the cause is gone."
            )
        if command.job.kind == "train":  # a finished run needs only its model
            for checkpoint in command.job.leaves[0][0].parent.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        recall = command.job.recall()  # no difference can show if a baseline's is near zero: say so early
        if recall or not self.console.is_terminal:
            self.console.print(f"{command.job.name}: {seconds:,.0f} s{recall}", highlight=False, markup=False)
        return seconds

    def _stop(self, running: Sequence[Running]) -> None:
        """Let the commands save what they have, and note their time."""
        for command in running:
            command.process.terminate()
        end = time.perf_counter() + PATIENCE
        for command in running:
            try:
                command.process.wait(max(0.1, end - time.perf_counter()))
            except subprocess.TimeoutExpired:
                command.process.kill()
                command.process.wait()
            self._note(command, time.perf_counter() - command.start)

    def _note(self, command: Running, seconds: float) -> None:
        line = {"job": command.job.name, "seconds": round(seconds, 1), "processes": command.beside}
        line |= {"status": command.process.returncode}
        with (self.folder / JOURNAL).open("a") as file:
            file.write(json.dumps(line) + "\n")


def hours_taken(folder: Path) -> float:
    """The hours of all commands, stopped ones too; commands that ran side by side share their time."""
    lines = map(json.loads, (folder / JOURNAL).read_text().splitlines())
    return float(sum(line["seconds"] / line["processes"] for line in lines)) / 3600


@contextmanager
def _alone(folder: Path, console: Console) -> Iterator[IO[bytes]]:
    """Hold the folder's lock, so that no other reproduction and no command left behind works in it."""
    with (folder / ".lock").open("wb") as lock:
        for attempt in range(PATIENCE + 1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == PATIENCE:
                    raise ValueError(
                        f"another process works in {folder}; wait for it, end it, or choose another --output"
                    ) from None
                if attempt == 0:
                    console.print(f"waiting for another process that works in {folder}")
                time.sleep(1)
        yield lock


@contextmanager
def _stoppable() -> Iterator[Callable[[], None]]:
    """Delay SIGTERM and Ctrl-C until the body calls the yielded function, so that no command is lost."""
    noted: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: noted.append(number)) for number in numbers]

    def ask() -> None:
        if noted:
            raise KeyboardInterrupt

    try:
        yield ask
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
