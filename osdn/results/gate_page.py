"""The page of the write-gate study: what a bias of the write gate gains in each setting."""

from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from osdn.results.experiments import difference_of
from osdn.results.page import figures, section, table, write_page
from osdn.results.referee_page import (
    BUDGETS,
    DOTS,
    difference_table,
    dot_plot,
    significant,
    task_table,
    write_tables,
)
from osdn.results.tables import Table


def write_gate_page(path: Path, content: dict[str, Any], command: str = "osdn lab write-gate") -> Path:
    """Write the page of a study's result."""
    listed = "".join(f"<li>{escape(sentence)}</li>" for sentence in gate_verdicts(content))
    body = [f'<ul class="verdicts">{listed}</ul>']
    for task in tasks_of(content):
        part = of_task(content, task)
        tables = [gate_table(content, task, budget) for budget in (1.0, 0.5, 0.25)]
        plots = [(dot_plot(part, "delta_net"), f"Compared with a gate without a bias. {DOTS}")]
        body.append(section(task.capitalize(), *(table(t) for t in tables), figures(plots)))
        trained = [table(t) for t in write_tables(part)]
        body.append(section(f"What the trained writes do: {task}", *trained))
    body.append(section("Settings", table(task_table(content), heading=False)))
    return write_page(path, "The start of the write gate", f"<p>{escape(lead(content))}</p>", body, command)


def lead(content: dict[str, Any]) -> str:
    return (
        f"A plain DeltaNet of {content['layers']} layers whose write gate has no bias, or a learned one with "
        f"different initial values, in {len(content['trials'])} settings that each change one thing from a "
        f"base. {content['seeds']} seeds, learning rate {content['learning_rate']:g}. Differences are "
        f"relative to the gate without a bias."
    )


def tasks_of(content: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(trial["group"] for trial in content["trials"]))


def of_task(content: dict[str, Any], task: str) -> dict[str, Any]:
    """The part of a result that concerns one task, with trials named by what they change."""
    trials = [trial for trial in content["trials"] if trial["group"] == task]
    names = {trial["name"]: trial["change"] for trial in trials}
    renamed = [trial | {"name": trial["change"]} for trial in trials]
    parts = {
        key: [row | {"trial": names[row["trial"]]} for row in content[key] if row["trial"] in names]
        for key in ("rows", "writes")
    }
    return content | {"trials": renamed} | parts


def gate_table(content: dict[str, Any], task: str, budget: float) -> Table:
    """The differences between the biases in one task."""
    differences = difference_table(of_task(content, task), budget)
    return replace(differences, title=f"{task.capitalize()}, after {BUDGETS[budget]}")


def gate_verdicts(content: dict[str, Any]) -> list[str]:
    """For every task and bias: in how many settings it helps, where it does not, and if the gain fades."""
    verdicts = []
    for task in tasks_of(content):
        rows = of_task(content, task)["rows"]
        for name in dict.fromkeys(row["contestant"] for row in rows if row["difference"] is not None):
            at = {
                budget: [r for r in rows if r["contestant"] == name and r["budget"] == budget]
                for budget in BUDGETS
            }
            verdicts.append(_verdict(task, name, at[1.0], at[0.25]))
    return verdicts


def _verdict(task: str, name: str, full: list[dict[str, Any]], early: list[dict[str, Any]]) -> str:
    gains = [row for row in full if significant(row) and row["difference"]["mean"] > 0]
    losses = [row for row in full if significant(row) and row["difference"]["mean"] < 0]
    start = name.partition("bias=")[2]
    sentence = (
        f"{task.capitalize()}, a bias that starts at {start}: better in {len(gains)} of {len(full)} settings"
    )
    if losses:
        sentence += f", worse in {len(losses)} ({_listed(losses)})"
    unchanged = [row for row in full if row not in gains and row not in losses]
    if gains and unchanged:
        sentence += f", not significant after the correction in {_listed(unchanged)}"
    means = [fmean(row["difference"]["mean"] for row in rows) for rows in (early, full)]
    return (
        f"{sentence}; on average {means[0]:+.3f} after {BUDGETS[0.25]}, {means[1]:+.3f} after {BUDGETS[1.0]}."
    )


def _listed(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['trial']} ({difference_of(row['difference'])})" for row in rows)
