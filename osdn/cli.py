"""The command `osdn`: thin layers over the package, one function a command."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from osdn.analysis import commands as analysis
from osdn.evaluation import commands as evaluation
from osdn.lab import commands as lab
from osdn.terminal import made, plain_errors

app = typer.Typer(help="Online Scaled DeltaNet.", no_args_is_help=True, add_completion=False)
console = Console()


def _version(asked: bool) -> None:
    if asked:
        console.print(f"osdn {version('osdn')}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which this is, and stop.")
    ] = False,
) -> None:
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

    with plain_errors():
        config = Config(seed, problems, backend)
        made(output)
        if model is not None:
            with console.status(f"running {model}"):
                own = statements_of(model)
        with console.status("running the operators on random problems"):
            report = run_suite(config)
        console.print(statement_table("The paper's statements", report.statements))
        console.print(violation_table(report.violations))
        if model is not None:
            console.print(statement_table(f"On the keys and gates of {model}", own))
            report.model_statements.extend(own)
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
    for column, justify in (("name", "left"), ("row", "left"), ("state", "left"), ("size", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in RECURRENCES.values():
        size = f"{row.state_size(key_dim, value_dim, slots):,}"
        table.add_row(row.name, row.title, row.state_formula, size)
    console.print(table)


@app.command()
def describe(
    model: Annotated[str, typer.Argument(help="A preset, such as osdn-340m, or a saved model's directory.")],
) -> None:
    """Show a model's parameters, state and flops next to the paper's figures."""
    from osdn.models import describe as run

    with plain_errors():
        description = run(model)
    table = Table(box=box.SIMPLE, show_header=False)
    for label, value in description.rows():
        table.add_row(label, escape(value))
    console.print(table)


@app.command()
def train(
    config: Annotated[
        str, typer.Argument(help="A shipped config, such as tiny/osdn, or a YAML file of your own.")
    ],
    replace: Annotated[
        list[str] | None, typer.Argument(help="Values to replace, such as training.steps=100.")
    ] = None,
) -> None:
    """Train a model as a config says; started again, it continues."""
    from osdn.training.settings import load_settings
    from osdn.training.trainer import TrainingError
    from osdn.training.trainer import train as run

    with plain_errors(TrainingError):
        result = run(load_settings(config, replace or []))
    if os.environ.get("RANK", "0") == "0":
        console.print(f"{result} is ready for from_pretrained")


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of a run, sharded or not.")],
    output: Annotated[Path, typer.Argument(help="The directory to write.")],
) -> None:
    """Turn a training checkpoint into a directory for from_pretrained."""
    from osdn.training.checkpoints import convert as run

    with plain_errors():
        console.print(f"{run(checkpoint, output)} is ready for from_pretrained")


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    output: Annotated[Path, typer.Option(help="The figure: PNG, SVG or PDF.")] = Path("runs/loss.png"),
) -> None:
    """Draw the loss curves of runs."""
    from osdn.training.plot import plot_losses

    with plain_errors():
        console.print(str(plot_losses(runs, output)))


tokenizer_app = typer.Typer(help="Vocabularies.", no_args_is_help=True)
app.add_typer(tokenizer_app, name="tokenizer")


@tokenizer_app.callback()
def tokenizer_main() -> None:
    """Vocabularies."""


@tokenizer_app.command("train")
def tokenizer_train(
    source: Annotated[str, typer.Argument(help="stdlib, a file, a directory or a data set of the hub.")],
    output: Annotated[Path, typer.Argument(help="The directory to write.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 32_000,
    name: Annotated[str | None, typer.Option(help="Configuration of a data set of the hub.")] = None,
    split: Annotated[str, typer.Option(help="Which part of the source.")] = "train",
    text_column: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
) -> None:
    """Train a byte-pair vocabulary on a source."""
    from osdn.training.data import load_source, train_tokenizer

    with plain_errors():
        data = load_source(source, name=name, split=split, text_column=text_column, streaming=True)
        tokenizer = train_tokenizer((row["text"] for row in data), vocab_size)
        tokenizer.save_pretrained(output)
        console.print(f"{output} has {len(tokenizer):,} tokens")


app.add_typer(lab.app, name="lab")
app.command()(lab.demo)

app.command("eval", cls=lab.ManyValues)(evaluation.evaluate)
app.command()(evaluation.compare)

app.command()(analysis.diagnose)
app.command()(analysis.inspect)
app.command()(analysis.report)
app.add_typer(analysis.bench, name="bench")
