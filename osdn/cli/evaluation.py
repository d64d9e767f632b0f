"""`osdn eval`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from osdn.extras import require
from osdn.terminal import (
    Device,
    Dtype,
    Name,
    Quantize,
    console,
    made,
    messages,
    plain_errors,
    printable,
    progress_bar,
    show,
)

if TYPE_CHECKING:
    from osdn.results.tables import Table


def evaluate(
    checkpoint: Annotated[
        str | None, typer.Argument(help="A directory or hub name of a causal model.", show_default=False)
    ] = None,
    suite: Annotated[
        list[str],
        typer.Option(help="ppl, recall, commonsense, retrieval, longbench, pg19 (all); ruler; code_recall."),
    ] = ["all"],  # noqa: B006
    list_: Annotated[bool, typer.Option("--list", help="List what the suites need and exit.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="A mirror of the data sets.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results; runs/eval/MODEL if not given.")
    ] = None,
    name: Name = None,
    window: Annotated[
        int, typer.Option(help="Tokens of one reading in code_recall and the -twice tasks.")
    ] = 1000,
    books: Annotated[
        str | None, typer.Option(help="Text for pg19 in place of PG-19: a file, a directory, or stdlib.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents per task, for a first look.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences at once; found if not given.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens the model may see; recurrent models have no limit.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    quantize: Quantize = None,
    overwrite: Annotated[bool, typer.Option(help="Measure again what has results.")] = False,
) -> None:
    """Run the paper's benchmarks on a model; started again, it continues."""
    from osdn.evaluation.suites import SUITES, select
    from osdn.results.columns import BY_SUITE
    from osdn.results.summaries import suite_table

    with plain_errors():
        suites = select(suite)
        if data_dir is not None and not data_dir.is_dir():
            raise FileNotFoundError(f"{data_dir} is not a directory; it should hold the mirror of the data")
        if list_:
            show(_needs(list(SUITES) if suite == ["all"] else suites, data_dir))
            return
        if checkpoint is None:
            raise ValueError("name a checkpoint: osdn eval CHECKPOINT --suite recall")
        require("osdn eval", "eval", "lm_eval")
        from osdn.evaluation.runner import Evaluation, Settings

        if int(os.environ.get("RANK", "0")) > 0:  # the first of several processes speaks for all
            console.quiet = messages.quiet = True
        if output is not None:
            made(output)
        settings = Settings(
            checkpoint, data_dir, window, books, limit, batch_size, max_length, device, dtype, quantize, name
        )
        with messages.status(f"loading {escape(checkpoint)}"):
            evaluation = Evaluation(settings, output, overwrite)
        try:
            with _Bars(sum(len(SUITES[name]) for name in suites)) as bars:
                outcome = evaluation.run(suites, bars)
        except KeyboardInterrupt:
            messages.print(f"stopped; the same command continues from what is in {evaluation.folder}")
            raise typer.Exit(130) from None
    for suite_name, path in outcome.files.items():
        show(suite_table(json.loads(path.read_text(encoding="utf-8")), BY_SUITE[suite_name]))
    for task, reason in outcome.missing.items():
        messages.print(f"[yellow]not run:[/] {task}: {escape(printable(reason))}", soft_wrap=True)
    if not outcome.files and not console.quiet:
        raise typer.Exit(1)
    console.print(f"results are in {evaluation.folder}", soft_wrap=True)


class _Bars:
    """Two bars: the tasks, and the requests of the one that runs."""

    def __init__(self, tasks: int) -> None:
        self.progress = progress_bar(messages)
        self.all = self.progress.add_task("tasks", total=tasks)
        self.one = self.progress.add_task("", total=None)

    def __enter__(self) -> "_Bars":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def begin(self, suite: str, task: str) -> None:
        self.progress.reset(self.one, total=None, description=f"{suite}: {task}")

    def report(self, done: int, total: int) -> None:
        self.progress.update(self.one, completed=done, total=total)

    def end(self) -> None:
        self.progress.advance(self.all)


def _needs(suites: list[str], data_dir: Path | None) -> "Table":
    """What each task reads, and where it would come from."""
    from osdn.evaluation.data import whereabouts
    from osdn.evaluation.suites import INSTALLED, SUITES
    from osdn.hub import hub_answers
    from osdn.results.tables import Cell, Row, Table

    words = {"mirror": "mirror", "cache": "cached", "hub": "on the hub" if hub_answers() else "missing"}
    rows = []
    for suite in suites:
        rows.append(Row(suite, [], rule=True, heading=True))
        for task in SUITES[suite]:
            local = task.data == INSTALLED
            place = "here" if local else words[whereabouts(task.data, task.config, data_dir)]
            there = Cell(place, good=False if place == "missing" else None)
            rows.append(Row(task.name, [Cell(task.documents), there]))
    return Table("What the suites read", ["data set, split", "is"], rows, corner="task", left=(0, 1))
