"""`osdn train`, `osdn convert` and `osdn tokenizer`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from osdn.terminal import console, plain_errors


def train(
    config: Annotated[
        str,
        typer.Argument(help="A config of the package, such as tiny/osdn, or your own YAML file."),
    ],
    replace: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, such as training.steps=100.")
    ] = None,
) -> None:
    """Train a model from a config.  Run again, it continues where it stopped."""
    from osdn.training.settings import load_settings
    from osdn.training.trainer import TrainingError
    from osdn.training.trainer import train as run

    with plain_errors(TrainingError):
        result = run(load_settings(config, replace or []))
    if os.environ.get("RANK", "0") == "0":
        console.print(f"{result} is ready for from_pretrained", soft_wrap=True)


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A training checkpoint, sharded or not.")],
    output: Annotated[Path, typer.Argument(help="Directory to write.")],
) -> None:
    """Convert a training checkpoint to a directory for from_pretrained."""
    from osdn.training.checkpoints import convert as run

    with plain_errors():
        console.print(f"{run(checkpoint, output)} is ready for from_pretrained", soft_wrap=True)


tokenizer = typer.Typer(help="Train tokenizers.", no_args_is_help=True)


@tokenizer.callback()
def tokenizer_main() -> None:
    """Train tokenizers."""


@tokenizer.command("train")
def tokenizer_train(
    source: Annotated[
        str, typer.Argument(help="stdlib, installed, a file, a directory, or a data set on the hub.")
    ],
    output: Annotated[Path, typer.Argument(help="Directory to write.")],
    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 32_000,
    name: Annotated[str | None, typer.Option(help="Configuration of a data set on the hub.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "train",
    text_column: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
) -> None:
    """Train a byte-pair tokenizer on a text source."""
    from osdn.training.data import load_source, train_tokenizer

    with plain_errors():
        data = load_source(source, name=name, split=split, text_column=text_column, streaming=True)
        trained = train_tokenizer((row["text"] for row in data), vocab_size)
        trained.save_pretrained(output)
        console.print(f"wrote {output}, a vocabulary of {len(trained):,} tokens", soft_wrap=True)
