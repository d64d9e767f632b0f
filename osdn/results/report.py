"""One page with all results: the findings, then the paper's tables and figures in its order.

Only tables and models with results are shown; `everything` shows the paper's full grid.
"""

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from osdn.results import comparison as comparing
from osdn.results import plots
from osdn.results.columns import DIAGNOSTIC, GENERAL, PG19, TABLES, TRAINING, PaperTable
from osdn.results.comparison import Comparison, baseline
from osdn.results.contests import CONTESTS
from osdn.results.experiments import experiment_table, verdict
from osdn.results.page import figure, section, table, write_page
from osdn.results.scores import Score
from osdn.results.store import Store, model_key
from osdn.results.tables import Cell, Row, Table, number

# What the headline compares with a block's baseline: words, column, digits, unit, whether higher is better.
CLAIMS = (
    ("repeated recall", "repeated_change", 3, "", True),
    ("log perplexity", "nll_change", 3, "", False),
    ("final training loss", "loss_change", 3, "", False),
    ("speed", "throughput_change", 1, " %", True),
)


def write_report(store: Store, path: Path, everything: bool = False) -> Path:
    """Write the page."""
    comparisons = comparing.compare(store)
    body = [_headline(comparisons, store)]
    for spec in TABLES:
        body += _paper_section(spec, comparisons, store, everything)
    body += _contests(store)
    body += _experiments(store)
    body += [section(f"Operators: {name}", *parts) for name, parts in _operators(store).items()]
    body.append(section("What was read", table(_files(store, path), heading=False), *_unreadable(store)))
    models = len(store.models())
    lead = (
        f"{models} model{'s' * (models != 1)}, {len(store.files)} result files. Tables and figures are in "
        f"the paper's order and show what was measured here; the paper's own numbers are in grey italics."
    )
    return write_page(path, "Online Scaled DeltaNet: results", f"<p>{lead}</p>", body, "osdn report")


def _headline(comparisons: list[Comparison], store: Store) -> str:
    sentences = [sentence for comparison in comparisons for sentence in findings(comparison)]
    for _, content in store.experiments:
        metric = "loss" if any(row["metric"] == "loss" for row in content["rows"]) else "accuracy"
        if any(row["metric"] == metric and row["difference"] for row in content["rows"]):
            sentences.append(
                verdict(
                    content["rows"],
                    metric,
                    f"Lab, {content['experiment']} ({content['description']}), {metric}",
                )
            )
    for _, content in store.contests:
        contest = CONTESTS[content["kind"]]
        sentences += [f"{contest.title}: {sentence}" for sentence in contest.verdicts(content)]
    if not sentences:
        sentences = ["No model has a baseline to compare with yet."]
    return f'<ul class="verdicts">{"".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)}</ul>'


def findings(comparison: Comparison) -> Iterator[str]:
    """One sentence per model that has a baseline."""
    suffix = f" ({comparison.protocol})" if comparison.protocol else ""
    for model in comparison.models:
        base = baseline(model, comparison.models)
        if base is None:
            continue
        parts = [
            f"{words} {_change(model.scores[key], digits, unit, more)}"
            for words, key, digits, unit, more in CLAIMS
            if key in model.scores
        ]
        if parts:
            yield f"{model.label} against {base.label}{suffix}: {'; '.join(parts)}."


def _change(score: Score, digits: int, unit: str, more_is_better: bool) -> str:
    text = f"{number(score.value, digits, True)}{unit}"
    if score.error is None:
        return f"{text} (one run, error unknown)"
    text = f"{text} ± {number(score.error, digits)}{unit}"
    if abs(score.value) < 2 * score.error:
        return f"{text} (within two standard errors)"
    return f"{text} ({'better' if (score.value > 0) == more_is_better else 'worse'})"


def _paper_section(
    spec: PaperTable, comparisons: list[Comparison], store: Store, everything: bool
) -> list[str]:
    by_comparison = [comparing.paper_table(comparison, spec) for comparison in comparisons]
    tables = [t for t in by_comparison if t is not None]
    if everything and not tables:
        empty = comparisons[0] if comparisons else Comparison("", [], {})
        tables = [t for t in [comparing.paper_table(empty, spec, everything=True)] if t is not None]
    elif everything:
        first = next(i for i, t in enumerate(by_comparison) if t is not None)
        full = comparing.paper_table(comparisons[first], spec, everything=True)
        tables[0] = full if full is not None else tables[0]
    drawings = _figures(spec, comparisons, store)
    if not tables and not drawings:
        return []
    parts = [table(t, heading=t.title != spec.title) for t in tables]
    return [section(spec.title, *parts, *(figure(drawing) for drawing in drawings))]


def _figures(spec: PaperTable, comparisons: list[Comparison], store: Store) -> list[Figure]:
    labels = store.labels()
    if spec is DIAGNOSTIC:
        by_date = sorted(store.diagnoses, key=lambda diagnosis: diagnosis[1]["date"])
        newest = {labels[model_key(model)]: content for model, content in by_date}
        by_name = plots.diagnosis(newest) if newest else {}
        return [by_name[name] for name in ("contraction", "heads", "scale") if name in by_name]
    if spec is TRAINING:
        runs = {labels[model_key(run.model)]: run.lines for run in store.runs if run.lines}
        return [plots.losses(runs)] if runs else []
    name = "summary" if spec is GENERAL else "pg19" if spec is PG19 else ""
    drawings = [comparing.figures(comparison).get(name) for comparison in comparisons] if name else []
    return [drawing for drawing in drawings if drawing is not None]


def _contests(store: Store) -> list[str]:
    """The main table of every result of the referee and the write-gate study."""
    kinds = [content["kind"] for _, content in store.contests]
    sections = []
    for folder, content in store.contests:
        contest = CONTESTS[content["kind"]]
        where = f" — {folder}" if kinds.count(content["kind"]) > 1 else ""
        sections.append(section(f"{contest.title}{where}", *(table(t) for t in contest.tables(content, 1.0))))
    return sections


def _experiments(store: Store) -> list[str]:
    names = [content["experiment"] for _, content in store.experiments]
    sections = []
    for folder, content in store.experiments:
        name = f"Lab: {content['experiment']}"
        where = f" — {folder}" if names.count(content["experiment"]) > 1 else ""
        summary = experiment_table(content["rows"], content["description"])
        sections.append(section(f"{name}{where}", table(summary)))
    return sections


def _operators(store: Store) -> dict[str, list[str]]:
    by_device: dict[str, list[str]] = {}
    for content in store.operators:
        for timings in content["tables"]:
            by_device.setdefault(content["device"], []).append(table(operator_table(timings)))
    return by_device


def operator_table(content: dict[str, Any]) -> Table:
    """Milliseconds of the operators and their peers, and their ratios to the limit."""
    timings = content["ms"]
    columns = {"best ms": "min", "median ms": "median", "× limit": "ratio", "H100 data sheet": "implied"}
    columns = {title: key for title, key in columns.items() if any(key in row for row in timings.values())}
    peer = next((row["min"] for name, row in timings.items() if "transformers" in name), None)
    head = [*columns, *(["× transformers"] if peer else [])]
    rows = []
    if content.get("limit_ms"):
        limit = {"min": content["limit_ms"], "ratio": 1.0}
        cells = [Cell(_milliseconds(limit.get(key), key)) for key in columns.values()]
        rows.append(Row("limit", [*cells, *([Cell("")] if peer else [])], faint=True))
    for name, row in timings.items():
        cells = [Cell(_milliseconds(row.get(key), key)) for key in columns.values()]
        rows.append(Row(name, [*cells, *([Cell(f"{peer / row['min']:.1f}")] if peer else [])]))
    return Table(content["title"], head, rows)


def _milliseconds(x: float | None, key: str) -> str:
    return "" if x is None else f"{x:.{2 if key == 'ratio' else 3}f}"


def _files(store: Store, page: Path) -> Table:
    """Every file, with what was measured and when."""
    labels = store.labels()
    rows = []
    for file in store.files:
        measured = [m for m in store.measurements if m.file == file]
        models = ", ".join(dict.fromkeys(labels[model_key(m.model)] for m in measured))
        data = "; ".join(dict.fromkeys(str(m.data) for m in measured if m.data.source))
        protocol = ", ".join(dict.fromkeys(m.protocol for m in measured if m.protocol))
        cut = max((m.cut for m in measured), default=0)
        date = max((m.date for m in measured), default="")[:16].replace("T", " ")
        cells = [models, data, protocol, f"{cut:,}" if cut else "", date]
        rows.append(Row(os.path.relpath(file, page.parent), [Cell(text) for text in cells]))
    head = ["model", "data", "protocol", "truncated prompts", "date, UTC"]
    return Table("What was read", head, rows, left=range(5), links=True)


def _unreadable(store: Store) -> list[str]:
    if not store.unreadable:
        return []
    items = "".join(f"<li>{escape(str(p))}: {escape(why)}</li>" for p, why in store.unreadable.items())
    return [f"<p>These files could not be read and are left out:</p><ul>{items}</ul>"]
