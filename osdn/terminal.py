"""What the commands share in a terminal."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

# Control characters but newline and tab, marks that reverse the direction of text, and halves of characters.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """`text` with its control characters spelled out: a name must not move the cursor or change colours."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


@contextmanager
def plain_errors(*more: type[Exception]) -> Iterator[None]:
    """What the user can mend is told in a sentence, without a traceback."""
    known: tuple[type[Exception], ...] = (OSError, ValueError, *more)
    try:
        yield
    except known as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(printable(str(error)))}", soft_wrap=True)
        raise typer.Exit(1) from error


def made(folder: Path) -> Path:
    """`folder`, made if need be and writable: found out before the work whose results go there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"the folder {folder} cannot be written to")
    return folder
