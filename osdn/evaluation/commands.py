"""The commands `osdn eval` and `osdn compare`."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from osdn.terminal import made, plain_errors

if TYPE_CHECKING:
    from osdn.evaluation.columns import Column
    from osdn.evaluation.compare import Cell, Comparison

console = Console()
messages = Console(stderr=True)
PAPER = "  the paper's"
CELL = 8  # characters of a score, which may have its error below it


def evaluate(
    checkpoint: Annotated[
        str | None, typer.Argument(help="A directory or hub name of a causal model.", show_default=False)
    ] = None,
    suite: Annotated[
        list[str], typer.Option(help="Of ppl, recall, commonsense, retrieval, longbench, pg19, in a row.")
    ] = ["all"],  # noqa: B006
    list_: Annotated[bool, typer.Option("--list", help="Say what the suites need, and stop.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="A mirror of the data sets.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the results; runs/eval/MODEL if not named.")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of one reading in the -twice tasks.")] = 1000,
    books: Annotated[
        str | None, typer.Option(help="Text for pg19 in place of PG-19: a file, a directory, or stdlib.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents a task, for a first look.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Found if not given.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens the model may see; its configuration's if not given.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")] = "cpu",
    overwrite: Annotated[bool, typer.Option(help="Measure again what has results.")] = False,
) -> None:
    """Run the paper's benchmarks on a model; started again, it continues."""
    from osdn.evaluation.suites import SUITES, select

    with plain_errors():
        suites = select(suite)
        if data_dir is not None and not data_dir.is_dir():
            raise FileNotFoundError(f"{data_dir} is not a directory; it should hold the mirror of the data")
        if list_:
            console.print(_needs(suites, data_dir))
            return
        if checkpoint is None:
            raise ValueError("name a checkpoint: osdn eval CHECKPOINT --suite recall")
        if find_spec("lm_eval") is None:
            raise ValueError('evaluation needs lm_eval: pip install "osdn[eval]"')
        from osdn.evaluation.runner import Evaluation, Settings

        if output is not None:
            made(output)
        settings = Settings(checkpoint, data_dir, window, books, limit, batch_size, max_length, device)
        with messages.status(f"loading {escape(checkpoint)}"):
            evaluation = Evaluation(settings, output, overwrite)
        try:
            with _Bars(sum(len(SUITES[name]) for name in suites)) as bars:
                outcome = evaluation.run(suites, bars)
        except KeyboardInterrupt:
            messages.print(f"stopped; the same command continues from what is in {evaluation.folder}")
            raise typer.Exit(130) from None
    for name, path in outcome.files.items():
        console.print(_summary(name, path))
    for task, reason in outcome.missing.items():
        messages.print(f"[yellow]not run:[/] {task}: {escape(reason)}", soft_wrap=True)
    if not outcome.files:
        raise typer.Exit(1)
    console.print(f"results are in {evaluation.folder}", soft_wrap=True)


def compare(
    results: Annotated[list[Path], typer.Argument(help="Folders or files of `osdn eval`, as runs/eval.")],
    output: Annotated[Path, typer.Option(help="Folder of the tables and figures.")] = Path("runs/compare"),
) -> None:
    """Print and write the paper's tables for models that were evaluated."""
    from osdn.evaluation.compare import comparisons, read, write

    with plain_errors():
        models = read(results)
        paths = write(models, output)
    for comparison in comparisons(models):
        for table in _rendered(comparison, console.width):
            console.print(table)
    console.print(f"{', '.join(path.name for path in paths)} are in {output}", soft_wrap=True)


class _Bars(Progress):
    """Two bars: the tasks, and the requests of the one that runs."""

    def __init__(self, tasks: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=messages, transient=True)
        self.all = self.add_task("tasks", total=tasks)
        self.one = self.add_task("", total=None)

    def begin(self, suite: str, task: str) -> None:
        self.reset(self.one, total=None, description=f"{suite}: {task}")

    def report(self, done: int, total: int) -> None:
        self.update(self.one, completed=done, total=total)

    def end(self) -> None:
        self.advance(self.all)


def _needs(suites: list[str], data_dir: Path | None) -> Table:
    """What each task reads, and where it would come from."""
    from osdn.evaluation.data import whereabouts
    from osdn.evaluation.suites import SUITES
    from osdn.hub import hub_answers

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("task", "data set, split", "is"):
        table.add_column(title, overflow="fold", no_wrap=title == "task")
    words = {
        "mirror": "mirror",
        "cache": "cached",
        "hub": "on the hub" if hub_answers() else "[red]missing[/]",
    }
    for suite in suites:
        table.add_row(f"[bold]{suite}[/]")
        for task in SUITES[suite]:
            place = words[whereabouts(task.data, task.config, data_dir)]
            table.add_row(task.name, task.documents, place, end_section=task is SUITES[suite][-1])
    return table


def _summary(suite: str, path: Path) -> Table:
    """The scores of a suite, with the paper's beside them if the model is one of its own."""
    from osdn.evaluation.columns import BY_SUITE
    from osdn.evaluation.compare import number

    content = json.loads(path.read_text(encoding="utf-8"))
    results, errors, tasks = content["results"], content["errors"], content["tasks"]
    columns = [column for column in BY_SUITE[suite].columns if column.key in results]
    printed = BY_SUITE[suite].figures(content["model"])
    table = Table(
        title=escape(f"{suite}: {content['model']}"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("")
    for title in ("score", "standard error", *(["paper"] if printed else [])):
        table.add_column(title, justify="right")
    for column in columns:
        key, digits = column.key, column.digits
        cells = [number(results[key], digits, column.signed), number(errors.get(key), digits)]
        theirs = [number(printed.get(key), digits, column.signed)] if printed else []
        table.add_row(column.title, *cells, *theirs)
    cut = [f"{name} {task['cut']} of {task['documents']}" for name, task in tasks.items() if "cut" in task]
    if cut:
        table.caption = f"documents cut to the window: {', '.join(cut)}"
    return table


def _rendered(comparison: "Comparison", width: int) -> Iterator[Table]:
    """A table turned on its side, a model a column, in as many parts as fit the terminal."""
    from osdn.evaluation.compare import heading

    models: list[tuple[str, list[str], list[str]]] = []  # label, our cells, the paper's
    for row in comparison.rows:
        cells = [_cell(cell, column) for cell, column in zip(row.cells, comparison.columns)]
        if row.printed:
            models[-1] = (*models[-1][:2], cells)
        else:
            models.append((row.label, cells, ["–"] * len(cells)))
    titles = [heading(column) for column in comparison.columns]
    at_once = max(1, (width - max(map(len, [PAPER, *titles])) - 4) // (CELL + 1))
    parts = -(-len(models) // at_once)
    at_once = -(-len(models) // parts)  # parts of one size
    for start in range(0, len(models), at_once):
        part = models[start : start + at_once]
        table = Table(title=comparison.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for label, _, _ in part:
            table.add_column(escape(label), justify="right", overflow="fold", min_width=CELL)
        for i, title in enumerate(titles):
            table.add_row(title, *(ours[i] for _, ours, _ in part))
            if any(theirs[i] != "–" for _, _, theirs in part):
                table.add_row(PAPER, *(theirs[i] for _, _, theirs in part), style="dim")
        yield table


def _cell(cell: "Cell", column: "Column") -> str:
    from osdn.evaluation.compare import number

    if cell.score is None:
        return "–"
    text = number(cell.score.value, column.digits, column.signed)
    text = f"[bold]{text}[/]" if cell.best else text
    error = cell.score.error
    return text if error is None else f"{text} [dim]±{number(error, column.digits)}[/]"
