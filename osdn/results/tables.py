"""Tables: one description, rendered for the terminal and as Markdown, LaTeX, HTML and CSV."""

import csv
import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from osdn.results.scores import Score
from osdn.terminal import printable

NONE = "–"


@dataclass(frozen=True)
class Cell:
    text: str = NONE
    error: str = ""  # a standard error or an interval, in small print
    best: bool = False  # the best of its block, in bold
    good: bool | None = None  # a verdict, shown in colour
    score: Score | None = None  # the number behind the text


@dataclass(frozen=True)
class Row:
    label: str
    cells: Sequence[Cell]
    rule: bool = False  # a line above it
    faint: bool = False  # not measured here, such as the paper's figures
    heading: bool = False  # a heading for the rows below


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]  # the columns' titles, without that of the labels
    rows: Sequence[Row]
    note: str = ""
    corner: str = ""  # the title of the labels
    keys: Sequence[str] = ()  # names of the columns in files, if they differ from the titles
    left: Sequence[int] = ()  # left-aligned columns, which hold text
    links: bool = False  # whether labels are links to files, relative to the page


def number(x: float | None, digits: int, signed: bool = False) -> str:
    """A score with a readable number of digits.

    >>> number(0.12345, 3, True), number(123456789.0, 2), number(None, 3)
    ('+0.123', '1.23e+08', '–')
    """
    if x is None:
        return NONE
    sign = "+" if signed else ""
    return f"{x:{sign}.2e}" if abs(x) >= 1e5 else f"{x:{sign},.{digits}f}"


def score_cell(score: Score | None, digits: int, signed: bool = False, best: bool = False) -> Cell:
    """A score with its standard error."""
    if score is None:
        return Cell()
    error = "" if score.error is None else number(score.error, digits)
    return Cell(number(score.value, digits, signed), error and f"±{error}", best, score=score)


def for_terminal(table: Table, width: int) -> Iterator[RichTable]:
    """The table; a table of numbers that is wider than the terminal is transposed and split."""
    label = max((len(row.label) for row in table.rows), default=0)
    if table.left or label + sum(_widths(table)) + 4 < width or any(row.heading for row in table.rows):
        yield _upright(table)
    else:
        yield from _sideways(table, width)


def _widths(table: Table) -> list[int]:
    """The width of each column in characters, including the space before it."""
    widths = [max(map(len, title.split()), default=0) for title in table.head]
    for row in table.rows:
        if not row.heading:
            widths = [max(n, len(f"{cell.text} {cell.error}".strip())) for n, cell in zip(widths, row.cells)]
    return [n + 1 for n in widths]


def _rich_table(table: Table) -> RichTable:
    title = escape(printable(table.title))
    return RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _upright(table: Table) -> RichTable:
    grid = _rich_table(table)
    grid.add_column(escape(table.corner), overflow="fold")
    for i, title in enumerate(table.head):
        grid.add_column(escape(title), justify="left" if i in table.left else "right")
    for row in table.rows:
        if row.rule and grid.row_count:
            grid.add_section()
        if row.heading:
            grid.add_row(f"[bold]{escape(printable(row.label))}[/]")
        else:
            cells = [_rich(cell) for cell in row.cells]
            grid.add_row(escape(printable(row.label)), *cells, style="dim" if row.faint else "")
    return grid


def _sideways(table: Table, width: int) -> Iterator[RichTable]:
    """The table transposed, one column per row, with the paper's figures below ours."""
    models: list[tuple[str, Sequence[Cell], Sequence[Cell] | None]] = []
    paper = ""
    for row in table.rows:
        if row.faint and models:
            paper = f"  {row.label}"
            models[-1] = (*models[-1][:2], row.cells)
        else:
            models.append((row.label, row.cells, None))
    first = max(len(name) for name in (paper, *table.head))
    at_once = max(1, (width - first - 4) // 9)
    at_once = -(-len(models) // -(-len(models) // at_once))  # parts of equal size
    for start in range(0, len(models), at_once):
        part = models[start : start + at_once]
        grid = _rich_table(table)
        grid.add_column("", no_wrap=True)
        for label, _, _ in part:
            grid.add_column(escape(printable(label)), justify="right", overflow="fold", min_width=8)
        for i, title in enumerate(table.head):
            grid.add_row(escape(title), *(_rich(ours[i]) for _, ours, _ in part))
            if any(theirs is not None and theirs[i].text != NONE for _, _, theirs in part):
                cells = [NONE if theirs is None else _rich(theirs[i]) for _, _, theirs in part]
                grid.add_row(paper, *cells, style="dim")
        yield grid


def _rich(cell: Cell) -> str:
    text = escape(printable(cell.text))
    text = f"[bold]{text}[/]" if cell.best else text
    if cell.good is not None:
        text = f"[{'green' if cell.good else 'bold red'}]{text}[/]"
    return f"{text} [dim]{escape(cell.error)}[/]" if cell.error else text


def markdown(tables: Sequence[Table], level: int = 2) -> str:
    """Tables under headings of this level."""
    return "\n\n".join(_markdown(table, level) for table in tables) + "\n"


def _markdown(table: Table, level: int) -> str:
    alignment = [":---" if i in table.left else "---:" for i in range(len(table.head))]
    lines = [[table.corner, *table.head], ["---", *alignment]]
    for row in table.rows:
        label = row.label.replace("|", r"\|")
        label = f"*{label}*" if row.faint else f"**{label}**" if row.heading else label
        cells = [
            f"{f'**{c.text}**' if c.best else c.text}{f' {c.error}' if c.error else ''}" for c in row.cells
        ]
        lines.append([label, *cells, *[""] * (len(table.head) - len(cells))])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    note = f"{table.note}\n\n" if table.note else ""
    return f"{'#' * level} {table.title}\n\n{note}{body}"


def latex(tables: Sequence[Table]) -> str:
    """LaTeX tables for booktabs, laid out as in the paper."""
    return "\n".join(map(_latex, tables))


def _latex(table: Table) -> str:
    head = " & ".join([_tex(table.corner), *(rf"\textbf{{{_tex(title)}}}" for title in table.head)])
    columns = "".join("l" if i in table.left else "r" for i in range(len(table.head)))
    lines = [rf"% {table.title}. {table.note}", rf"\begin{{tabular}}{{l{columns}}}", r"\toprule"]
    lines.append(rf"{head} \\")
    for i, row in enumerate(table.rows):
        cells = []
        for cell in row.cells:
            text = rf"\textbf{{{_tex(cell.text)}}}" if cell.best else _tex(cell.text)
            cells.append(text + (rf" {{\tiny {_tex(cell.error)}}}" if cell.error else ""))
        label = rf"\quad\textit{{{_tex(row.label)}}}" if row.faint else _tex(row.label)
        lines += [*([r"\midrule"] if row.rule or i == 0 else []), rf"{' & '.join([label, *cells])} \\"]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


_TEX = {mark: f"\\{mark}" for mark in "_%&#{}$"} | {"Δ": r"$\Delta$", "–": "--", "β": r"$\beta$"}
_TEX |= {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}", "±": r"$\pm$ ", "×": r"$\times$"}
_TEX |= {"↑": r"$\uparrow$", "↓": r"$\downarrow$"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)


def html_table(table: Table) -> str:
    """A `<table>` inside a box that scrolls sideways on a narrow page."""
    head = "".join(f"<th{_aside(table, i)}>{html.escape(t)}</th>" for i, t in enumerate(table.head))
    body = []
    for row in table.rows:
        kinds = [name for name in ("rule", "faint", "heading") if getattr(row, name)]
        attribute = f' class="{" ".join(kinds)}"' if kinds else ""
        span = f' colspan="{len(table.head) + 1}"' if row.heading else ""
        cells = "".join(f"<td{_aside(table, i)}>{_html(cell)}</td>" for i, cell in enumerate(row.cells))
        label = html.escape(row.label)
        label = f'<a href="{quote(row.label)}">{label}</a>' if table.links else label
        body.append(f'<tr{attribute}><th scope="row"{span}>{label}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(table.title)}">'
        f"<table><thead><tr><th>{html.escape(table.corner)}</th>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _aside(table: Table, i: int) -> str:
    return ' class="words"' if i in table.left else ""


def _html(cell: Cell) -> str:
    text = html.escape(cell.text)
    text = f"<b>{text}</b>" if cell.best else text
    if cell.good is not None:
        text = f'<span class="{"good" if cell.good else "bad"}">{text}</span>'
    return f"{text} <small>{html.escape(cell.error)}</small>" if cell.error else text


def comma_separated(tables: Sequence[Table]) -> str:
    """One line per number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "model", "source", "column", "value", "standard_error", "best"])
    for table in tables:
        model = ""
        for row in table.rows:
            model = model if row.faint else row.label
            for cell, key in zip(row.cells, table.keys or table.head):
                if cell.score is not None:
                    source = "paper" if row.faint else "measured"
                    error = "" if cell.score.error is None else cell.score.error
                    writer.writerow(
                        [table.title, model, source, key, cell.score.value, error, int(cell.best)]
                    )
    return text.getvalue()
