"""The command `osdn`: a thin layer over the package, one function per command, one module per subject."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from osdn import __version__
from osdn.cli import analysis, bench, evaluation, lab, reproduction, results, serving, training
from osdn.extras import MissingExtraError
from osdn.terminal import console, print_error


class Commands(TyperGroup):
    """Prints a missing extra as one line, with the command that installs it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MissingExtraError as error:
            print_error(error)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands,
    help="Delta-rule linear attention: train, evaluate, compare and serve.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        console.print(f"osdn {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Delta-rule linear attention: train, evaluate, compare and serve."""


app.command()(lab.demo)
app.add_typer(lab.app, name="lab")

app.command()(training.train)
app.command()(training.convert)
app.add_typer(training.tokenizer, name="tokenizer")

app.command("eval", cls=lab.ManyValues)(evaluation.evaluate)
app.command()(serving.serve)
app.command()(analysis.diagnose)
app.command()(analysis.inspect)
app.command()(analysis.describe)
app.add_typer(bench.app, name="bench")

app.command()(results.compare)
app.command()(results.report)
app.command()(results.plot)
app.command()(reproduction.reproduce)

app.command()(analysis.theory)
app.command()(analysis.zoo)
