"""The write gate of a plain DeltaNet: where its initial bias matters, and where the effect fades.

A gate without a bias starts at a write strength of one half; a learned bias can start lower.  The study
changes one thing at a time from a base setting (the width, the number of heads and with it the key channels
per head, the sequence length) on text and on recall, and compares initial biases after a quarter, half and
all of the budget, as the referee does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import Progress

from osdn.lab.recall import RecallTask
from osdn.lab.referee import BUDGETS, Trial, diagnose, judge, missing
from osdn.lab.runner import cost, run_all
from osdn.lab.text import TextTask
from osdn.lab.training import Run
from osdn.lab.variants import Variant

BIASES = (None, 0.0, -2.0, -4.0)  # initial strengths of 0.5 (without and with a learned bias), 0.12 and 0.02
LEARNING_RATE = 0.005


@dataclass(frozen=True)
class Setting(Trial):
    """A trial with its own width and heads; `group` is its task, `change` its difference from the base."""

    width: int = 64
    heads: int = 2
    group: str = ""
    change: str = "base"


def _around(base: Setting, lengths: Sequence[int]) -> list[Setting]:
    """A base setting, and those that differ from it in one thing."""
    K = base.width // base.heads
    changes = [
        *({"width": w, "heads": w // K, "change": f"width {w}"} for w in (32, 128)),
        *({"heads": h, "change": f"{base.width // h} key channels"} for h in (4, 1)),
        *({"task": replace(base.task, length=n), "change": f"length {n}"} for n in lengths),
    ]
    settings = [base, *(replace(base, **change) for change in changes)]
    return [replace(s, name=f"{s.group}, {s.change}") for s in settings]


TEXT = Setting("", TextTask("", length=128), 240, 8, "loss", lower_is_better=True, group="text")
PAIRS = RecallTask(128, pairs=16, length=64, passes=1, evaluation=32)
RECALL = Setting("", PAIRS, 300, 16, "accuracy_2x", group="recall")  # tested with 32 pairs
SETTINGS = (*_around(TEXT, (64, 256)), *_around(RECALL, (128, 256)))


@dataclass(frozen=True)
class Study:
    """Every initial bias of the write gate in every setting, on the same seeds."""

    trials: tuple[Setting, ...] = SETTINGS
    biases: tuple[float | None, ...] = BIASES
    seeds: int = 6
    layers: int = 2

    @property
    def contestants(self) -> dict[str, Variant]:
        variants = [Variant("delta_net", beta_bias=bias) for bias in self.biases]
        return {variant.label: variant for variant in variants}

    def cells(self) -> Iterator[tuple[Trial, str]]:
        return product(self.trials, self.contestants)

    def baseline(self, contestant: str) -> str:
        """The gate without a bias."""
        return Variant("delta_net").label

    def runs(self, setting: Setting, contestant: str) -> list[Run]:
        variant = replace(self.contestants[contestant], heads=setting.heads)
        sizes = (setting.width, self.layers, setting.steps, setting.batch, LEARNING_RATE)
        return [Run(setting.task, variant, seed, *sizes, budgets=BUDGETS) for seed in range(self.seeds)]

    def all_runs(self) -> dict[tuple[Setting, str], list[Run]]:
        return {(s, name): self.runs(s, name) for s in self.trials for name in self.contestants}


def planned(study: Study, folder: Path) -> list[tuple[Trial, list[Run]]]:
    """The runs that are left, by setting."""
    left = {cell: missing(runs, folder) for cell, runs in study.all_runs().items()}
    return [(s, [run for name in study.contestants for run in left[s, name]]) for s in study.trials]


def run_study(study: Study, folder: Path, progress: Progress, jobs: int | None) -> dict[str, Any]:
    """Run what is missing and compare; finished runs are read from their files."""
    cells = study.all_runs()
    runs = [run for cell_runs in cells.values() for run in cell_runs]
    bar = progress.add_task("write gate", total=sum(map(cost, runs)), live="")
    results = iter(run_all(runs, folder, progress, bar, jobs))
    outcome = {(s.name, name): [next(results) for _ in cell_runs] for (s, name), cell_runs in cells.items()}
    return {
        "kind": "write-gate",
        "seeds": study.seeds,
        "learning_rate": LEARNING_RATE,
        "layers": study.layers,
        "trials": [setting.record() for setting in study.trials],
        "rows": judge(study, outcome),
        "writes": diagnose(study, outcome),
    }
