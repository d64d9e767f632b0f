"""The contests of the lab, the referee and the write-gate study, as pages and documents show them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from osdn.results import gate_page, referee_page
from osdn.results.document import fill
from osdn.results.names import title
from osdn.results.style import save
from osdn.results.tables import Table, markdown

Content = dict[str, Any]


class Contest(NamedTuple):
    title: str
    command: str
    lead: Callable[[Content], str]
    verdicts: Callable[[Content], list[str]]
    tables: Callable[[Content, float], list[Table]]  # with a share of the budget
    explanations: Callable[[Content], list[Table]]
    figures: Callable[[Content], dict[str, Figure]]
    write_page: Callable[[Path, Content, str], Path]


CONTESTS = {
    "referee": Contest(
        "The referee",
        "osdn lab referee",
        referee_page.lead,
        referee_page.verdicts,
        lambda content, budget: [referee_page.difference_table(content, budget)],
        lambda content: [referee_page.weak_baseline_table(content), *referee_page.write_tables(content)],
        lambda content: {
            base: referee_page.dot_plot(content, base) for base in referee_page.baselines(content)
        },
        referee_page.write_referee,
    ),
    "write-gate": Contest(
        "The start of the write gate",
        "osdn lab write-gate",
        gate_page.lead,
        gate_page.gate_verdicts,
        lambda content, budget: [
            gate_page.gate_table(content, task, budget) for task in gate_page.tasks_of(content)
        ],
        lambda content: [],
        lambda content: {
            task: referee_page.dot_plot(gate_page.of_task(content, task), "delta_net")
            for task in gate_page.tasks_of(content)
        },
        gate_page.write_gate_page,
    ),
}


def in_markdown(content: Content, folder: str) -> str:
    """The findings of a contest, its tables at the full budget and at a quarter of it, and its figures."""
    contest = CONTESTS[content["kind"]]
    sentences = "\n".join(f"- {sentence}" for sentence in contest.verdicts(content))
    tables = [table for budget in (1.0, 0.25) for table in contest.tables(content, budget)]
    shown = markdown([*tables, *contest.explanations(content)], level=3)
    pictures = [f"![Differences: {title(name)}]({folder}/{name}.svg)" for name in contest.figures(content)]
    caption = f"*{referee_page.DOTS}*"
    return "\n\n".join([contest.lead(content), sentences, shown.rstrip("\n"), *pictures, caption]) + "\n"


def fill_document(content: Content, folder: Path) -> bool:
    """Put a result into `folder.md`, if it exists and has a place for it, and its figures into the folder."""
    contest = CONTESTS[content["kind"]]
    if not fill(folder.with_suffix(".md"), contest.command, in_markdown(content, folder.name)):
        return False
    save(contest.figures(content), folder, ("svg",))
    return True
