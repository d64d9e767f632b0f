"""The lab's figures: means over seeds as lines, their bootstrap intervals as bands."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from osdn.lab.statistics import estimate
from osdn.lab.summary import Results
from osdn.lab.variants import Variant

COLORS = ("#4c566a", "#2a6fbb", "#c8641e", "#3a8f5a", "#8e5aa8", "#b23a48", "#8a7a2d", "#4aa3a3", "#777777")
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be searched, and scales with the page's font
    "svg.hashsalt": "osdn",
}


def learning_curves(results: Results, quantity: str) -> Figure:
    """Loss or accuracy during training."""
    figure, axes = _panel("training step", f"training {quantity}")
    _bands(
        axes, results, lambda r: [p["step"] for p in r["curve"]], lambda r: [p[quantity] for p in r["curve"]]
    )
    return figure


def accuracy_by_pairs(results: Results) -> Figure:
    """Recall against the number of pairs, a line style for each number of passes."""
    figure, axes = _panel("key–value pairs", "accuracy")
    last = max(g["passes"] for g in _any(results)["grid"])
    for passes in range(1, last + 1):
        suffix = f", {passes} pass{'es' * (passes > 1)}" if last > 1 else ""
        style = {"linestyle": "-" if passes == last else ":", "marker": "o", "markersize": 3}
        _bands(
            axes,
            results,
            partial(_column, passes, "pairs"),
            partial(_column, passes, "accuracy"),
            suffix,
            **style,
        )
    trained = _any(results)["settings"]["task"]["pairs"]
    axes.axvline(trained, color="0.7", linewidth=0.8, linestyle="--")
    axes.annotate("trained", (trained, 0.01), xycoords=("data", "axes fraction"), fontsize=8, color="0.4")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)
    return figure


def residual_by_position(
    results: Results, boundaries: Sequence[tuple[int, str]] = (), bins: int = 32
) -> Figure:
    """q_geo along the sequence, as the paper's Figure "Direct theorem-facing residual contraction" (a)."""
    results = {v: mine for v, mine in results.items() if "log_q" in mine[0]}
    figure, axes = _panel("position", "residual ratio, geometric mean")
    length = len(_any(results)["log_q"])
    edges = np.linspace(0, length, min(bins, length) + 1).astype(int)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()

    def binned(result: dict[str, Any]) -> list[float]:
        log_q = result["log_q"]
        return [float(np.exp(np.mean(log_q[a:b]))) for a, b in pairwise(edges)]

    _bands(axes, results, lambda r: middles, binned)
    for position, text in boundaries:
        axes.axvline(position, color="0.6", linewidth=0.8, linestyle="--")
        axes.annotate(text, (position, 1.0), xycoords=("data", "axes fraction"), fontsize=8, color="0.4",
                      xytext=(2, -8), textcoords="offset points")  # fmt: skip
    return figure


def loss_by_position(results: Results, bins: int = 16) -> Figure:
    """Validation loss along the sequence."""
    figure, axes = _panel("position", "validation loss, nats a token")
    length = len(_any(results)["loss_by_position"])
    edges = np.linspace(0, length, bins + 1).astype(int)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    _bands(axes, results, lambda r: middles,
           lambda r: [float(np.mean(r["loss_by_position"][a:b])) for a, b in pairwise(edges)])  # fmt: skip
    return figure


def step_size_sweep(results: Results, metric: str) -> Figure:
    """A metric against eta, one line a variant and box; the plain baselines are level lines."""
    figure, axes = _panel("eta", metric.replace("_", " "))
    lines: dict[str, list[tuple[float, Any]]] = {}
    for variant, mine in results.items():
        if metric not in mine[0]:
            continue
        value = estimate([r[metric] for r in mine])
        if variant.eta is None:
            axes.axhspan(value.low, value.high, color="0.5", alpha=0.15, linewidth=0)
            axes.axhline(value.mean, color="0.4", linewidth=1, label=variant.label)
        else:
            lines.setdefault(Variant(variant.name, None, variant.bounds).label, []).append(
                (variant.eta, value)
            )
    for (label, points), color in zip(lines.items(), COLORS[1:]):
        x, values = zip(*sorted(points, key=lambda point: point[0]))
        low, high = [v.mean - v.low for v in values], [v.high - v.mean for v in values]
        axes.errorbar(x, [v.mean for v in values], [low, high], color=color, marker="o", markersize=3,
                      linewidth=1.2, capsize=2, label=label)  # fmt: skip
    smallest = min((e for points in lines.values() for e, _ in points if e > 0), default=1e-3)
    axes.set_xscale("symlog", linthresh=smallest, linscale=0.5)
    axes.legend(fontsize=8)
    return figure


def scale_heat_map(scale: Any, title: str, tokens: Sequence[tuple[int, str]] = ()) -> Figure:
    """d over features and time for one prompt, `[T, features]`; white is 1, no change."""
    figure, axes = _panel("position", "feature")
    reach = max(float(np.abs(scale - 1).max()), 1e-6)
    image = axes.imshow(scale.T, aspect="auto", cmap="RdBu_r", vmin=1 - reach, vmax=1 + reach,
                        interpolation="nearest", rasterized=True)  # fmt: skip
    axes.grid(False)
    axes.set_title(title, fontsize=9)
    for position, text in tokens:
        axes.axvline(position - 0.5, color="0.3", linewidth=0.8, linestyle="--")
        axes.annotate(
            text, (position, 0), fontsize=8, color="0.2", xytext=(2, -8), textcoords="offset points"
        )
    figure.colorbar(image, ax=axes, label="scale d", fraction=0.05)
    return figure


def bars(names: Sequence[str], values: Sequence[float], label: str) -> Figure:
    """Few numbers, the first in colour."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 0.5 + 0.36 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        places = np.arange(len(names))[::-1]
        axes.barh(places, values, color=[COLORS[1], *["#b8bfcb"] * (len(names) - 1)], height=0.62)
        axes.set_yticks(places, names)
        axes.bar_label(axes.containers[0], [f"{v:,.3g}" for v in values], padding=3, fontsize=8)  # type: ignore[arg-type]
        axes.set_xlabel(label)
        axes.grid(False)
        axes.margins(x=0.15)
    return figure


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element."""
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def save(figures: dict[str, Figure], folder: Path) -> None:
    """Every figure as name.svg and name.png."""
    with matplotlib.rc_context(STYLE):
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{name}.png", dpi=160)


def _bands(
    axes: Axes,
    results: Results,
    x_of: Callable[[dict[str, Any]], Sequence[float]],
    y_of: Callable[[dict[str, Any]], Sequence[float]],
    suffix: str = "",
    **style: Any,
) -> None:
    for (variant, mine), color in zip(results.items(), COLORS * len(results)):
        columns = [estimate(column) for column in zip(*(y_of(r) for r in mine))]
        x = x_of(mine[0])
        axes.plot(
            x, [c.mean for c in columns], color=color, linewidth=1.4, label=variant.label + suffix, **style
        )
        axes.fill_between(x, [c.low for c in columns], [c.high for c in columns], color=color, alpha=0.15,
                          linewidth=0)  # fmt: skip
    axes.legend(fontsize=8)


def _column(passes: int, name: str, result: dict[str, Any]) -> list[float]:
    return [g[name] for g in result["grid"] if g["passes"] == passes]


def _panel(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.1), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _any(results: Results) -> dict[str, Any]:
    return next(iter(results.values()))[0]
