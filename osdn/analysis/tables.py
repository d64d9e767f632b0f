"""Results as tables for the terminal, the paper's figures beside them where the model is one of its own."""

from typing import Any

from rich import box
from rich.table import Table

from osdn.evaluation.paper import RESIDUAL_RATIOS, THROUGHPUT


def diagnosis_tables(name: str, result: dict[str, Any]) -> list[Table]:
    """The residual ratios by task, and by layer."""
    paper = RESIDUAL_RATIOS.get(name, {})
    tasks = {"all": result["all"], **(result["tasks"] if len(result["tasks"]) > 1 else {})}
    table = _table(f"Residual ratio of {name}, ± half of the 95 % interval; 1st and 2nd reading")
    table.add_column("")
    columns = ["q_geo", "q_arith", "1st", "2nd", "writes", "paper"]
    for column in columns if paper else columns[:-1]:
        table.add_column(column, justify="right")
    for task, row in tasks.items():
        readings = [row[key] and row[key]["value"] for key in ("first_reading", "second_reading")]
        cells = [_cell(row["q_geo"]), _cell(row["q_arith"]), *map(_number, readings)]
        theirs = paper.get("q_geo" if task == "all" else task)
        shown = [] if not paper else ["–" if theirs is None else f"{theirs:.3f}"]
        label = task if task != "all" else ", ".join(result["tasks"]) if len(result["tasks"]) == 1 else "all"
        table.add_row(label, *cells, f"{row['measurements']:,}", *shown)
    return [table, _layers(result)]


def throughput_table(result: dict[str, Any]) -> Table:
    """The paper's throughput table with ours on the left and theirs on the right."""
    table = _table(
        f"{result['prefill']:,} tokens of prompt and {result['decode']} generated, {result['device']}, "
        f"{result['dtype']}; the paper's on an H100 in bfloat16"
    )
    table.add_column("model", no_wrap=True)
    for column in ("tok/s", "prefill ms", "decode ms", "Δ %", "paired", "MiB", "paper", "its Δ %"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        theirs = THROUGHPUT.get(row["model"])
        table.add_row(
            row["model"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['prefill_ms']:,.0f}",
            f"{row['decode_ms']:,.0f}",
            _change(row.get("change")),
            _change(row.get("paired_change")),
            f"{row['state_mib']:.3f}",
            f"{theirs[0]:.1f}" if theirs else "–",
            _change(theirs[2]) if theirs else "–",
            end_section=row is not result["rows"][-1] and _last_of_backbone(result["rows"], row),
        )
    return table


def _last_of_backbone(rows: list[dict[str, Any]], row: dict[str, Any]) -> bool:
    return rows[rows.index(row) + 1]["baseline"] is None


def _change(percent: float | None) -> str:
    return "–" if percent is None else f"{percent:+.1f}"


def _layers(result: dict[str, Any]) -> Table:
    table = _table("By layer")
    for column in ("layer", "q_geo", "lowest head", "highest head"):
        table.add_column(column, justify="right")
    scale = result["scale"]
    if scale:
        for column in ("scale from", "to", "% at the box"):
            table.add_column(column, justify="right")
    for i, (q, heads) in enumerate(zip(result["all"]["by_layer"], result["all"]["by_layer_and_head"])):
        known = [h for h in heads if h is not None]
        cells = [_number(x) for x in (q, min(known, default=None), max(known, default=None))]
        if scale:
            low, high = scale["range"][i]
            bound = 100 * sum(scale["share_bound_by_head"][i]) / len(scale["share_bound_by_head"][i])
            cells += [f"{low:.3f}", f"{high:.3f}", f"{bound:.2f}"]
        table.add_row(str(i), *cells)
    return table


def _cell(q: dict[str, float] | None) -> str:
    return "–" if q is None else f"{q['value']:.3f} ±{(q['high'] - q['low']) / 2:.3f}"


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.3f}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
