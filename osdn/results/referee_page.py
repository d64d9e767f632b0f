"""The referee's page: what beats a tuned plain delta rule and where, then the tuning and the writes.

All of the text follows from the file that the referee writes.  A positive difference is always better.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from osdn.results.experiments import difference_of, estimate_of
from osdn.results.names import title
from osdn.results.page import figures, section, table, write_page
from osdn.results.style import GREY, colours, legend_label, panel, styled
from osdn.results.tables import Cell, Row, Table

LEVEL = 0.05
BUDGETS = {0.25: "a quarter of the budget", 0.5: "half of the budget", 1.0: "the full budget"}
Rows = Sequence[dict[str, Any]]


def write_referee(path: Path, content: dict[str, Any], command: str = "osdn lab referee") -> Path:
    """Write the page of a referee's result."""
    sentences = verdicts(content)
    listed = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    tables = [difference_table(content, budget) for budget in (1.0, 0.5, 0.25)]
    plots = [(dot_plot(content, base), f"Compared with {title(base)}. {DOTS}") for base in baselines(content)]
    body = [
        f'<ul class="verdicts">{listed}</ul>',
        section("Contestants by task", *(table(t) for t in tables)),
        section("Differences with intervals", figures(plots)),
        section("What tuning chose", table(tuning_table(content)), table(gate_table(content))),
        section("What only helps a weak baseline", table(weak_baseline_table(content), heading=False)),
        section("What the trained writes do", *(table(t) for t in write_tables(content))),
        section("Tasks", table(task_table(content), heading=False)),
        section("Sizes", table(size_table(content), heading=False)),
    ]
    return write_page(path, "The referee", f"<p>{escape(lead(content))}</p>", body, command)


def lead(content: dict[str, Any]) -> str:
    names = list(dict.fromkeys(row["contestant"] for row in content["rows"]))
    return (
        f"{len(names)} contestants on {len(baselines(content))} backbones, {len(content['trials'])} tasks, "
        f"{content['layers']} layers of width {content['width']}. Each contestant's learning rate and "
        f"initial gate bias were tuned on one grid, with {_count(len(content['tuning_seeds']), 'seed')}; "
        f"then it was judged on {content['seeds']} others. Differences are relative to the plain delta rule "
        f"of the same backbone, tuned in the same way."
    )


def baselines(content: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["baseline"] for row in content["rows"]))


def significant(row: dict[str, Any]) -> bool:
    """Whether a difference survives the correction and its interval excludes zero."""
    d = difference_of(row["difference"])
    return d is not None and row["adjusted"] <= LEVEL and (d.low > 0 or d.high < 0)


def verdicts(content: dict[str, Any]) -> list[str]:
    """The conclusions: what holds more, what only learned faster, and what is worse."""
    at = {
        budget: {(r["trial"], r["contestant"]): r for r in content["rows"] if r["budget"] == budget}
        for budget in BUDGETS
    }
    compared = [cell for cell, row in at[1.0].items() if row["difference"] is not None]
    differing = {budget: [cell for cell in compared if significant(at[budget][cell])] for budget in BUDGETS}

    def better(budget: float) -> list[tuple[str, str]]:
        return [cell for cell in differing[budget] if at[budget][cell]["difference"]["mean"] > 0]

    more, less = better(1.0), [cell for cell in differing[1.0] if cell not in better(1.0)]
    early = [cell for cell in better(0.25) if cell not in more]
    count = f"{len(compared)} comparisons, {content['seeds']} seeds, corrected by Holm's method"
    if not more:
        sentences = [f"With the full budget, nothing beats the tuned plain delta rule ({count})."]
    else:
        sentences = [
            f"Better than the tuned plain rule with the full budget ({count}): {_in_words(at[1.0], more)}."
        ]
    if early:
        sentences.append(
            f"Learned faster, but holds no more (better after a quarter of the budget, not measurably "
            f"after all of it): {_in_words(at[0.25], early)}."
        )
    if less:
        sentences.append(f"Worse with the full budget: {_in_words(at[1.0], less)}.")
    if broken := [cell for cell in compared if not math.isfinite(at[1.0][cell]["difference"]["mean"])]:
        listed = ", ".join(f"{title(name)} on {trial}" for trial, name in broken)
        sentences.append(f"Not finite in some seed, so not compared: {listed}.")
    elif not differing[1.0]:
        sentences.append("Nothing is measurably worse either.")
    return sentences


SPELLED_OUT = 6  # a sentence with more differences than this leaves out their intervals


def _in_words(rows: dict[tuple[str, str], dict[str, Any]], cells: Sequence[tuple[str, str]]) -> str:
    """For each contestant, its tasks and differences; with intervals unless there are many."""
    parts = []
    for name in dict.fromkeys(contestant for _, contestant in cells):
        tasks = [trial for trial, contestant in cells if contestant == name]
        differences = [difference_of(rows[trial, name]["difference"]) for trial in tasks]
        spelled = [
            str(d) if len(cells) <= SPELLED_OUT or d is None else f"{d.mean:+.3f}" for d in differences
        ]
        parts.append(f"{title(name)} on {', '.join(f'{t} ({d})' for t, d in zip(tasks, spelled))}")
    return "; ".join(parts)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def difference_table(content: dict[str, Any], budget: float) -> Table:
    """The values of the plain rules, and below each the differences of its contestants."""

    def cell(row: dict[str, Any]) -> Cell:
        d = difference_of(row["difference"])
        if d is None:
            return Cell(f"{row['value']['mean']:.3f}")
        if not math.isfinite(d.mean):
            return Cell("not finite", good=False)
        sure = significant(row)
        mark = "★ " if sure else "· " if row["t_p"] <= LEVEL else ""
        return Cell(f"{mark}{d.mean:+.3f}", best=sure, good=d.mean > 0 if sure else None)

    rows = [row for row in content["rows"] if row["budget"] == budget]
    note = ""
    if budget == 1:
        note = (
            "Values of the plain rules; differences of the others, positive where they do better. ★ and "
            "colour: significant after correcting for all comparisons at one budget. A dot: p ≤ 0.05 before "
            f"the correction, which happens by chance in {LEVEL:.0%} of the cells."
        )
    return _matrix(f"After {BUDGETS[budget]}", content, rows, cell, note)


def _matrix(
    name: str, content: dict[str, Any], records: Rows, cell: Callable[[dict[str, Any]], Cell], note: str = ""
) -> Table:
    """Contestants by task, with a rule above each backbone."""
    trials = [trial["name"] for trial in content["trials"]]
    by_cell = {(row["contestant"], row["trial"]): row for row in records}
    names = list(dict.fromkeys(row["contestant"] for row in content["rows"]))
    rows = [
        Row(
            f"{_label(n)}{' (plain)' * (n in baselines(content))}",
            [cell(by_cell[n, trial]) for trial in trials],
            rule=n in baselines(content),
        )
        for n in names
    ]
    return Table(name, trials, rows, note)


def _label(name: str) -> str:
    """A name that can only wrap before the plus."""
    return title(name).replace("+", " +\N{NO-BREAK SPACE}")


def tuning_table(content: dict[str, Any]) -> Table:
    def cell(row: dict[str, Any]) -> Cell:
        bias = "–" if row["beta_bias"] is None else f"{row['beta_bias']:g}"
        return Cell(f"{row['learning_rate']:g}", bias)

    note = (
        "The learning rate and, in small print, the initial bias of the write gate; – is a gate without one."
    )
    return _matrix("Learning rate and initial bias of the write gate", content, content["tuned"], cell, note)


def gate_table(content: dict[str, Any]) -> Table:
    def cell(row: dict[str, Any]) -> Cell:
        return Cell(f"{row['score'] - row['score_without_bias']:+.3f}")

    note = "On the tuning seeds, at half of the budget. The best choice counts, so this is never negative."
    return _matrix("Gain from a bias of the write gate", content, content["tuned"], cell, note)


def weak_baseline_table(content: dict[str, Any]) -> Table:
    """Differences from the plain rule without and with tuned gates, on the tuning seeds."""
    baseline = {row["contestant"]: row["baseline"] for row in content["rows"]}
    by_cell = {(row["contestant"], row["trial"]): row for row in content["tuned"]}

    def cell(row: dict[str, Any]) -> Cell:
        plain, scores = by_cell[baseline[row["contestant"]], row["trial"]], ("score_without_bias", "score")
        if plain is row:
            untuned, tuned = (f"{row[score]:.3f}" for score in scores)
        else:
            untuned, tuned = (f"{row[score] - plain[score]:+.3f}" for score in scores)
        return Cell(untuned, f"({tuned})")

    note = (
        "Scores of the plain rules and differences of the others if no write gate has a bias and, in "
        "brackets, if each has the better of its two starts. More is better; the score of text is minus the "
        "loss. On the tuning seeds, with half of the budget. A gain that is gone in brackets only helps a "
        "weak baseline."
    )
    return _matrix("Against an untuned and a tuned write gate", content, content["tuned"], cell, note)


def write_tables(content: dict[str, Any]) -> list[Table]:
    """Mean write strength, scale of the write keys and residual ratio of the trained models."""
    quantities = {
        "beta": "Mean write strength beta",
        "key_scale": "Mean scale of the write keys, ⟨w, k⟩ / ⟨k, k⟩",
        "q_geo": "Residual ratio, geometric mean",
    }
    tables = []
    for key, name in quantities.items():

        def cell(row: dict[str, Any], key: str = key) -> Cell:
            return Cell(f"{row[key]:.3f}") if key in row else Cell()

        lacking = any(key not in row for row in content["writes"])
        tables.append(_matrix(name, content, content["writes"], cell, LACKING[key] if lacking else ""))
    return tables


LACKING = {
    "beta": "–: the rule has no single write strength (GDN-2 has one gate per channel).",
    "key_scale": "–: the rule reads and writes with different keys (Comba and GDN-2).",
    "q_geo": "–: the write does not shrink the error it was computed from (Comba reads before the decay).",
}


def task_table(content: dict[str, Any]) -> Table:
    rows = []
    for trial in content["trials"]:
        shape = {k: trial[k] for k in ("width", "heads") if k in trial}
        settings = ", ".join(
            f"{k.replace('_', ' ')} {v}" for k, v in (shape | trial["task"]).items() if v not in ("", 0)
        )
        worth = f"{trial['metric']}, {'lower' if trial['lower_is_better'] else 'higher'} is better"
        sizes = f"{trial['steps']} × {trial['batch']}"
        rows.append(
            Row(trial["name"], [Cell(worth), Cell(sizes), Cell(f"{trial['write_scale']:g}"), Cell(settings)])
        )
    return Table("Tasks", ["measured", "steps × batch", "strengths up to", "settings"], rows, left=(0, 3))


def size_table(content: dict[str, Any]) -> Table:
    """Parameters of every contestant, and how many more than the plain rule of its backbone it has."""
    baseline = {row["contestant"]: row["baseline"] for row in content["rows"]}
    rows = []
    for name, count in content["parameters"].items():
        plain = content["parameters"][baseline[name]]
        more = "" if name == baseline[name] else f"{100 * (count - plain) / plain:+.1f} %"
        more = "same" if more and count == plain else more
        label = f"{_label(name)}{' (plain)' * (not more)}"
        rows.append(Row(label, [Cell(f"{count:,}"), Cell(more)], rule=not more))
    note = "With the vocabulary of the first task. The matrix state is the same for a whole backbone."
    return Table("Sizes", ["parameters", "more than plain"], rows, note)


DOTS = "Filled: the full budget; hollow: a quarter of it. Lines are 95 % intervals over seeds."


@styled
def dot_plot(content: dict[str, Any], base: str) -> Figure:
    """Differences of one backbone's contestants, by task."""
    rows = [row for row in content["rows"] if row["baseline"] == base and row["difference"] is not None]
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    trials = [trial["name"] for trial in content["trials"]]
    figure, axes = panel(
        "difference, positive where better", size=(4.8, 1.2 + len(trials) * (0.12 + 0.11 * len(names)))
    )
    colour = colours(names)
    for row in rows:
        if row["budget"] not in (0.25, 1.0):
            continue
        full, i = row["budget"] == 1.0, names.index(row["contestant"])
        y = trials.index(row["trial"]) + (i - (len(names) - 1) / 2) * 0.8 / max(1, len(names))
        y += 0.0 if full else 0.06
        d, own = estimate_of(row["difference"]), colour[row["contestant"]]
        axes.plot([d.low, d.high], [y, y], color=own, linewidth=1.0, alpha=0.9 if full else 0.35)
        label = legend_label(row["contestant"]) if full and row["trial"] == trials[0] else None
        fill = own if full else "white"
        axes.plot(d.mean, y, "o", color=own, markersize=4, markerfacecolor=fill, label=label)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(np.arange(len(trials)), trials)
    axes.set_ylim(len(trials) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    for i in range(1, len(trials)):
        axes.axhline(i - 0.5, color=GREY, linewidth=0.4, alpha=0.5)
    figure.legend(loc="outside upper left", ncol=2)  # above the panel, where it hides no interval
    return figure
