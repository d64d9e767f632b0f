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
    messages,
    plain_errors,
    printable,
    progress_bar,
    show,
    writable_folder,
)

if TYPE_CHECKING:
    from osdn.results.tables import Table


def evaluate(
    checkpoint: Annotated[
        str | None,
        typer.Argument(help="A causal model: a directory or a name on the hub.", show_default=False),
    ] = None,
    suite: Annotated[
        list[str],
        typer.Option(help="ppl, recall, commonsense, retrieval, longbench, pg19 (all); ruler; code_recall."),
    ] = ["all"],  # noqa: B006
    list_: Annotated[
        bool, typer.Option("--list", help="List the data that the suites need, and exit.")
    ] = False,
    data_dir: Annotated[Path | None, typer.Option(help="A local mirror of the data sets.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: runs/eval/MODEL.")
    ] = None,
    name: Name = None,
    window: Annotated[
        int, typer.Option(help="Tokens per reading of the context, in code_recall and the -twice tasks.")
    ] = 1000,
    books: Annotated[
        str | None,
        typer.Option(help="Text for pg19 instead of PG-19: a file, a directory, stdlib, installed."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Documents per task at most, for a first look.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences per batch; default: found automatically.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens the model may see; recurrent models have no limit."),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    quantize: Quantize = None,
    overwrite: Annotated[bool, typer.Option(help="Run tasks again that already have results.")] = False,
) -> None:
    """Run the paper's benchmarks on a model.  Run again, it continues where it stopped."""
    from osdn.evaluation.suites import SUITES, select
    from osdn.results.columns import BY_SUITE
    from osdn.results.summaries import suite_table

    with plain_errors():
        suites = select(suite)
        if data_dir is not None and not data_dir.is_dir():
            raise FileNotFoundError(f"{data_dir} is not a directory; it must hold a mirror of the data sets")
        if list_:
            show(_data_table(list(SUITES) if suite == ["all"] else suites, data_dir))
            return
        if checkpoint is None:
            raise ValueError("name a checkpoint: osdn eval CHECKPOINT --suite recall")
        require("osdn eval", "eval", "lm_eval")
        from osdn.evaluation.runner import Evaluation, EvaluationSettings

        if int(os.environ.get("RANK", "0")) > 0:  # only the first of several processes prints
            console.quiet = messages.quiet = True
        if output is not None:
            writable_folder(output)
        settings = EvaluationSettings(
            checkpoint, data_dir, window, books, limit, batch_size, max_length, device, dtype, quantize, name
        )
        with messages.status(f"loading {escape(checkpoint)}"):
            evaluation = Evaluation(settings, output, overwrite)
        try:
            with _ProgressBars(sum(len(SUITES[name]) for name in suites)) as bars:
                outcome = evaluation.run(suites, bars)
        except KeyboardInterrupt:
            messages.print(f"stopped; the same command continues from the results in {evaluation.folder}")
            raise typer.Exit(130) from None
    for suite_name, path in outcome.files.items():
        show(suite_table(json.loads(path.read_text(encoding="utf-8")), BY_SUITE[suite_name]))
    for task, reason in outcome.missing.items():
        messages.print(f"[yellow]not run:[/] {task}: {escape(printable(reason))}", soft_wrap=True)
    if not outcome.files and not console.quiet:
        raise typer.Exit(1)
    console.print(f"results are in {evaluation.folder}", soft_wrap=True)


class _ProgressBars:
    """Two bars: one for the tasks, one for the requests of the current task."""

    def __init__(self, tasks: int) -> None:
        self.progress = progress_bar(messages)
        self.tasks = self.progress.add_task("tasks", total=tasks)
        self.requests = self.progress.add_task("", total=None)

    def __enter__(self) -> "_ProgressBars":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def begin(self, suite: str, task: str) -> None:
        self.progress.reset(self.requests, total=None, description=f"{suite}: {task}")

    def report(self, done: int, total: int) -> None:
        self.progress.update(self.requests, completed=done, total=total)

    def end(self) -> None:
        self.progress.advance(self.tasks)


def _data_table(suites: list[str], data_dir: Path | None) -> "Table":
    """The data that each task reads, and where it would come from."""
    from osdn.evaluation.data import data_location
    from osdn.evaluation.suites import INSTALLED, SUITES
    from osdn.hub import hub_answers
    from osdn.results.tables import Cell, Row, Table

    words = {"mirror": "mirror", "cache": "cached", "hub": "on the hub" if hub_answers() else "missing"}
    rows = []
    for suite in suites:
        rows.append(Row(suite, [], rule=True, heading=True))
        for task in SUITES[suite]:
            local = task.data == INSTALLED
            place = "here" if local else words[data_location(task.data, task.config, data_dir)]
            there = Cell(place, good=False if place == "missing" else None)
            rows.append(Row(task.name, [Cell(task.documents), there]))
    return Table("Data of the suites", ["data set, split", "where"], rows, corner="task", left=(0, 1))
