"""The command `osdn`: thin layers over the package, one function a command."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Online Scaled DeltaNet.", no_args_is_help=True, add_completion=False)
console = Console()


@app.callback()
def main() -> None:
    """Online Scaled DeltaNet."""


@app.command()
def theory(
    output: Annotated[Path, typer.Option(help="Where theory.json and the figures go.")] = Path("runs/theory"),
    seed: Annotated[int, typer.Option(help="Seed of the random problems.")] = 0,
    problems: Annotated[int, typer.Option(min=1, help="Random problems of each kind.")] = 32,
    backend: Annotated[str, typer.Option(help="Which operators to run.")] = "auto",
    model: Annotated[Path | None, typer.Option(help="A saved model, whose own keys are checked too.")] = None,
) -> None:
    """Check every statement of the paper along runs of the operators, and draw them."""
    from osdn.analysis.theory.figures import draw
    from osdn.analysis.theory.models import statements_of
    from osdn.analysis.theory.report import statement_table, violation_table
    from osdn.analysis.theory.suite import Config, run_suite

    config = Config(seed, problems, backend)
    with console.status("running the operators on random problems"):
        report = run_suite(config)
    console.print(statement_table("The paper's statements", report.statements))
    console.print(violation_table(report.violations))
    if model is not None:
        with console.status(f"running {model}"):
            checks = statements_of(model)
        console.print(statement_table(f"On the keys and gates of {model}", checks))
        report.model_statements.extend(checks)
    with console.status("drawing"):
        path, figures = report.write(output), draw(config, output)
    console.print(f"{path} and {len(figures)} figures beside it")
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def zoo(
    key_dim: Annotated[int, typer.Option(min=1, help="K, the channels of a key.")] = 128,
    value_dim: Annotated[int, typer.Option(min=1, help="V, the channels of a value.")] = 128,
    slots: Annotated[int, typer.Option(min=1, help="M, for the rows that keep slots.")] = 64,
    markdown: Annotated[bool, typer.Option(help="Print the page docs/zoo.md instead.")] = False,
) -> None:
    """List the rows of the taxonomy with the size of their state."""
    from osdn.zoo import RECURRENCES
    from osdn.zoo.table import markdown as page

    if markdown:
        print(page(), end="")
        return
    sizes = f"K = {key_dim}, V = {value_dim}, M = {slots}"
    table = Table(
        title=f"State a head carries, {sizes}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column, justify in (("name", "left"), ("row", "left"), ("state", "left"), ("numbers", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in RECURRENCES.values():
        size = f"{row.state_size(key_dim, value_dim, slots):,}"
        table.add_row(row.name, row.title, row.state_formula, size)
    console.print(table)
