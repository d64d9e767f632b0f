"""The paper's tables for any set of results, in Markdown, LaTeX and CSV, and as figures.

Models that share a backbone and a shape form a block, as in the paper: differences are to the block's
baseline, and the best value of a block is bold.  What the paper printed for a model is below its own line.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from osdn.evaluation.columns import (
    MAIN,
    REPEATED,
    TABLES,
    Column,
    Score,
    Table,
    baseline_of,
    changes,
    derive,
    root_of_squares,
)
from osdn.evaluation.figures import bars, pg19
from osdn.evaluation.paper import BUCKETS, TITLES
from osdn.training.plot import drawable


@dataclass
class Model:
    """What is known of a model, from however many result files."""

    name: str
    checkpoint: str
    block: str
    baseline: bool
    folder: str  # of its results
    scores: dict[str, Score] = field(default_factory=dict)
    documents: dict[str, np.ndarray] = field(default_factory=dict)  # of the columns that are compared
    label: str = ""


@dataclass(frozen=True)
class Cell:
    score: Score | None
    best: bool = False


@dataclass(frozen=True)
class Row:
    label: str
    cells: list[Cell]
    first: bool  # of a block
    printed: bool = False  # by the paper


@dataclass(frozen=True)
class Comparison:
    """A table with the columns and the rows that there is something for."""

    title: str
    note: str
    columns: list[Column]
    rows: list[Row]


def number(x: float | None, digits: int, signed: bool = False) -> str:
    """A score as people read it."""
    if x is None:
        return "–"
    if abs(x) >= 1e5:
        return f"{x:.2e}"
    return f"{x:{'+' if signed else ''}.{digits}f}"


def read(paths: Iterable[Path]) -> list[Model]:
    """The models that result files are about, blocks together, a block's baseline first."""
    models: dict[tuple[Any, ...], Model] = {}
    speeds: dict[str, Score] = {}
    for path, content in _contents(paths):
        if content.get("kind") == "throughput":
            speeds |= {
                row["model"]: Score(row["change"])
                for row in content["rows"]
                if row.get("change") is not None and row.get("baseline") == baseline_of(row["model"])
            }
        elif content.get("kind") == "evaluation":
            model = _model(content, path)
            known = models.setdefault((model.name, model.checkpoint, *_versions(content)), model)
            known.scores |= _scores(content, path)
            for task in content.get("tasks", {}).values():
                known.documents |= {k: np.array(v, float) for k, v in task.get("by_document", {}).items()}
    found = list(models.values())
    names, checkpoints = [model.name for model in found], [model.checkpoint for model in found]
    for model in found:
        if names.count(model.name) == 1:
            model.label = title(model.name)
        else:
            model.label = model.checkpoint if checkpoints.count(model.checkpoint) == 1 else model.folder
        if model.name in speeds:
            model.scores["throughput_change"] = speeds[model.name]
        model.scores = derive(model.scores)
    for model in found:
        base = baseline(model, found)
        if base is not None:
            model.scores = {**model.scores, **_paired(model, base, changes(model.scores, base.scores))}
    blocks = list(dict.fromkeys(model.block for model in found))
    return sorted(found, key=lambda model: (blocks.index(model.block), not model.baseline))


def _paired(model: Model, base: Model, found: dict[str, Score]) -> dict[str, Score]:
    """Differences with the errors of paired documents, where both models have answered the same ones.

    Some documents are hard for every model, which a difference of two independent scores would count twice.
    """
    parts = {"repeated_change": REPEATED, "nll_change": ("wikitext_ppl", "lambada_ppl")}
    paired = {}
    for name, score in found.items():
        documents = [(model.documents.get(part), base.documents.get(part)) for part in parts[name]]
        error = root_of_squares(*(_paired_error(*pair) for pair in documents), scale=1 / len(documents))
        paired[name] = Score(score.value, score.error if error is None else error)
    return paired


def _paired_error(ours: np.ndarray | None, theirs: np.ndarray | None) -> float | None:
    """The standard error of a difference of means over documents [N], or of ratios to lengths [N, 2]."""
    if ours is None or theirs is None or ours.shape != theirs.shape or len(ours) < 2:
        return None
    if ours.ndim == 1:
        return float((ours - theirs).std(ddof=1) / math.sqrt(len(ours)))
    difference, lengths = ours[:, 0] - theirs[:, 0], ours[:, 1]
    residuals = difference - difference.sum() / lengths.sum() * lengths
    return float(math.sqrt((residuals**2).sum() * len(ours) / (len(ours) - 1)) / lengths.sum())


def _contents(paths: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; it should be a folder or file of `osdn eval`")
        found = 0
        for file in [path] if path.is_file() else sorted(path.rglob("*.json")):
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                continue
            if isinstance(content, dict) and content.get("kind") in ("evaluation", "throughput"):
                found += 1
                yield file, content
        if not found:
            raise ValueError(f"{path} holds no results; `osdn eval` writes them")


def _versions(content: dict[str, Any]) -> list[Any]:
    """What tells results of one checkpoint apart: other weights at its place, or only some documents."""
    settings = [task.get("settings", {}) for task in content.get("tasks", {}).values()]
    return [next((s[key] for s in settings if s.get(key) is not None), None) for key in ("weights", "limit")]


def _model(content: dict[str, Any], path: Path) -> Model:
    name = content["model"]
    base = baseline_of(name)
    return Model(
        name,
        content.get("checkpoint", name),
        content.get("block", base or name),
        content.get("baseline", base is None),
        str(path.parent),
    )


def _scores(content: dict[str, Any], path: Path) -> dict[str, Score]:
    """The measured scores of a file; averages are made anew when all files are read."""
    tasks = content.get("tasks")
    parts = tasks.values() if tasks else [content]
    try:
        return {
            key: Score(float(value), part.get("errors", {}).get(key))
            for part in parts
            for key, value in part["results"].items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a result of `osdn eval`: {error!r}") from error


def baseline(model: Model, models: list[Model]) -> Model | None:
    """The model that another is compared with: the first of its block without online scaling."""
    if model.baseline:
        return None
    return next((other for other in models if other.block == model.block and other.baseline), None)


def title(model: str) -> str:
    """A preset as the paper spells it.

    >>> title("osdn-apf-340m"), title("mine")
    ('OSDN-APF 340M', 'mine')
    """
    variant, _, size = model.rpartition("-")
    return f"{TITLES[variant]} {size.upper()}" if variant in TITLES else model


def compare(models: list[Model], table: Table) -> Comparison | None:
    """One of the paper's tables for these models; None if they have nothing for it."""
    columns = [c for c in table.columns if any(c.key in model.scores for model in models)]
    if not columns:
        return None
    rows: list[Row] = []
    previous = None
    for model in models:
        block = [m.scores for m in models if m.block == model.block]
        cells = [
            Cell(model.scores.get(c.key), _is_best(c, model.scores.get(c.key), [s.get(c.key) for s in block]))
            for c in columns
        ]
        rows.append(Row(model.label, cells, first=model.block != previous))
        previous = model.block
        printed = table.figures(model.name)
        if any(c.key in printed for c in columns):
            theirs = [Cell(Score(printed[c.key]) if c.key in printed else None) for c in columns]
            rows.append(Row("the paper's", theirs, first=False, printed=True))
    return Comparison(table.title, table.note, columns, rows)


def _is_best(column: Column, score: Score | None, others: list[Score | None]) -> bool:
    """Whether a score is the best of several, as far as its digits show."""
    values = [round(other.value, column.digits) for other in others if other is not None]
    if score is None or column.higher_is_better is None or len(values) < 2:
        return False
    return round(score.value, column.digits) == (max if column.higher_is_better else min)(values)


def comparisons(models: list[Model]) -> list[Comparison]:
    found = (compare(models, table) for table in TABLES)
    return [table for table in found if table is not None]


def heading(column: Column) -> str:
    arrow = {True: " ↑", False: " ↓", None: ""}[column.higher_is_better]
    return f"{column.title}{arrow}"


def markdown(tables: list[Comparison]) -> str:
    text = []
    for table in tables:
        head = ["", *map(heading, table.columns)]
        lines = [head, ["---", *["---:"] * len(table.columns)]]
        for row in table.rows:
            cells = [_plain(cell, column, "**", " ± ") for cell, column in zip(row.cells, table.columns)]
            label = row.label.replace("|", r"\|")
            lines.append([f"*{label}*" if row.printed else label, *cells])
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        text.append(f"## {table.title}\n\n{table.note}\n\n{body}")
    return "\n\n".join(text) + "\n"


def _plain(cell: Cell, column: Column, bold: str, between: str) -> str:
    if cell.score is None:
        return "–"
    text = number(cell.score.value, column.digits, column.signed)
    text = f"{bold}{text}{bold}" if cell.best else text
    error = cell.score.error
    return text if error is None else f"{text}{between}{number(error, column.digits)}"


def latex(tables: list[Comparison]) -> str:
    return "\n".join(map(_tabular, tables))


def _tabular(table: Comparison) -> str:
    """For the packages booktabs and, below each other, as the paper's."""
    head = " & ".join(["", *(rf"\textbf{{{_escape(heading(column))}}}" for column in table.columns)])
    lines = [rf"% {table.title}. {table.note}", rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}"]
    lines += [r"\toprule", rf"{head} \\"]
    for row in table.rows:
        cells = []
        for cell, column in zip(row.cells, table.columns):
            text = "--" if cell.score is None else number(cell.score.value, column.digits, column.signed)
            text = rf"\textbf{{{text}}}" if cell.best else text
            if cell.score is not None and cell.score.error is not None:
                text += rf" {{\tiny $\pm$ {number(cell.score.error, column.digits)}}}"
            cells.append(text)
        label = _escape(row.label)
        label = rf"\quad\textit{{{label}}}" if row.printed else label
        lines += [*([r"\midrule"] if row.first else []), rf"{' & '.join([label, *cells])} \\"]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _escape(text: str) -> str:
    marks = {mark: f"\\{mark}" for mark in "_%&#{}$"} | {"Δ": r"$\Delta$", "–": "--"}
    marks |= {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"}
    marks |= {"↑": r"$\uparrow$", "↓": r"$\downarrow$"}
    return "".join(marks.get(character, character) for character in text)


def comma_separated(tables: list[Comparison]) -> str:
    """One line a number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "model", "source", "column", "value", "standard_error", "best"])
    for table in tables:
        model = ""
        for row in table.rows:
            model = model if row.printed else row.label
            for cell, column in zip(row.cells, table.columns):
                if cell.score is not None:
                    source = "paper" if row.printed else "measured"
                    error = "" if cell.score.error is None else cell.score.error
                    writer.writerow(
                        [table.title, model, source, column.key, cell.score.value, error, int(cell.best)]
                    )
    return text.getvalue()


def write(models: list[Model], folder: Path) -> list[Path]:
    """All of it into a folder."""
    tables = comparisons(models)
    if not tables:
        raise ValueError("these results have no column of the paper's tables")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, text in (("md", markdown(tables)), ("tex", latex(tables)), ("csv", comma_separated(tables))):
        paths.append(folder / f"compare.{suffix}")
        paths[-1].write_text(text, encoding="utf-8")
    return paths + draw(models, folder)


def draw(models: list[Model], folder: Path) -> list[Path]:
    """The main columns as bars, and PG-19's curves where they are complete."""
    panels, printed = {}, {}
    names = {m.label: drawable(m.label) for m in models}
    for column in MAIN.columns:
        values = {names[m.label]: m.scores[column.key] for m in models if column.key in m.scores}
        if values:
            panels[heading(column)] = values
            figures = {names[m.label]: MAIN.figures(m.name).get(column.key) for m in models}
            printed[heading(column)] = {label: x for label, x in figures.items() if x is not None}
    curves = {
        names[m.label]: [m.scores[bucket] for bucket in BUCKETS]
        for m in models
        if all(bucket in m.scores for bucket in BUCKETS)
    }
    drawings = {"summary": bars(panels, printed)} if panels else {}
    if curves:
        drawings["pg19"] = pg19(curves)
    paths = [folder / f"{name}.{suffix}" for name in drawings for suffix in ("svg", "png")]
    for path in paths:
        drawings[path.stem].savefig(path, dpi=150)
    return paths
