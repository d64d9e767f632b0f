"""The referee: which preconditioner or other update, if any, remembers more than a tuned plain delta rule.

Every contestant, including the plain delta rule of each backbone, is tuned on the same small grid of learning
rates and initial gate biases, with seeds that are not used again.  Then all are judged on the same new seeds
and batches, after a quarter, half and all of the budget, and compared with the tuned plain rule of their
backbone.  docs/referee.md explains the protocol.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from typing import Protocol as Interface

import torch
from rich.progress import Progress

from osdn.lab.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopying
from osdn.lab.needle import NeedleTask
from osdn.lab.recall import RecallTask
from osdn.lab.runner import cost, count_finished, is_finished, read_result, run_all
from osdn.lab.text import TextTask
from osdn.lab.tracking import TrackingTask
from osdn.lab.training import Learner, Run, build
from osdn.lab.variants import Variant, baseline_of
from osdn.results.statistics import estimate, holm, paired_difference, t_test
from osdn.results.tables import Cell, Row, Table

BUDGETS = (0.25, 0.5, 1.0)
TUNING_SEEDS = (1000, 1001)  # never used for judging
TUNING_SHARE = 0.5  # of the budget, for every grid point
CALIBRATION_STEPS = 3
# Every preconditioner on every backbone, and every other update on the backbone it was published for.
CONTESTANTS = (
    *("delta_net", "osdn", "osdn-apf", "osdn-newton", "osdn-newton+block-8", "delta_net+pgdn"),
    *("delta_net+longhorn", "delta_net+efla", "delta_net+product-2"),
    *("gdn", "osgdn", "osgdn-apf", "osgdn-newton", "gdn+pgdn", "gdn+kaczmarz", "gdn+comba"),
    *("kda", "oskda", "oskda-apf", "oskda-newton", "kda+pgdn", "kda+gdn2"),
)


@dataclass(frozen=True)
class Trial:
    """A task of the referee, with its sizes and its metric."""

    name: str
    task: Any
    steps: int
    batch: int
    metric: str = "accuracy"
    lower_is_better: bool = False
    write_scale: float = 1.0

    def score(self, result: dict[str, Any]) -> float:
        """The metric, signed so that larger is better; a value that is not finite is worst."""
        value = float(result[self.metric])
        if not math.isfinite(value):
            return -math.inf
        return -value if self.lower_is_better else value

    def record(self) -> dict[str, Any]:
        """The trial as it is recorded in a result."""
        settings = {x.name: getattr(self, x.name) for x in fields(self)}
        task = asdict(self.task)
        return settings | {"task": task | {"folder": ""} if "folder" in task else task}


TRIALS = (
    # 32 pairs with 16 key channels per head: more than a state can hold
    Trial("capacity", RecallTask(256, pairs=32, length=128, passes=1), 800, 16),
    Trial("overwriting", RecallTask(128, pairs=8, length=80, passes=2, overwrites=4), 600, 24),
    Trial("noisy pairs", RecallTask(128, pairs=8, length=80, passes=3, noise=0.2), 600, 24),
    Trial("MAD recall", InContextRecall(), 300, 16),
    Trial("MAD noisy", InContextRecall(32, noise_vocab_size=16, noise=0.2), 800, 16),
    Trial("MAD fuzzy", FuzzyRecall(), 600, 16),
    Trial("MAD copying", SelectiveCopying(), 400, 8),
    Trial("MAD compression", Compression(), 600, 32),
    Trial("MAD memory", Memorization(), 100, 32),
    # Only write strengths up to 2 allow reflections, which parity and permutations need.
    Trial("parity", TrackingTask("parity", 32), 300, 32, write_scale=2.0),
    Trial("S3", TrackingTask("s3", 32), 500, 32, write_scale=2.0),
    Trial("S5", TrackingTask("s5", 32), 500, 32, write_scale=2.0),
    Trial("needle", NeedleTask(), 400, 16, metric="accuracy_4x"),
    Trial("text", TextTask("", length=128, longest=8), 450, 16, "loss", lower_is_better=True),
)
# "MAD noisy" asks much the same as "noisy pairs", and takes an hour more.  On the others, a plain DeltaNet of
# width 32 does not get above chance in an affordable number of steps.
LEFT_OUT = ("MAD noisy", "MAD fuzzy", "MAD copying", "MAD compression", "S3", "S5")
QUICK = ("overwriting", "noisy pairs", "parity")
QUICK_CONTESTANTS = ("delta_net", "osdn", "osdn-newton", "gdn", "osgdn-newton", "kda", "oskda-newton")


@dataclass(frozen=True)
class Protocol:
    """What to run: every contestant in every trial, first tuned over the grid, then judged."""

    trials: tuple[Trial, ...] = TRIALS
    contestants: tuple[str, ...] = CONTESTANTS
    learning_rates: tuple[float, ...] = (0.005, 0.01)
    beta_biases: tuple[float | None, ...] = (None, -2.0)
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    seeds: int = 6
    width: int = 32
    layers: int = 2

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"seeds is {self.seeds}; comparisons need at least 2")
        if set(self.tuning_seeds) & set(range(self.seeds)):
            raise ValueError(
                f"tuning_seeds {self.tuning_seeds} must not be among the judged seeds 0 to {self.seeds - 1}"
            )
        for name in self.contestants:
            if self.baseline(name) not in self.contestants:
                raise ValueError(f"{name} cannot be judged without {self.baseline(name)}: add it as well")

    def cells(self) -> Iterator[tuple[Trial, str]]:
        return product(self.trials, self.contestants)

    def baseline(self, contestant: str) -> str:
        """The plain rule of a contestant's backbone; for a row of the zoo, DeltaNet."""
        plain = [Variant(name) for name in ("delta_net", "gdn", "kda")]
        return baseline_of(Variant(contestant), plain).name

    def tuning(self, trial: Trial, contestant: str) -> list[list[Run]]:
        """The runs of every grid point, one per seed."""
        steps = max(1, round(TUNING_SHARE * trial.steps))
        biases = (None,) if Variant(contestant).row else self.beta_biases
        return [
            [self._run(trial, contestant, seed, rate, bias, steps, (1.0,)) for seed in self.tuning_seeds]
            for rate, bias in product(self.learning_rates, biases)
        ]

    def judging(self, trial: Trial, chosen: Run) -> list[Run]:
        """The runs that count, with the tuned settings."""
        full = replace(chosen, steps=trial.steps, budgets=BUDGETS)
        return [replace(full, seed=seed) for seed in range(self.seeds)]

    def _run(
        self,
        trial: Trial,
        contestant: str,
        seed: int,
        rate: float,
        bias: float | None,
        steps: int,
        budgets: tuple[float, ...],
    ) -> Run:
        factor = 1.0 if Variant(contestant).row else trial.write_scale
        variant = Variant(contestant, beta_bias=bias, write_scale=factor)
        return Run(
            trial.task, variant, seed, self.width, self.layers, steps, trial.batch, rate, budgets=budgets
        )


class Contest(Interface):
    """Contestants in trials, each compared with a baseline."""

    def cells(self) -> Iterator[tuple[Trial, str]]: ...
    def baseline(self, contestant: str) -> str: ...


def quick(protocol: Protocol) -> Protocol:
    """The protocol with two fifths of the steps, one learning rate and one tuning seed."""
    trials = tuple(replace(t, steps=max(20, 2 * t.steps // 5)) for t in protocol.trials)
    return replace(protocol, trials=trials, learning_rates=(0.01,), tuning_seeds=TUNING_SEEDS[:1])


def with_tasks(protocol: Protocol, names: Sequence[str]) -> Protocol:
    """The protocol with the named tasks; without names, with all that can be learned."""
    known = {trial.name: trial for trial in protocol.trials}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown task {', '.join(unknown)}; choose from {', '.join(known)}")
    chosen = names or [name for name in known if name not in LEFT_OUT]
    return replace(protocol, trials=tuple(known[name] for name in chosen))


def prepared(protocol: Any, output: Path) -> Any:
    """A protocol or study whose tasks have the files they need."""
    return replace(protocol, trials=tuple(replace(t, task=t.task.prepare(output)) for t in protocol.trials))


def choose(trial: Trial, grid: Sequence[Sequence[Run]], folder: Path) -> Run:
    """The grid point with the best mean score over its seeds; the first one if there is a tie."""
    scores = [fmean(trial.score(read_result(run, folder)) for run in runs) for runs in grid]
    return grid[max(range(len(grid)), key=lambda i: scores[i])][0]


def missing(runs: Sequence[Run], folder: Path) -> list[Run]:
    return [run for run in runs if not is_finished(run, folder)]


def planned(protocol: Protocol, folder: Path) -> list[tuple[Trial, list[Run]]]:
    """The runs that are left, by trial; until tuning ends, the first grid point stands in for the best."""
    plan = []
    for trial in protocol.trials:
        runs: list[Run] = []
        for contestant in protocol.contestants:
            grid = protocol.tuning(trial, contestant)
            left = missing([run for point in grid for run in point], folder)
            chosen = grid[0][0] if left else choose(trial, grid, folder)
            judged = protocol.judging(trial, chosen)
            runs += left + (judged if left else missing(judged, folder))
        plan.append((trial, runs))
    return plan


class Clock:
    """Estimates how long runs take on an idle core, from a few steps of each backbone and update per task.

    It measures CPU time, because wall-clock time would include whatever else the machine is doing.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[float, float]] = {}  # per step, and per evaluation

    def seconds(self, run: Run) -> float:
        kind = (run.variant.row, run.variant.backbone, run.variant.update_rule, run.variant.heads)
        key = (run.task, kind, run.width, run.batch)
        if key not in self.known:
            self.known[key] = self._measure(run)
        step, evaluation = self.known[key]
        return run.updates * step + max(1, len(run.budgets)) * evaluation

    def _measure(self, run: Run) -> tuple[float, float]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            learner, batches = Learner(run), run.task.batches(run.seed, run.batch)
            learner.learn(next(batches), 1.0)  # warm up
            start = time.process_time()
            for _ in range(CALIBRATION_STEPS):
                learner.learn(next(batches), 1.0)
            learned = time.process_time()
            run.task.evaluate(learner.model.eval(), run.seed)
            return (learned - start) / CALIBRATION_STEPS, time.process_time() - learned
        finally:
            torch.set_num_threads(threads)


def plan_table(plan: Sequence[tuple[Trial, list[Run]]], folder: Path, jobs: int | None = None) -> Table:
    """The runs that are left, by trial, and how long they take on idle cores."""
    clock, workers = Clock(), jobs or os.cpu_count() or 1
    rows, total, count = [], 0.0, 0
    for trial, runs in plan:
        seconds = sum(clock.seconds(run) for run in runs) / workers
        total, count = total + seconds, count + len(runs)
        rows.append(Row(trial.name, [Cell(str(trial.steps)), Cell(str(len(runs))), Cell(_time(seconds))]))
    rows.append(Row("together", [Cell(""), Cell(str(count)), Cell(_time(total))], rule=True))
    note = (
        f"On {workers} idle cores. {count_finished(folder)} runs in {folder} are finished; you can interrupt "
        f"at any time and continue later."
    )
    return Table("Left to run", ["steps", "runs", "time"], rows, note)


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


Outcome = dict[tuple[str, str], list[dict[str, Any]]]  # results by trial and contestant, one per seed


def judge(contest: Contest, outcome: Outcome) -> list[dict[str, Any]]:
    """The value of every contestant in every trial at every budget, and its difference from the baseline.

    A positive difference is better.  The difference's `p_value` is that of the sign-flip test, `t_p` that of
    the paired t-test, and `adjusted` is `t_p` after Holm's correction for all comparisons at that budget.
    """
    rows = []
    for budget, (trial, contestant) in product(BUDGETS, contest.cells()):
        baseline = contest.baseline(contestant)
        at = BUDGETS.index(budget)
        ours, theirs = (
            [run["budgets"][at] for run in outcome[trial.name, name]] for name in (contestant, baseline)
        )
        row: dict[str, Any] = {
            "trial": trial.name,
            "metric": trial.metric,
            "contestant": contestant,
            "baseline": baseline,
            "budget": budget,
            "value": asdict(estimate([run[trial.metric] for run in ours])),
            "difference": None,
        }
        if contestant != baseline:
            scores = [[trial.score(run) for run in runs] for runs in (ours, theirs)]
            row |= {"difference": asdict(paired_difference(*scores)), "t_p": t_test(*scores)}
        rows.append(row)
    for budget in BUDGETS:
        compared = [row for row in rows if row["budget"] == budget and row["difference"] is not None]
        for row, adjusted in zip(compared, holm([row["t_p"] for row in compared])):
            row["adjusted"] = adjusted
    return rows


def tuned(protocol: Protocol, folder: Path) -> list[dict[str, Any]]:
    """The tuned settings, their mean score on the tuning seeds, and the best score without a bias."""
    rows = []
    for trial, contestant in protocol.cells():
        grid = protocol.tuning(trial, contestant)
        scores = {
            (runs[0].learning_rate, runs[0].variant.beta_bias): fmean(
                trial.score(read_result(run, folder)) for run in runs
            )
            for runs in grid
        }
        chosen = choose(trial, grid, folder)
        rows.append(
            {
                "trial": trial.name,
                "contestant": contestant,
                "learning_rate": chosen.learning_rate,
                "beta_bias": chosen.variant.beta_bias,
                "score": max(scores.values()),
                "score_without_bias": max(s for (_, bias), s in scores.items() if bias is None),
            }
        )
    return rows


def parameters(protocol: Protocol, contestant: str) -> int:
    """A contestant's number of parameters, with the vocabulary of the first task."""
    first = protocol.tuning(protocol.trials[0], contestant)[0][0]
    return sum(p.numel() for p in build(first).parameters())


def diagnose(contest: Contest, outcome: Outcome) -> list[dict[str, Any]]:
    """Write statistics of the trained models, as means over the judged seeds, where a rule has them."""
    rows = []
    for trial, contestant in contest.cells():
        runs = outcome[trial.name, contestant]
        row: dict[str, Any] = {"trial": trial.name, "contestant": contestant}
        for name in ("beta", "key_scale", "decay", "q_geo"):
            if name in runs[0]:
                row[name] = fmean(run[name] for run in runs)
        rows.append(row)
    return rows


def run_referee(protocol: Protocol, folder: Path, progress: Progress, jobs: int | None) -> dict[str, Any]:
    """Tune, judge and compare; finished runs are read from their files."""
    grids = [(trial, name, protocol.tuning(trial, name)) for trial, name in protocol.cells()]
    tuning = [run for _, _, grid in grids for point in grid for run in point]
    stand_ins = [run for trial, _, grid in grids for run in protocol.judging(trial, grid[0][0])]
    bar = progress.add_task("referee", total=sum(map(cost, tuning + stand_ins)), live="")
    run_all(tuning, folder, progress, bar, jobs)
    judging = {
        (trial.name, name): protocol.judging(trial, choose(trial, g, folder)) for trial, name, g in grids
    }
    results = iter(run_all([run for runs in judging.values() for run in runs], folder, progress, bar, jobs))
    outcome = {cell: [next(results) for _ in runs] for cell, runs in judging.items()}
    return {
        "kind": "referee",
        "seeds": protocol.seeds,
        "tuning_seeds": list(protocol.tuning_seeds),
        "learning_rates": list(protocol.learning_rates),
        "beta_biases": list(protocol.beta_biases),
        "width": protocol.width,
        "layers": protocol.layers,
        "trials": [trial.record() for trial in protocol.trials],
        "parameters": {name: parameters(protocol, name) for name in protocol.contestants},
        "rows": judge(protocol, outcome),
        "tuned": tuned(protocol, folder),
        "writes": diagnose(protocol, outcome),
    }
