"""Figures of evaluations: bars of scores a model, and perplexity by position."""

from collections.abc import Mapping
from itertools import cycle

from matplotlib.figure import Figure

from osdn.evaluation.columns import Score

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974")


def bars(
    panels: Mapping[str, Mapping[str, Score]], printed: Mapping[str, Mapping[str, float]] | None = None
) -> Figure:
    """One panel of horizontal bars a metric, one bar a model with its standard error.

    A diamond is what the paper printed for a model.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for values in panels.values() for name in values))
    figure = Figure(figsize=(3.6 * columns, rows * (0.8 + 0.24 * len(names))), layout="constrained")
    for i, (title, values) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        shown = [name for name in names if name in values]
        errors = [values[name].error or 0.0 for name in shown]
        axes.barh(shown, [values[name].value for name in shown], color=COLOURS[0])
        axes.errorbar([values[name].value for name in shown], shown, xerr=errors, fmt="none", ecolor="0.2")
        marks = (printed or {}).get(title, {})
        theirs = [name for name in shown if name in marks]
        axes.scatter([marks[name] for name in theirs], theirs, marker="D", s=16, color=COLOURS[1], zorder=3)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
    if any((printed or {}).values()):
        figure.supxlabel("bars: measured, with standard errors; diamonds: the paper's figures", fontsize=8)
    return figure


def pg19(curves: Mapping[str, list[Score]]) -> Figure:
    """Perplexity by position, as in the paper's "Auxiliary PG-19 length-extrapolation diagnostic"."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for (name, scores), colour in zip(curves.items(), cycle(COLOURS)):
        places = [2 * i + 1 for i in range(len(scores))]
        values = [score.value for score in scores]
        axes.plot(places, values, color=colour, marker="o", ms=3, label=name)
        low, high = ([s.value + sign * (s.error or 0.0) for s in scores] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=colour, alpha=0.2, lw=0)
    axes.set(xlabel="position, thousands of tokens", ylabel="perplexity", xticks=range(0, 21, 4))
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
