"""One result file as tables, printed at the end of a measurement."""

from collections.abc import Sequence
from typing import Any

from osdn.results.columns import DIAGNOSTIC, THROUGHPUT, PaperTable
from osdn.results.names import title
from osdn.results.scores import Score
from osdn.results.tables import Cell, Row, Table, number, score_cell


def suite_table(content: dict[str, Any], spec: PaperTable) -> Table:
    """The scores of a suite, beside the paper's if the model is one of the paper's."""
    results, errors = content["results"], content["errors"]
    printed = spec.figures(content["preset"] or content["model"])
    rows = []
    for column in spec.columns:
        if column.key not in results:
            continue
        digits, signed = column.digits, column.signed
        cells = [
            Cell(number(results[column.key], digits, signed)),
            Cell(number(errors.get(column.key), digits)),
        ]
        theirs = [Cell(number(printed.get(column.key), digits, signed))] if printed else []
        rows.append(Row(column.title, [*cells, *theirs]))
    head = ["score", "standard error", *(["paper"] if printed else [])]
    return Table(f"{content['suite']}: {title(content['model'])}", head, rows, _cuts(content["tasks"]))


def _cuts(tasks: dict[str, dict[str, Any]]) -> str:
    """How much of the data was truncated, and why."""
    notes = []
    for name, task in tasks.items():
        if task.get("cut"):
            documents = task["data"]["documents"]
            notes.append(f"{name}: {task['cut']} of {documents} documents were truncated to the window.")
        if truncated := task.get("truncated", {}).get("prompts"):
            lost = task["truncated"]["tokens"]
            notes.append(f"{name}: {truncated} prompts were too long and lost {lost:,} tokens in total.")
    return " ".join(notes)


def diagnosis_tables(content: dict[str, Any]) -> list[Table]:
    """The residual ratios by task and by layer."""
    printed = DIAGNOSTIC.figures(content["preset"] or content["model"])
    tasks = {"all": content["all"], **(content["tasks"] if len(content["tasks"]) > 1 else {})}
    rows = []
    for task, row in tasks.items():
        readings = [row[key] and row[key]["value"] for key in ("first_reading", "second_reading")]
        cells = [_interval(row["q_geo"]), _interval(row["q_arith"])]
        cells += [Cell(number(x, 3)) for x in readings]
        cells.append(Cell(f"{row['measurements']:,}"))
        theirs = printed.get("q_geo" if task == "all" else f"q_{task}")
        cells += [Cell(number(theirs, 3))] if printed else []
        only = next(iter(content["tasks"])) if len(content["tasks"]) == 1 else "all"
        rows.append(Row(task if task != "all" else only, cells))
    head = ["q_geo", "q_arith", "1st", "2nd", "writes", *(["paper"] if printed else [])]
    name = f"Residual ratio of {title(content['model'])}, ± half of the 95 % interval; 1st and 2nd reading"
    cut = content.get("truncated", {}).get("prompts", 0)
    note = f"{cut} prompts were truncated to {content['protocol']['length']:,} tokens." if cut else ""
    return [Table(name, head, rows, note), _layers(content)]


def _layers(content: dict[str, Any]) -> Table:
    scale = content["scale"]
    rows = []
    for i, (q, heads) in enumerate(zip(content["all"]["by_layer"], content["all"]["by_layer_and_head"])):
        known = [h for h in heads if h is not None]
        cells = [number(x, 3) for x in (q, min(known, default=None), max(known, default=None))]
        if scale:
            low, high = scale["range"][i]
            bound = 100 * sum(scale["share_bound_by_head"][i]) / len(scale["share_bound_by_head"][i])
            cells += [f"{low:.3f}", f"{high:.3f}", f"{bound:.2f}"]
        rows.append(Row(str(i), [Cell(text) for text in cells]))
    head = ["q_geo", "lowest head", "highest head", *(["scale from", "to", "% at the box"] if scale else [])]
    return Table("By layer", head, rows, corner="layer")


def throughput_table(content: dict[str, Any]) -> Table:
    """The measured throughput of each model, with the paper's figures below it."""
    rows = []
    block = None
    for row in content["rows"]:
        columns = THROUGHPUT.columns
        values = {**row, "throughput_change": row.get("change")}
        scores = [None if values.get(c.key) is None else Score(values[c.key]) for c in columns]
        cells = [score_cell(score, c.digits, c.signed) for score, c in zip(scores, columns)]
        rows.append(Row(title(row["model"]), cells, rule=row["block"] != block))
        block = row["block"]
        printed = THROUGHPUT.figures(row["preset"] or row["model"])
        if printed:
            theirs = [Score(printed[c.key]) if c.key in printed else None for c in columns]
            cells = [score_cell(score, c.digits, c.signed) for score, c in zip(theirs, columns)]
            rows.append(Row("the paper's, H100", cells, faint=True))
    name = (
        f"{content['prefill']:,} prompt tokens and {content['decode']} generated, {content['device']}, "
        f"{content['dtype']}"
    )
    return Table(name, [c.title for c in THROUGHPUT.columns], rows)


def check_tables(title_: str, checks: Sequence[Any], violations: Sequence[Any]) -> list[Table]:
    """The statements of the theory, and whether they hold without one of their hypotheses."""
    rows = [Row(c.statement, [*_sides(c), Cell(c.tightness), Cell(c.verdict, good=c.passed)]) for c in checks]
    head = ["left", "", "right"]
    name = f"{title_} (logarithms, medians)"
    tables = [Table(name, [*head, "tightness", "verdict"], rows, corner="statement", left=(1, 3, 4))]
    broken = []
    for violation in violations:
        outcome = "holds" if violation.check.holds else "fails"
        expected = outcome if violation.as_expected else f"{outcome}, UNEXPECTED"
        cells = [*_sides(violation.check), Cell(expected, good=violation.as_expected)]
        broken.append(Row(violation.check.statement, [*cells, Cell("; ".join(violation.check.violated))]))
    if broken:
        name = "Each hypothesis broken on purpose (logarithms, medians)"
        tables.append(Table(name, [*head, "outcome", "without"], broken, corner="statement", left=(1, 3, 4)))
    return tables


def _sides(check: Any) -> list[Cell]:
    left, right = (f"{side.median():.3f}" for side in (check.left, check.right))
    return [Cell(left), Cell({"<=": "≤"}.get(check.relation, check.relation)), Cell(right)]


def _interval(q: dict[str, float] | None) -> Cell:
    return Cell() if q is None else Cell(f"{q['value']:.3f}", f"±{(q['high'] - q['low']) / 2:.3f}")
