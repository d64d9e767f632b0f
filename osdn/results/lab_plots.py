"""Figures of the lab's experiments: means over seeds as lines, their bootstrap intervals as bands.

Results map the label of a variant to the contents of its result files, one per seed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from osdn.results.statistics import estimate
from osdn.results.style import GREY, INK, colours, legend, legend_label, panel, panels, styled

Results = Mapping[str, Sequence[dict[str, Any]]]


@styled
def learning_curves(results: Results, quantity: str) -> Figure:
    """Loss or accuracy during training."""
    figure, axes = panel("training step", f"training {quantity}")
    _bands(
        axes, results, lambda r: [p["step"] for p in r["curve"]], lambda r: [p[quantity] for p in r["curve"]]
    )
    return figure


@styled
def accuracy_by_pairs(results: Results) -> Figure:
    """Recall against the number of pairs, one line style per number of passes."""
    figure, axes = panel("key–value pairs", "accuracy")
    last = max(g["passes"] for g in _any(results)["grid"])
    for passes in range(1, last + 1):
        style = "-" if passes == last else ":"
        columns = (partial(_column, passes, "pairs"), partial(_column, passes, "accuracy"))
        shown: dict[str, Any] = {"linestyle": style, "marker": "o", "markersize": 3}
        _bands(axes, results, *columns, labelled=passes == last, **shown)
    for passes in range(1, last + 1 if last > 1 else 1):  # colours are the models', line styles the passes'
        style = "-" if passes == last else ":"
        axes.plot([], [], color=GREY, linestyle=style, label=f"{passes} pass{'es' * (passes > 1)}")
    trained = _any(results)["settings"]["task"]["pairs"]
    axes.axvline(trained, color=GREY, linewidth=0.8, linestyle="--")
    axes.annotate("trained", (trained, 0.01), xycoords=("data", "axes fraction"), fontsize=8, color=INK)
    axes.set_ylim(0, 1.02)
    legend(axes)
    return figure


@styled
def accuracy_by_length(results: Results) -> Figure:
    """Accuracy at the trained length and at its multiples."""
    trained = _any(results)["settings"]["task"]["length"]
    figure, axes = panel("tokens", "accuracy")
    factors = [f for f in (1, 2, 4, 8) if f == 1 or f"accuracy_{f}x" in _any(results)]
    names = ["accuracy" if f == 1 else f"accuracy_{f}x" for f in factors]
    _bands(axes, results, lambda r: [f * trained for f in factors], lambda r: [r[name] for name in names],
           marker="o", markersize=3)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([f * trained for f in factors], [str(f * trained) for f in factors])
    axes.set_ylim(0, 1.02)
    return figure


@styled
def accuracy_by_depth(results: Results) -> Figure:
    """One map per model: accuracy by the depth of the needle and the length of the haystack."""
    figure, [row] = panels(1, len(results), (1.3 + 1.9 * len(results), 2.6), sharey=True)
    grid = _any(results)["grid"]
    lengths, depths = (list(dict.fromkeys(g[name] for g in grid)) for name in ("length", "depth"))
    for axes, (label, runs) in zip(row, results.items()):
        means = np.mean([[g["accuracy"] for g in r["grid"]] for r in runs], 0)
        image = axes.imshow(means.reshape(len(lengths), len(depths)).T, vmin=0, vmax=1, aspect="auto",
                            cmap="viridis")  # fmt: skip
        axes.grid(False)
        axes.set_title(legend_label(label), fontsize=9)
        axes.set_xticks(range(len(lengths)), [str(n) for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
        axes.set_xlabel("tokens")
    row[0].set_ylabel("depth")
    figure.colorbar(image, ax=row, label="accuracy", fraction=0.05)
    return figure


@styled
def residual_by_position(
    results: Results, boundaries: Sequence[tuple[int, str]] = (), bins: int = 32
) -> Figure:
    """q_geo along the sequence, as in the paper's Figure "Direct theorem-facing residual contraction" (a)."""
    results = {v: runs for v, runs in results.items() if "log_q" in runs[0]}
    figure, axes = panel("position", "residual ratio, geometric mean")
    length = len(_any(results)["log_q"])
    edges = np.linspace(0, length, min(bins, length) + 1).astype(int)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()

    def binned(result: dict[str, Any]) -> list[float]:
        log_q = result["log_q"]
        return [float(np.exp(np.mean(log_q[a:b]))) for a, b in pairwise(edges)]

    _bands(axes, results, lambda r: middles, binned)
    for position, text in boundaries:
        axes.axvline(position, color=GREY, linewidth=0.8, linestyle="--")
        axes.annotate(text, (position, 1.0), xycoords=("data", "axes fraction"), fontsize=8, color=INK,
                      xytext=(2, -8), textcoords="offset points")  # fmt: skip
    return figure


@styled
def loss_by_position(results: Results, bins: int = 16) -> Figure:
    """Validation loss along the sequence."""
    figure, axes = panel("position", "validation loss, nats per token")
    length = len(_any(results)["loss_by_position"])
    edges = np.linspace(0, length, bins + 1).astype(int)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    _bands(axes, results, lambda r: middles,
           lambda r: [float(np.mean(r["loss_by_position"][a:b])) for a, b in pairwise(edges)])  # fmt: skip
    return figure


@styled
def step_size_sweep(
    lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]], levels: Results, metric: str
) -> Figure:
    """A metric against eta: `lines` has pairs of eta and values by label, `levels` the plain baselines."""
    figure, axes = panel("eta", metric.replace("_", " "))
    colour = colours([*levels, *lines])
    for label, runs in levels.items():
        value = estimate([run[metric] for run in runs])
        axes.axhspan(value.low, value.high, color=colour[label], alpha=0.15, linewidth=0)
        axes.axhline(value.mean, color=colour[label], linewidth=1, label=legend_label(label))
    for label, points in lines.items():
        x, values = zip(*sorted((eta, estimate(scores)) for eta, scores in points))
        low, high = [v.mean - v.low for v in values], [v.high - v.mean for v in values]
        axes.errorbar(x, [v.mean for v in values], [low, high], color=colour[label], marker="o", markersize=3,
                      linewidth=1.2, capsize=2, label=legend_label(label))  # fmt: skip
    smallest = min((e for points in lines.values() for e, _ in points if e > 0), default=1e-3)
    axes.set_xscale("symlog", linthresh=smallest, linscale=0.5)
    legend(axes)
    return figure


@styled
def scale_heat_map(scale: Any, title: str, tokens: Sequence[tuple[int, str]] = ()) -> Figure:
    """d over features and time for one prompt, `[T, features]`; white is 1, no change."""
    figure, axes = panel("position", "feature")
    reach = max(float(np.abs(scale - 1).max()), 1e-6)
    image = axes.imshow(scale.T, aspect="auto", cmap="RdBu_r", vmin=1 - reach, vmax=1 + reach,
                        interpolation="nearest", rasterized=True)  # fmt: skip
    axes.grid(False)
    axes.set_title(title, fontsize=9)
    for position, text in tokens:
        axes.axvline(position - 0.5, color=GREY, linewidth=0.8, linestyle="--")
        axes.annotate(text, (position, 0), fontsize=8, color=INK, xytext=(2, -8), textcoords="offset points")
    figure.colorbar(image, ax=axes, label="scale d", fraction=0.05)
    return figure


@styled
def speed_bars(names: Sequence[str], values: Sequence[float], label: str) -> Figure:
    """A few numbers, printed beside their bars; peers are grey."""
    figure, axes = panel(label, size=(4.6, 0.6 + 0.36 * len(names)))
    places = np.arange(len(names))[::-1]
    shades = ["#b8bfcb" if "transformers" in name or name == "reference" else "#2a6fbb" for name in names]
    axes.barh(places, values, color=shades, height=0.62)
    axes.set_yticks(places, [legend_label(name) for name in names])
    axes.bar_label(axes.containers[0], [f"{v:,.3g}" for v in values], padding=3, fontsize=8)  # type: ignore[arg-type]
    axes.grid(False)
    axes.margins(x=0.15)
    return figure


def _bands(
    axes: Axes,
    results: Results,
    x_of: Callable[[dict[str, Any]], Sequence[float]],
    y_of: Callable[[dict[str, Any]], Sequence[float]],
    labelled: bool = True,
    **style: Any,
) -> None:
    colour = colours(results)
    for label, runs in results.items():
        columns = [estimate(column) for column in zip(*(y_of(r) for r in runs))]
        x = x_of(runs[0])
        axes.plot(
            x,
            [c.mean for c in columns],
            color=colour[label],
            linewidth=1.4,
            label=legend_label(label) if labelled else None,
            **style,
        )
        low, high = [c.low for c in columns], [c.high for c in columns]
        axes.fill_between(x, low, high, color=colour[label], alpha=0.15, linewidth=0)
    legend(axes)


def _column(passes: int, name: str, result: dict[str, Any]) -> list[float]:
    return [g[name] for g in result["grid"] if g["passes"] == passes]


def _any(results: Results) -> dict[str, Any]:
    return next(iter(results.values()))[0]
