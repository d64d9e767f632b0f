"""What the commands share: the terminal, common options, one-line errors and output folders."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from osdn.results.tables import Table

console = Console()
messages = Console(stderr=True)
Checkpoint = Annotated[str, typer.Argument(help="A causal model: a directory, or a name on the hub.")]
Device = Annotated[str, typer.Option(help="Device to run on: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16, or auto for the saved dtype; default: float32 on a CPU, else auto.",
        show_default=False,
    ),
]
Quantize = Annotated[
    str | None, typer.Option(help="int8 or int4 weights, for decoding on a CPU.", show_default=False)
]
Name = Annotated[str | None, typer.Option(help="Name of the model in results; default: the name of its run.")]


# Control characters except newline and tab, marks that change the direction of text, and lone surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Spell out control characters, so that no name can move the cursor or change colours."""
    return UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def print_error(error: Exception) -> None:
    """Print an error as one line on stderr."""
    messages.print(f"[bold red]Error:[/] {escape(printable(str(error)))}", soft_wrap=True)


@contextmanager
def plain_errors(*more: type[Exception]) -> Iterator[None]:
    """Print errors that the user can fix as one line, without a traceback."""
    known: tuple[type[Exception], ...] = (OSError, ValueError, *more)
    try:
        yield
    except known as error:
        print_error(error)
        raise typer.Exit(1) from error


def writable_folder(folder: Path) -> Path:
    """Create `folder` if needed and check that it is writable, before the work whose results go there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot create the folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"cannot write to the folder {folder}")
    return folder


def show(table: "Table") -> None:
    """Print a table, split into parts if the terminal is too narrow."""
    from osdn.results.tables import for_terminal

    for part in for_terminal(table, console.width):
        console.print(part)
    if table.note:
        console.print(escape(printable(table.note)), style="dim", highlight=False)
        console.print()


def progress_bar(console: Console = console) -> Progress:
    """A bar with a count and the time left; it disappears when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)
