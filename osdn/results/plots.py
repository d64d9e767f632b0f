"""Figures about models: training curves, scores, perplexity by position, the diagnostic, operator times."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from osdn.results.losses import loss_curve, smooth
from osdn.results.scores import Score
from osdn.results.style import GREY, INK, colours, legend, legend_label, panel, panels, save, styled

__all__ = [
    "contraction", "heads", "losses", "perplexity_by_position", "save", "scale_maps", "score_bars", "tasks",
]  # fmt: skip
T = TypeVar("T")
ABSURD = 1e4  # a score this large is printed instead of drawn

Diagnoses = Mapping[str, dict[str, Any]]  # contents of diagnosis.json by label


@styled
def losses(runs: Mapping[str, Sequence[dict[str, Any]]]) -> Figure:
    """Loss curves, as in the paper's "Token-vs-CE training trajectories", by label.

    The whole run is on the left on a logarithmic axis, its final quarter on the right on a linear one.
    """
    figure, [[whole, final]] = panels(1, 2, (9, 3.4 + 0.1 * len(runs)))
    curves = {label: loss_curve(lines) for label, lines in runs.items()}
    most = max(curve.tokens[-1] for curve in curves.values())
    unit, word = next(
        (u, w) for u, w in ((1e9, "billions"), (1e6, "millions"), (0, "thousands")) if most >= u
    )
    for (label, curve), colour in _coloured(curves):
        x, y = curve.tokens / (unit or 1e3), smooth(curve)
        last = x >= 0.75 * x[-1]
        name = f"{legend_label(label)}, {curve.final:.3f} at the end"
        whole.plot(x, y, lw=1.2, color=colour, label=name)
        final.plot(x[last], y[last], lw=1.2, color=colour)
        if curve.validation:
            steps, values = np.array(curve.validation).T
            for axes in (whole, final):
                in_range = steps >= (0 if axes is whole else 0.75 * curve.tokens[-1])
                axes.plot(
                    steps[in_range] / (unit or 1e3), values[in_range], "o", ms=3.5, mfc="white", color=colour
                )
    if any(curve.validation for curve in curves.values()):
        whole.plot([], [], "o", ms=3.5, mfc="white", color=GREY, label="validation")
    whole.set_yscale("log")
    whole.set_title("Whole run")
    final.set_title("Final quarter")
    for axes in (whole, final):
        axes.set(xlabel=f"{word} of tokens", ylabel="cross-entropy, nats per token")
        axes.yaxis.set_major_formatter("{x:.2f}")
        axes.yaxis.set_minor_formatter("{x:.1f}" if axes is whole else "")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


@styled
def score_bars(
    metrics: Mapping[str, Mapping[str, Score]], printed: Mapping[str, Mapping[str, float]]
) -> Figure:
    """Horizontal bars, one panel per metric and one bar per model with its standard error.

    Diamonds are the paper's figures.  An absurdly large value is printed instead of drawn.
    """
    across = min(3, len(metrics))
    down = -(-len(metrics) // across)
    labels = list(dict.fromkeys(label for values in metrics.values() for label in values))
    colour = colours(labels)
    figure, grid = panels(down, across, (3.6 * across, down * (0.8 + 0.24 * len(labels))))
    places = [axes for row in grid for axes in row]
    for axes, (metric, values) in zip(places, metrics.items()):
        shown = [label for label in labels if label in values]
        drawn = [label for label in shown if abs(values[label].value) < ABSURD]
        y = {label: -i for i, label in enumerate(shown)}
        axes.barh([y[x] for x in drawn], [values[x].value for x in drawn], color=[colour[x] for x in drawn])
        errors = [values[x].error or 0.0 for x in drawn]
        axes.errorbar(
            [values[x].value for x in drawn], [y[x] for x in drawn], xerr=errors, fmt="none", ecolor=INK
        )
        theirs = {label: x for label, x in printed.get(metric, {}).items() if label in y}
        axes.scatter(list(theirs.values()), [y[x] for x in theirs], marker="D", s=18, color="white",
                     edgecolors=INK, zorder=3)  # fmt: skip
        for label in set(shown) - set(drawn):
            words = f"{values[label].value:.1e}, not drawn"
            axes.annotate(words, (0, y[label]), (3, 0), xycoords=("axes fraction", "data"),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        axes.set_yticks(list(y.values()), [legend_label(label) for label in shown])
        axes.set_ylim(-len(shown) + 0.4, 0.6)
        axes.set_title(metric)
    for axes in places[len(metrics) :]:
        axes.set_axis_off()
    if any(printed.values()):
        figure.supxlabel("bars: measured, with standard errors; diamonds: the paper's figures", fontsize=8)
    return figure


@styled
def perplexity_by_position(curves: Mapping[str, list[Score]]) -> Figure:
    """Perplexity by position, as in the paper's "Auxiliary PG-19 length-extrapolation diagnostic"."""
    figure, axes = panel("position, thousands of tokens", "perplexity", (6.4, 3.4))
    for (label, scores), colour in _coloured(curves):
        places = [2 * i + 1 for i in range(len(scores))]
        axes.plot(places, [score.value for score in scores], color=colour, marker="o", ms=3,
                  label=legend_label(label))  # fmt: skip
        low, high = ([s.value + sign * (s.error or 0.0) for s in scores] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=colour, alpha=0.2, lw=0)
    values = [score.value for scores in curves.values() for score in scores]
    if max(values) > 100 * min(values):
        axes.set_yscale("log")
    axes.set_xticks(range(0, 21, 4))
    legend(axes, beside=True)
    return figure


@styled
def contraction(results: Diagnoses) -> Figure:
    """(a) q_geo by position, (b) overall: the paper's "Direct theorem-facing residual contraction".

    The labels of the bars in (b) name the colours of both.
    """
    size = (9, max(3.2, 0.8 + 0.3 * len(results)))
    figure, [[left, right]] = panels(1, 2, size, width_ratios=(3, 2))
    colour = colours(results)
    for label, result in results.items():
        _by_position(left, result["all"], colour[label], label)
    boundaries = [r["all"]["boundary"] for r in results.values() if r["all"]["boundary"] is not None]
    if boundaries:
        middle = sum(boundaries) / len(boundaries)
        left.axvline(middle, color=GREY, ls="--", lw=1)
        left.annotate("second reading", (middle, 1), (4, -4), xycoords=("data", "axes fraction"),
                      textcoords="offset points", va="top", fontsize=8, color=INK)  # fmt: skip
    left.set(xlabel="relative position", ylabel="$q_{geo}$", xlim=(0, 1), title="(a) by position")
    for i, (label, result) in enumerate(results.items()):
        q = result["all"]["q_geo"]
        right.barh(-i, q["value"], color=colour[label], height=0.7)
        right.errorbar(q["value"], -i, xerr=_whiskers(q), color=INK, capsize=3)
        right.annotate(f"{q['value']:.3f}", (q["high"], -i), (4, 0), textcoords="offset points",
                       va="center", fontsize=8)  # fmt: skip
    right.set_yticks([-i for i in range(len(results))], [legend_label(label) for label in results])
    right.margins(x=0.25)
    right.set(title="(b) overall", xlabel="$q_{geo}$")
    return figure


@styled
def tasks(results: Diagnoses) -> Figure:
    """q_geo by position, one panel per task."""
    names = sorted({task for result in results.values() for task in result["tasks"]})
    figure, [row] = panels(1, len(names), (3.4 * len(names) + 0.6, 3.0), sharey=True)
    colour = colours(results)
    for axes, task in zip(row, names):
        for label, result in results.items():
            if task in result["tasks"]:
                summary = result["tasks"][task]
                _by_position(axes, summary, colour[label], label)
                if summary["boundary"] is not None:
                    axes.axvline(summary["boundary"], color=GREY, ls="--", lw=1)
        axes.set(title=task, xlabel="relative position", xlim=(0, 1))
    row[0].set_ylabel("$q_{geo}$")
    legend(row[-1])
    return figure


@styled
def heads(results: Diagnoses) -> Figure:
    """q_geo of every layer and head."""
    figure, [row] = panels(1, len(results), (2.6 * len(results) + 1.6, 3.6), sharey=True)
    for axes, (label, result) in zip(row, results.items()):
        table = np.array(result["all"]["by_layer_and_head"], dtype=float)
        image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower")
        axes.set(title=legend_label(label), xlabel="head")
        _whole_numbers(axes)
    row[0].set_ylabel("layer")
    figure.colorbar(image, ax=row, label="$q_{geo}$")
    return figure


@styled
def scale_maps(results: Diagnoses) -> Figure:
    """The scale's mean and spread by layer and position, and the share of channels at the box."""
    results = {label: result for label, result in results.items() if result["scale"]}
    across = len(results)
    figure, grid = panels(3, across, (3.6 * across + 0.8, 7.6), sharex=True)
    for (label, result), column in zip(results.items(), zip(*grid)):
        d = result["scale"]
        mean, spread = np.array(d["mean"]), np.array(d["spread"])
        bound = 100 * (np.array(d["share_at_low"]) + np.array(d["share_at_high"]))
        reach = max(1e-3, float(np.abs(mean - 1).max()))
        maps = (
            (mean, "mean of $d$", {"cmap": "coolwarm", "vmin": 1 - reach, "vmax": 1 + reach}),
            (spread, "spread of $d$ over channels", {"cmap": "magma", "vmin": 0}),
            (bound, "% of channels at the box", {"cmap": "magma", "vmin": 0, "vmax": bound.max() or 1}),
        )
        for axes, (table, quantity, style) in zip(column, maps):
            extent = (0, 1, -0.5, len(table) - 0.5)
            image = axes.imshow(table, aspect="auto", origin="lower", extent=extent, **style)
            figure.colorbar(image, ax=axes, label=quantity)
            axes.set_ylabel("layer")
            _whole_numbers(axes)
        box = "no box" if d["bounds"] is None else f"box {d['bounds'][0]} to {d['bounds'][1]}"
        column[0].set_title(f"{legend_label(label)}, {box}")
        column[-1].set_xlabel("relative position")
    return figure


def diagnosis(results: Diagnoses) -> dict[str, Figure]:
    """All figures that these diagnoses have data for."""
    drawings = {"contraction": contraction(results), "tasks": tasks(results), "heads": heads(results)}
    if any(result["scale"] for result in results.values()):
        drawings["scale"] = scale_maps(results)
    return drawings


@styled
def operator_times(series: Mapping[str, Mapping[int, float]], title: str) -> Figure:
    """Milliseconds against tokens; "limit" is the time of the unavoidable arithmetic."""
    figure, axes = panel("tokens T", "milliseconds, forward", (6.4, 4.2))
    for (name, points), colour in _coloured(series):
        style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 4}
        if name == "limit":
            style = {"color": GREY, "linestyle": "--"}
        axes.loglog(list(points), list(points.values()), label=name, **style)
    axes.set_xticks(list(series["limit"]), [f"{t:,}" for t in series["limit"]])
    axes.minorticks_off()
    axes.set_title(title)
    axes.legend()
    return figure


def _by_position(axes: Axes, summary: dict[str, Any], colour: str, label: str) -> None:
    rows = [(i, row) for i, row in enumerate(summary["by_position"]) if row is not None]
    x = [(i + 0.5) / len(summary["by_position"]) for i, _ in rows]
    axes.plot(x, [row["value"] for _, row in rows], color=colour, label=legend_label(label), marker="o", ms=3)
    low, high = ([row[end] for _, row in rows] for end in ("low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)


def _whiskers(q: dict[str, float]) -> list[list[float]]:
    return [[max(0.0, q["value"] - q["low"])], [max(0.0, q["high"] - q["value"])]]


def _whole_numbers(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False)


def _coloured(items: Mapping[str, T]) -> Iterator[tuple[tuple[str, T], str]]:
    chosen = colours(items)
    return (((label, item), chosen[label]) for label, item in items.items())
