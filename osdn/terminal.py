"""What the commands share in a terminal."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape


@contextmanager
def plain_errors(*more: type[Exception]) -> Iterator[None]:
    """What the user can mend is told in a sentence, without a traceback."""
    known: tuple[type[Exception], ...] = (OSError, ValueError, *more)
    try:
        yield
    except known as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
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
