"""The paper's tables, filled with whatever was measured.

There is one table per protocol, one column per data set and one row per model: numbers that were measured
differently never share a column.  The models of a block are listed together; differences are relative to the
block's baseline, the best value of a block is bold, and the paper's figures for a model are in the row below
it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from osdn.models import PRESETS
from osdn.models.identity import Identity
from osdn.results import plots
from osdn.results.columns import ABLATIONS, MAIN, PG19, TABLES, Column, PaperTable
from osdn.results.names import title
from osdn.results.paper import BUCKETS
from osdn.results.scores import Score, changes, derive, difference
from osdn.results.store import Data, Measurement, Store, model_key
from osdn.results.tables import Row, Table, comma_separated, latex, markdown, score_cell

THE_PAPERS = "the paper's"


@dataclass
class Model:
    """One model under one protocol."""

    identity: Identity
    label: str
    scores: dict[str, Score] = field(default_factory=dict)
    documents: dict[str, np.ndarray] = field(default_factory=dict)
    cut: int = 0

    @property
    def name(self) -> str:
        """What the paper would call it."""
        return self.identity.preset or self.identity.model


@dataclass
class Comparison:
    """All models measured under one protocol."""

    protocol: str
    models: list[Model]
    editions: dict[str, Data]  # the data of each column

    def best(self, column: Column, model: Model) -> bool:
        """Whether a model has the best value of its block, at the number of digits shown."""
        block = [m for m in self.models if m.identity.block == model.identity.block]
        values = [round(m.scores[column.key].value, column.digits) for m in block if column.key in m.scores]
        if column.key not in model.scores or column.better is None or len(values) < 2:
            return False
        return round(model.scores[column.key].value, column.digits) == column.better(values)


def compare(store: Store) -> list[Comparison]:
    """One comparison per protocol, the standard one first."""
    by_protocol: dict[str, list[Measurement]] = defaultdict(list)
    for measurement in store.measurements:
        by_protocol[measurement.protocol].append(measurement)
    return [_comparison(store, name, by_protocol[name]) for name in sorted(by_protocol)]


def _comparison(store: Store, protocol: str, measurements: list[Measurement]) -> Comparison:
    columns, editions = _editions(measurements)
    labels = store.labels()
    models = {model_key(m): Model(m, labels[model_key(m)]) for m in store.models()}
    for measurement, column in zip(measurements, columns):
        model = models[model_key(measurement.model)]
        model.scores[column] = measurement.score
        model.cut += measurement.cut
        if measurement.documents is not None:
            model.documents[column] = measurement.documents
    measured = [model for model in models.values() if model.scores]
    for model in measured:
        model.scores = derive(model.scores)
    for model in measured:
        base = baseline(model, measured)
        if base is not None:
            model.scores |= changes(model.scores, base.scores, model.documents, base.documents)
            if "final_loss" in model.scores and "final_loss" in base.scores:
                model.scores["loss_change"] = difference(
                    model.scores["final_loss"], base.scores["final_loss"]
                )
    return Comparison(protocol, _with_timed_presets(measured), editions)


def _editions(measurements: list[Measurement]) -> tuple[list[str], dict[str, Data]]:
    """The column of each measurement; the same key measured on other data gets its own column, `fda (2)`.

    The data that most models were measured on keeps the plain name.
    """
    groups: dict[str, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for m in measurements:
        groups[m.column][m.data.digest or m.data.source].append(m)
    names: dict[tuple[str, str], str] = {}
    editions: dict[str, Data] = {}
    for column, by_data in groups.items():
        order = sorted(by_data, key=lambda d: (-len(by_data[d]), -(by_data[d][0].data.documents or 0), d))
        for i, digest in enumerate(order):
            name = column if i == 0 else f"{column} ({i + 1})"
            names[column, digest] = name
            editions[name] = by_data[digest][0].data
    return [names[m.column, m.data.digest or m.data.source] for m in measurements], editions


def _with_timed_presets(models: list[Model]) -> list[Model]:
    """Speed does not depend on the weights, so the models trained from a preset get the preset's timing."""
    trained = [m for m in models if m.identity.weights is not None]
    merged = []
    for model in models:
        mates = [m for m in trained if m.identity.preset is not None and m.identity.preset == model.name]
        if model.identity.weights is not None or not mates:
            merged.append(model)
        for mate in mates if model.identity.weights is None else ():
            mate.scores = {**model.scores, **mate.scores}
    return merged


def baseline(model: Model, models: Iterable[Model]) -> Model | None:
    """The model to compare with: the first of the same block without online scaling."""
    if model.identity.baseline:
        return None
    return next((m for m in models if m.identity.block == model.identity.block and m.identity.baseline), None)


def paper_table(comparison: Comparison, spec: PaperTable, everything: bool = False) -> Table | None:
    """One of the paper's tables for these models, or None if they have no results for it.

    With `everything`, columns and models without results are included too.
    """
    models = [m for m in comparison.models if spec is not ABLATIONS or _near_an_ablation(m, comparison)]
    columns = _columns(spec, models, comparison, everything)
    models = [m for m in models if any(c.key in m.scores for c in columns)]
    if not columns or not (models or everything):
        return None
    rows: list[Row] = []
    block = None
    for model in models:
        cells = [
            score_cell(model.scores.get(c.key), c.digits, c.signed, comparison.best(c, model))
            for c in columns
        ]
        rows.append(Row(model.label, cells, rule=model.identity.block != block))
        block = model.identity.block
        rows += _printed(spec, columns, model.name)
    if everything:
        with_results = {model.name for model in models}
        for name in spec.models():
            if name not in with_results:
                rows.append(Row(title(name), [score_cell(None, 0)] * len(columns), rule=name in BASELINES))
                rows += _printed(spec, columns, name)
    name = spec.title.replace("PG-19", "Books") if _are_books(columns[0], comparison) else spec.title
    full = f"{name} ({comparison.protocol})" if comparison.protocol else name
    note = f"{spec.note} {_footnotes(columns, comparison)}".strip()
    heads = [heading(c) for c in columns]
    return Table(full, heads, rows, note, keys=[c.key for c in columns])


BASELINES = [name for name, preset in PRESETS.items() if preset["preconditioner"] is None]


def _columns(spec: PaperTable, models: list[Model], comparison: Comparison, everything: bool) -> list[Column]:
    """The columns that have results, one per edition of the data."""
    known = dict.fromkeys(key for model in models for key in model.scores)
    columns = []
    for column in spec.columns:
        if everything or column.key in known:
            books = column.title == "PG-19" and _are_books(column, comparison)
            columns.append(column.renamed("books", column.key) if books else column)
        columns += [
            column.renamed(f"{column.title} {key[len(column.key) + 1 :]}", key)
            for key in known
            if key.startswith(f"{column.key} (")
        ]
    if spec.more:
        listed = {column.key for column in columns}
        extra = [key for key in known if key.startswith(spec.more) and key not in listed]
        columns += [Column(key.removeprefix(spec.more), key, better=min) for key in extra]
    return columns


def _footnotes(columns: list[Column], comparison: Comparison) -> str:
    """The data of columns whose titles do not identify it, and how many prompts were truncated."""
    measured: dict[str, list[str]] = {}
    for column in columns:
        data = comparison.editions.get(column.key)
        if data is None or not data.source:
            continue
        plain = column.key.partition(" (")[0]
        several = f"{plain} (2)" in comparison.editions
        if several or _are_books(column, comparison):
            measured.setdefault(str(data), []).append(column.title)
    notes = [
        f"{', '.join(titles) if len(titles) < 4 else f'{titles[0]} to {titles[-1]}'}: {data}."
        for data, titles in measured.items()
    ]
    for model in comparison.models:
        if model.cut and any(c.key in model.scores for c in columns):
            notes.append(f"{model.label}: {model.cut:,} prompts were truncated.")
    return " ".join(notes)


def _are_books(column: Column, comparison: Comparison) -> bool:
    """Whether a PG-19 column was measured on other books."""
    data = comparison.editions.get(column.key)
    return data is not None and column.key in PG19_COLUMNS and "pg19" not in data.source.lower()


PG19_COLUMNS = {column.key for column in PG19.columns}


def _near_an_ablation(model: Model, comparison: Comparison) -> bool:
    """Whether the model's block contains one that is neither a preset nor a baseline."""
    block = [m.identity for m in comparison.models if m.identity.block == model.identity.block]
    return any(m.preset is None and not m.baseline for m in block)


def _printed(spec: PaperTable, columns: list[Column], name: str) -> list[Row]:
    figures = spec.figures(name)
    if not any(c.key in figures for c in columns):
        return []
    scores = [Score(figures[c.key]) if c.key in figures else None for c in columns]
    cells = [score_cell(score, c.digits, c.signed) for score, c in zip(scores, columns)]
    return [Row(THE_PAPERS, cells, faint=True)]


def heading(column: Column) -> str:
    arrow = "" if column.better is None else " ↑" if column.better is max else " ↓"
    return f"{column.title}{arrow}"


def tables(comparisons: Iterable[Comparison], specs: Iterable[PaperTable] = TABLES) -> list[Table]:
    """The paper's tables in its order, for every protocol with results."""
    comparisons = list(comparisons)
    candidates = (paper_table(comparison, spec) for spec in specs for comparison in comparisons)
    return [table for table in candidates if table is not None]


def write(comparisons: list[Comparison], folder: Path) -> list[Path]:
    """Write the tables as Markdown, LaTeX and CSV, and the figures."""
    paper_tables = tables(comparisons)
    if not paper_tables:
        raise ValueError("none of these results belongs to a column of the paper's tables")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, text in (
        ("md", markdown(paper_tables)),
        ("tex", latex(paper_tables)),
        ("csv", comma_separated(paper_tables)),
    ):
        paths.append(folder / f"compare.{suffix}")
        paths[-1].write_text(text, encoding="utf-8")
    drawings: dict[str, Any] = {}
    for i, comparison in enumerate(comparisons):
        suffix = "" if i == 0 else f"-{i + 1}"
        drawings |= {f"{name}{suffix}": figure for name, figure in figures(comparison).items()}
    return paths + plots.save(drawings, folder)


def figures(comparison: Comparison) -> dict[str, Any]:
    """The main columns as bars, and the PG-19 curves of models that have every bucket."""
    panels, printed = {}, {}
    for column in MAIN.columns:
        values = {m.label: m.scores[column.key] for m in comparison.models if column.key in m.scores}
        if values:
            panels[heading(column)] = values
            theirs = {m.label: MAIN.figures(m.name).get(column.key) for m in comparison.models}
            printed[heading(column)] = {label: x for label, x in theirs.items() if x is not None}
    curves = {
        m.label: [m.scores[bucket] for bucket in BUCKETS]
        for m in comparison.models
        if all(bucket in m.scores for bucket in BUCKETS)
    }
    drawings = {"summary": plots.score_bars(panels, printed)} if panels else {}
    if curves:
        drawings["pg19"] = plots.perplexity_by_position(curves)
    return drawings
