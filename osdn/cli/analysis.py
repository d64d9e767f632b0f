"""`osdn diagnose`, `inspect`, `describe`, `theory` and `zoo`: models and theory up close."""

from pathlib import Path
from typing import Annotated

import typer

from osdn.terminal import (
    Checkpoint,
    Device,
    Dtype,
    Name,
    Quantize,
    console,
    plain_errors,
    progress_bar,
    show,
    writable_folder,
)


def diagnose(
    checkpoint: Checkpoint,
    prompts: Annotated[
        Path | None,
        typer.Option(help='A .jsonl with a "text" (and optionally a "task") per line, or a .txt.'),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="An evaluation task, such as fda_twice; may be repeated.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="A local mirror of the tasks' data sets.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts per task.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Maximum number of tokens per prompt.")] = 2048,
    window: Annotated[
        int | None, typer.Option(help="Tokens of one reading in a task's prompts, as in `osdn eval`.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for diagnosis.json and the figures; default: runs/diagnose/MODEL."),
    ] = None,
    name: Name = None,
) -> None:
    """Measure the residual ratio q_t of every write while a model reads prompts.

    Without prompts or tasks, the model reads passages of Python's own documentation, each of them twice.
    """
    from osdn.analysis.diagnose import diagnose as run
    from osdn.analysis.prompts import select
    from osdn.models.checkpoints import load_model, load_tokenizer
    from osdn.models.identity import identify
    from osdn.results import plots
    from osdn.results.store import save_json
    from osdn.results.summaries import diagnosis_tables

    with plain_errors():
        writable_folder(output or Path("runs/diagnose"))
        tokenizer = load_tokenizer(checkpoint)
        total, chosen = select(tokenizer, prompts, task or [], count, length, data_dir, window)
        model = load_model(checkpoint, device, dtype)
        identity = identify(model, checkpoint, name)
        folder = output or Path("runs/diagnose") / identity.model
        _check_same_model(folder / "diagnosis.json", identity.weights, output is None)
        with progress_bar() as progress:
            bar = progress.add_task(f"{identity.model} reads prompts", total=total)
            protocol = {"count": count, "length": length, "window": window}
            result = run(model, chosen, lambda _: progress.advance(bar), identity=identity, protocol=protocol)
        path = save_json(folder / "diagnosis.json", result)
        plots.save(plots.diagnosis({identity.model: result}), folder)
    for table in diagnosis_tables(result):
        show(table)
    speed, agreement = result["speed"], result["agreement"]
    console.print(
        f"measured and closed-form q_t differ by at most {agreement['largest_difference']:.1e}; "
        f"{100 * agreement['negligible_share']:.2f} % of the residuals were negligible and were left out"
    )
    if left_out := result["attention_layers_left_out"]:
        layers = "attention layer has" if left_out == 1 else "attention layers have"
        console.print(f"left out: {left_out} {layers} no writes to measure")
    if result["rule"] is not None and result["scale"] is None:
        console.print(
            f"this model's rule, {result['rule']}, keeps no scale: the columns on the scale are left out"
        )
    rate = f"{speed['tokens']:,} tokens at {speed['tokens_per_second']:,.0f} per second"
    console.print(f"{rate}; {path}", soft_wrap=True)


def _check_same_model(path: Path, weights: str | None, default_folder: bool) -> None:
    """Do not replace the results of another model of the same name, unless the user named the folder."""
    import json

    if not default_folder or not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8")).get("weights")
    except (ValueError, AttributeError):
        return
    if before != weights:
        raise ValueError(
            f"{path} belongs to a model with the same name and other weights; pass another "
            f"--name, or a folder with --output"
        )


def inspect(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str, typer.Option(help="The text to read; a context that appears twice is recognised.")
    ],
    length: Annotated[
        int, typer.Option(min=2, help="Maximum number of tokens; the last ones are kept.")
    ] = 1024,
    device: Device = "cpu",
    dtype: Dtype = None,
    quantize: Quantize = None,
    output: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("runs/inspect.html"),
    name: Name = None,
) -> None:
    """Write an interactive page with residual ratios, gates and scale for one prompt, by layer and head."""
    from osdn.analysis.inspector import inspect_prompt
    from osdn.analysis.prompts import encode
    from osdn.models.checkpoints import load_model, load_tokenizer
    from osdn.models.identity import identify
    from osdn.results.inspector import write_inspector

    with plain_errors():
        writable_folder(output.parent)
        tokenizer = load_tokenizer(checkpoint)
        encoded = encode("prompt", prompt, tokenizer, length)
        model = load_model(checkpoint, device, dtype, quantize)
        texts = [tokenizer.decode([token]) for token in encoded.ids.tolist()]
        data = inspect_prompt(model, encoded, texts, identify(model, checkpoint, name).model)
        page = write_inspector(output, data)
    console.print(f"wrote {page} with {len(texts)} tokens; open it in a browser", soft_wrap=True)


def describe(
    model: Annotated[str, typer.Argument(help="A preset, such as osdn-340m, or a saved model's directory.")],
) -> None:
    """Show a model's parameters, state and flops next to the paper's figures."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from osdn.models import describe_model

    with plain_errors():
        description = describe_model(model)
    table = Table(box=box.SIMPLE, show_header=False)
    for label, value in description.rows():
        table.add_row(label, escape(value))
    console.print(table)


def theory(
    output: Annotated[Path, typer.Option(help="Folder for theory.json and the figures.")] = Path(
        "runs/theory"
    ),
    seed: Annotated[int, typer.Option(help="Seed for the random problems.")] = 0,
    problems: Annotated[int, typer.Option(min=1, help="Number of random problems of each kind.")] = 32,
    backend: Annotated[str, typer.Option(help="Backend of the operators.")] = "auto",
    model: Annotated[Path | None, typer.Option(help="A saved model whose own keys to check as well.")] = None,
) -> None:
    """Check every statement of the paper on runs of the operators, and plot them."""
    from osdn.analysis.theory.figures import draw
    from osdn.analysis.theory.models import statements_of
    from osdn.analysis.theory.suite import Config, run_suite
    from osdn.results.summaries import check_tables

    with plain_errors():
        config = Config(seed, problems, backend)
        writable_folder(output)
        if model is not None:
            with console.status(f"running {model}"):
                own = statements_of(model)
        with console.status("running the operators on random problems"):
            report = run_suite(config)
        for table in check_tables("The paper's statements", report.statements, report.violations):
            show(table)
        if model is not None:
            show(check_tables(f"On the keys and gates of {model}", own, [])[0])
            report.model_statements.extend(own)
        with console.status("drawing"):
            path, figures = report.write(output), draw(config, output)
    console.print(f"wrote {path} and {len(figures)} figures beside it", soft_wrap=True)
    console.print(report.summary())
    if not report.passed:
        raise typer.Exit(1)


def zoo(
    key_dim: Annotated[int, typer.Option(min=1, help="K, channels per key.")] = 128,
    value_dim: Annotated[int, typer.Option(min=1, help="V, channels per value.")] = 128,
    slots: Annotated[int, typer.Option(min=1, help="M, slots, for the rows that have them.")] = 64,
    markdown: Annotated[bool, typer.Option(help="Print docs/zoo.md instead.")] = False,
) -> None:
    """List the recurrences of the paper's taxonomy and the size of their states."""
    from osdn.results.tables import Cell, Row, Table
    from osdn.zoo import RECURRENCES
    from osdn.zoo.table import markdown as page

    if markdown:
        print(page(), end="")
        return
    rows = [
        Row(
            r.name,
            [Cell(r.title), Cell(r.state_formula), Cell(f"{r.state_size(key_dim, value_dim, slots):,}")],
        )
        for r in RECURRENCES.values()
    ]
    sizes = f"K = {key_dim}, V = {value_dim}, M = {slots}"
    show(Table(f"State per head, {sizes}", ["row", "state", "size"], rows, corner="name", left=(0, 1)))
