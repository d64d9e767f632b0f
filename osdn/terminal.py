"""What the commands share in a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

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
