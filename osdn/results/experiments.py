"""The lab's results as tables and sentences: means over seeds, and paired differences from the baseline."""

import math
from collections.abc import Sequence
from typing import Any

from osdn.results.names import title
from osdn.results.statistics import Difference, Estimate
from osdn.results.tables import Cell, Row, Table

METRICS = {
    "accuracy": "accuracy",
    "accuracy_2x": "accuracy at twice the size",
    "accuracy_4x": "accuracy at four times the size",
    "accuracy_8x": "accuracy at eight times the size",
    "q_geo": "residual ratio",
    "loss": "validation loss",
    "loss_2x": "validation loss from one to two times the trained length",
    "loss_4x": "validation loss from two to four times the trained length",
    "loss_8x": "validation loss from four to eight times the trained length",
    "perplexity": "validation perplexity",
}


def experiment_table(records: Sequence[dict[str, Any]], name: str) -> Table:
    """The rows of a summary, metric by metric."""
    seeds = records[0]["value"]["seeds"]
    rows: list[Row] = []
    for metric in dict.fromkeys(row["metric"] for row in records):
        rows.append(Row(METRICS.get(metric, metric.replace("_", " ")), [], rule=True, heading=True))
        for row in (row for row in records if row["metric"] == metric):
            value, difference = estimate_of(row["value"]), difference_of(row["difference"])
            cells = [_cell(value), Cell("") if difference is None else _cell(difference)]
            if difference is None or difference.seeds == 1 or math.isnan(difference.p_value):
                cells.append(Cell(""))
            else:
                cells.append(Cell(f"{difference.p_value:.2g}", best=difference.seen))
            rows.append(Row(title(row["variant"]), cells))
    count = f"{seeds} seed{'s' * (seeds > 1)}"
    interval = " [95 %]" if seeds > 1 else ""
    note = "" if seeds > 1 else "One seed gives no interval, and no difference can be told from chance."
    return Table(f"{name}, {count}", [f"mean{interval}", f"difference{interval}", "p"], rows, note)


def conclusion(difference: Difference) -> str:
    """What a paired difference shows, in words."""
    d, n = difference, difference.seeds
    if not math.isfinite(d.mean):
        return f"was not a finite number in every run ({n} seeds)"
    if n == 1:
        return f"differs by {d.mean:+.3f} in one seed, which shows nothing"
    if d.low <= 0 <= d.high:
        return f"shows no difference at this scale ({d}, {n} seeds)"
    direction = "higher" if d.mean > 0 else "lower"
    if d.seen:
        return f"is {direction} ({d}, {n} seeds, p = {d.p_value:.2g})"
    return f"came out {direction} ({d}), but {n} seeds cannot tell it from chance (p = {d.p_value:.2g})"


def verdict(rows: Sequence[dict[str, Any]], metric: str, what: str) -> str:
    """A sentence about a metric: which variants differ from their baseline, if any."""
    differences = [
        (title(r["variant"]), difference_of(r["difference"])) for r in rows if r["metric"] == metric
    ]
    compared = [(name, d) for name, d in differences if d is not None]
    if not compared:
        return f"{what}: there is no baseline to compare with."
    differing = [f"{name} is {'higher' if d.mean > 0 else 'lower'} ({d})" for name, d in compared if d.seen]
    base = title(next(r["baseline"] for r in rows if r["metric"] == metric and r["difference"]))
    if not differing:
        closest = "; ".join(f"{name} {d}" for name, d in compared)
        return f"{what}: {compared[0][1].seeds} seeds show no difference from {base} ({closest})."
    same = [name for name, d in compared if not d.seen]
    others = f"; {', '.join(same)} {'does' if len(same) == 1 else 'do'} not differ measurably" if same else ""
    return f"{what}, against {base}: {'; '.join(differing)}{others}."


def estimate_of(record: dict[str, Any]) -> Estimate:
    return Estimate(record["mean"], record["low"], record["high"], record["seeds"])


def difference_of(record: dict[str, Any] | None) -> Difference | None:
    if record is None:
        return None
    names = ("mean", "low", "high", "seeds", "p_value")
    return Difference(*(record[name] for name in names))


def _cell(value: Estimate) -> Cell:
    mean, _, interval = str(value).partition(" ")
    return Cell(mean, interval)
