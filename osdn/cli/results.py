"""`osdn compare`, `osdn report` and `osdn plot`: show the results of the other commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from osdn.extras import require
from osdn.terminal import console, messages, plain_errors, printable, show, writable_folder

if TYPE_CHECKING:
    from osdn.results.store import Store

Results = Annotated[list[Path], typer.Argument(help="Result files, or folders that hold them, such as runs.")]


def compare(
    results: Results,
    output: Annotated[Path, typer.Option(help="Folder for the tables and figures.")] = Path("runs/compare"),
) -> None:
    """Print and save the paper's tables, filled with everything that was measured."""
    require("osdn compare", "lab", "matplotlib")
    from osdn.results.comparison import compare as run
    from osdn.results.comparison import tables, write

    with plain_errors():
        store = _read(results)
        comparisons = run(store)
        paths = write(comparisons, writable_folder(output))
    for table in tables(comparisons):
        show(table)
    console.print(f"wrote {', '.join(path.name for path in paths)} to {output}", soft_wrap=True)


def report(
    results: Results,
    output: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("runs/report.html"),
    all_: Annotated[
        bool, typer.Option("--all", help="Show the paper's full grid, including models that were not run.")
    ] = False,
) -> None:
    """Collect all results on one page, in the paper's tables and figures."""
    require("osdn report", "lab", "matplotlib")
    from osdn.results.report import write_report

    with plain_errors():
        store = _read(results, required=not all_)
        page = write_report(store, output, all_)
    console.print(f"{page} holds {len(store.files)} results; open it in a browser", soft_wrap=True)


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of training runs.")],
    output: Annotated[Path, typer.Option(help="Where to write the figure: PNG, SVG or PDF.")] = Path(
        "runs/loss.png"
    ),
) -> None:
    """Plot the loss curves of training runs."""
    require("osdn plot", "lab", "matplotlib")
    from osdn.results import plots
    from osdn.results.store import read_run

    with plain_errors():
        loaded = [read_run(run) for run in runs]
        names = [run.model.model for run in loaded]
        labels = [
            run.model.model if names.count(run.model.model) == 1 else f"{run.model.model} ({run.folder})"
            for run in loaded
        ]
        writable_folder(output.parent)
        plots.losses({label: run.lines for label, run in zip(labels, loaded)}).savefig(output, dpi=160)
    console.print(str(output), soft_wrap=True)


def _read(paths: list[Path], required: bool = True) -> "Store":
    """Read the results under the paths, and name the files that cannot be read."""
    from osdn.results.store import read_results

    store = read_results(paths)
    for file, reason in store.unreadable.items():
        messages.print(f"[yellow]left out:[/] {escape(printable(f'{file}: {reason}'))}", soft_wrap=True)
    if required and not store.files:
        places = ", ".join(map(str, paths))
        raise ValueError(f"{places}: there are no results here; `osdn train` and `osdn eval` write them")
    return store
