"""The command `osdn`: thin layers over the package, one function per command, one module per subject."""

from importlib.metadata import version
from typing import Annotated

import typer

from osdn.cli import analysis, bench, evaluation, lab, reproduction, results, serving, training
from osdn.terminal import console

app = typer.Typer(help="Online Scaled DeltaNet.", no_args_is_help=True, add_completion=False)


def _version(asked: bool) -> None:
    if asked:
        console.print(f"osdn {version('osdn')}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Online Scaled DeltaNet."""


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
