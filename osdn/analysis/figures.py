"""Figures, one function each: of the mechanism diagnostic, over one result or several, and of training."""

from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from osdn.evaluation.figures import COLOURS
from osdn.training.plot import WINDOW, rolling_mean

Results = Mapping[str, dict[str, Any]]  # the contents of diagnosis.json by a name for the legend


def contraction(results: Results) -> Figure:
    """(a) q_geo by position, (b) overall: the paper's "Direct theorem-facing residual contraction"."""
    figure, (left, right) = _panels(2, (7.6, 3.2), width_ratios=(2, 1))
    for (name, result), colour in zip(results.items(), cycle(COLOURS)):
        _by_position(left, result["all"], colour, name)
    boundaries = [r["all"]["boundary"] for r in results.values() if r["all"]["boundary"] is not None]
    if boundaries:
        left.axvline(sum(boundaries) / len(boundaries), color="0.4", ls="--", lw=1)
        left.annotate("second reading", (boundaries[0], 1), (4, -4), xycoords=("data", "axes fraction"),
                      textcoords="offset points", va="top", fontsize=8, color="0.3")  # fmt: skip
    left.set(xlabel="relative position", ylabel="$q_{geo}$", xlim=(0, 1), title="(a) by position")
    for i, (result, colour) in enumerate(zip(results.values(), cycle(COLOURS))):
        q = result["all"]["q_geo"]
        right.bar(i, q["value"], color=colour, width=0.7)
        right.errorbar(i, q["value"], yerr=_whiskers(q), color="0.2", capsize=3)
        right.annotate(f"{q['value']:.3f}", (i, q["high"]), (0, 3), textcoords="offset points",
                       ha="center", fontsize=8)  # fmt: skip
    right.set_xticks(range(len(results)), list(results), rotation=30 if len(results) > 2 else 0)
    right.margins(y=0.15)
    right.set(title="(b) overall")
    if len(results) > 1:
        left.legend(frameon=False, fontsize=8)
    return figure


def tasks(results: Results) -> Figure:
    """q_geo by position, one panel a task."""
    names = sorted({task for result in results.values() for task in result["tasks"]})
    figure, panels = _panels(len(names), (3.4 * len(names) + 0.6, 3.0), sharey=True)
    for axes, task in zip(panels, names):
        for (name, result), colour in zip(results.items(), cycle(COLOURS)):
            if task in result["tasks"]:
                summary = result["tasks"][task]
                _by_position(axes, summary, colour, name)
                if summary["boundary"] is not None:
                    axes.axvline(summary["boundary"], color="0.4", ls="--", lw=1)
        axes.set(title=task, xlabel="relative position", xlim=(0, 1))
    panels[0].set_ylabel("$q_{geo}$")
    if len(results) > 1:
        panels[0].legend(frameon=False, fontsize=8)
    return figure


def heads(results: Results) -> Figure:
    """q_geo of every layer and head."""
    figure, panels = _panels(len(results), (3.2 * len(results) + 0.8, 4.2), sharey=True)
    for axes, (name, result) in zip(panels, results.items()):
        table = np.array(result["all"]["by_layer_and_head"], dtype=float)
        image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower")
        axes.set(title=name, xlabel="head")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, label="$q_{geo}$")
    return figure


def scale(results: Results) -> Figure:
    """The scale's mean and spread by layer and position, and how much of it the box holds back."""
    results = {name: result for name, result in results.items() if result["scale"]}
    columns = len(results)
    figure = Figure(figsize=(3.6 * columns + 0.8, 7.6), layout="constrained")
    panels = figure.subplots(3, columns, squeeze=False, sharex=True)
    for (name, result), column in zip(results.items(), panels.T):
        d = result["scale"]
        mean, spread = np.array(d["mean"]), np.array(d["spread"])
        bound = np.array(d["share_at_low"]) + np.array(d["share_at_high"])
        reach = max(1e-3, float(np.abs(mean - 1).max()))
        tables = (
            (mean, "mean of $d$", {"cmap": "coolwarm", "vmin": 1 - reach, "vmax": 1 + reach}),
            (spread, "spread of $d$ over channels", {"cmap": "magma", "vmin": 0}),
            (
                100 * bound,
                "% of channels at the box",
                {"cmap": "magma", "vmin": 0, "vmax": 100 * bound.max() or 1},
            ),
        )
        for axes, (table, label, style) in zip(column, tables):
            extent = (0, 1, -0.5, len(table) - 0.5)
            image = axes.imshow(table, aspect="auto", origin="lower", extent=extent, **style)
            figure.colorbar(image, ax=axes, label=label)
            axes.set_ylabel("layer")
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        box = "no box" if d["bounds"] is None else f"box {d['bounds'][0]} to {d['bounds'][1]}"
        column[0].set_title(f"{name}, {box}")
        column[-1].set_xlabel("relative position")
    return figure


def losses(curves: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Training cross-entropy by tokens: the whole run, and its final quarter."""
    figure, (whole, final) = _panels(2, (8.4, 3.2))
    for (name, (tokens, values)), colour in zip(curves.items(), cycle(COLOURS)):
        smooth = rolling_mean(values, min(WINDOW, len(values) // 20) | 1)
        last = tokens >= 0.75 * tokens[-1]
        whole.semilogy(tokens, smooth, color=colour, lw=1.2, label=name)
        final.plot(tokens[last], smooth[last], color=colour, lw=1.2)
    whole.set(xlabel="tokens", ylabel="cross-entropy", title="whole run")
    final.set(xlabel="tokens", title="final quarter")
    whole.legend(frameon=False, fontsize=8)
    return figure


def draw(results: Results, folder: Path) -> list[Path]:
    """All figures that these results have data for."""
    drawings: dict[str, Callable[[Results], Figure]] = {
        "contraction": contraction,
        "tasks": tasks,
        "heads": heads,
    }
    if any(result["scale"] for result in results.values()):
        drawings["scale"] = scale
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, drawing in drawings.items():
        figure = drawing(results)
        for suffix in (".svg", ".png"):
            paths.append(folder / f"{name}{suffix}")
            figure.savefig(paths[-1], dpi=150)
    return paths


def _by_position(axes: Axes, summary: dict[str, Any], colour: str, name: str) -> None:
    rows = [(i, row) for i, row in enumerate(summary["by_position"]) if row is not None]
    x = [(i + 0.5) / len(summary["by_position"]) for i, _ in rows]
    axes.plot(x, [row["value"] for _, row in rows], color=colour, label=name, marker="o", ms=3)
    low, high = ([row[end] for _, row in rows] for end in ("low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)


def _whiskers(q: dict[str, float]) -> list[list[float]]:
    return [[max(0.0, q["value"] - q["low"])], [max(0.0, q["high"] - q["value"])]]


def _panels(n: int, size: tuple[float, float], **options: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(1, n, squeeze=False, **options)[0])
