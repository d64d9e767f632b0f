"""Results of many runs as one table: means over seeds, and paired differences from the baseline."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from osdn.lab.variants import Variant, baseline_of
from osdn.results.statistics import Difference, Estimate, estimate, paired_difference
from osdn.results.store import save_json

COLUMNS = (
    "variant", "metric", "seeds", "mean", "low", "high",
    "baseline", "difference", "difference_low", "difference_high", "p_value",
)  # fmt: skip
Results = dict[Variant, list[dict[str, Any]]]  # one result per seed, in order of seeds


@dataclass(frozen=True)
class Row:
    """One metric of one variant; `difference` is None for the baseline."""

    variant: str
    metric: str
    value: Estimate
    baseline: str
    difference: Difference | None


def group(variants: Sequence[Variant], results: Sequence[dict[str, Any]]) -> Results:
    """Group results that are ordered by variant, then by seed."""
    seeds = len(results) // len(variants)
    return {v: list(results[i * seeds : (i + 1) * seeds]) for i, v in enumerate(variants)}


def summarize(results: Results, metrics: Sequence[str]) -> list[Row]:
    """Every metric of every variant."""
    rows = []
    for variant, runs in results.items():
        baseline = baseline_of(variant, list(results))
        for metric in metrics:
            if metric not in runs[0]:  # a row of the zoo has no residual ratio
                continue
            values = [result[metric] for result in runs]
            theirs = [result[metric] for result in results[baseline] if metric in result]
            difference = paired_difference(values, theirs) if theirs and variant != baseline else None
            rows.append(Row(variant.label, metric, estimate(values), baseline.label, difference))
    return rows


def by_label(results: Results) -> dict[str, list[dict[str, Any]]]:
    """The results by label, as figures expect them."""
    return {variant.label: runs for variant, runs in results.items()}


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as they are saved to a file."""
    return [asdict(row) for row in rows]


def describe(results: Results) -> str:
    """The experiment in a few words, to distinguish two on the same task."""
    settings = _first(results)["settings"]
    task = settings["task"]
    words = [f"{settings['steps']} steps", f"width {settings['width']}", f"{task['length']} tokens"]
    if "pairs" in task:
        words.insert(0, f"{task['pairs']} pairs, {task['passes']} pass{'es' * (task['passes'] > 1)}")
        words += [f"{task['overwrites']} overwritten"] if task.get("overwrites") else []
        words += [f"noise {task['noise']:g}"] if task.get("noise") else []
    words += [task["group"]] if "group" in task else []
    return ", ".join(words)


def write(results: Results, rows: Sequence[Row], folder: Path, name: str) -> None:
    """Write summary.json, summary.csv (one line per variant and metric) and runs.csv (one line per run)."""
    seeds = [run["settings"]["seed"] for run in next(iter(results.values()))]
    content = {"kind": "lab", "experiment": name, "description": describe(results), "seeds": seeds}
    save_json(folder / "summary.json", {**content, "rows": records(rows)})
    with open(folder / "summary.csv", "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(COLUMNS)
        for r in rows:
            d = r.difference
            more = ["", "", "", ""] if d is None else [d.mean, d.low, d.high, d.p_value]
            value = [r.value.seeds, r.value.mean, r.value.low, r.value.high]
            out.writerow([r.variant, r.metric, *value, r.baseline, *more])
    metrics = list(dict.fromkeys(row.metric for row in rows))
    with open(folder / "runs.csv", "w", newline="") as f:
        out = csv.writer(f)
        grid = [
            " ".join(f"{name}={x:g}" for name, x in g.items() if name != "accuracy")
            for g in _first(results).get("grid", [])
        ]
        out.writerow(["variant", "seed", *metrics, *grid])
        for variant, runs in results.items():
            for run in runs:
                accuracies = [g["accuracy"] for g in run.get("grid", [])]
                values = [run.get(metric, "") for metric in metrics]
                out.writerow([variant.label, run["settings"]["seed"], *values, *accuracies])


def _first(results: Results) -> dict[str, Any]:
    return next(iter(results.values()))[0]
