"""`osdn diagnose`, `inspect`, `describe`, `theory` and `zoo`: looking into models and into the theory."""

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
    made,
    plain_errors,
    progress_bar,
    show,
)


def diagnose(
    checkpoint: Checkpoint,
    prompts: Annotated[
        Path | None, typer.Option(help='A .jsonl with a "text" (and perhaps a "task") per line, or a .txt.')
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="An evaluation task, as fda_twice; may be repeated.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="A mirror of the tasks' data sets.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a prompt at most.")] = 2048,
    window: Annotated[
        int | None, typer.Option(help="Tokens of one reading in a task's prompts, as in `osdn eval`.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where diagnosis.json and figures go; runs/diagnose/MODEL if not given."),
    ] = None,
    name: Name = None,
) -> None:
    """Measure the residual ratio q_t of every write while a model reads prompts.

    Without prompts or tasks, the prompts are passages of Python's own documentation, each read twice.
    """
    from osdn.analysis.diagnose import diagnose as run
    from osdn.analysis.prompts import select
    from osdn.models.checkpoints import load_model, load_tokenizer
    from osdn.models.identity import identify
    from osdn.results import plots
    from osdn.results.store import save_json
    from osdn.results.summaries import diagnosis_tables

    with plain_errors():
        made(output or Path("runs/diagnose"))
        tokenizer = load_tokenizer(checkpoint)
        total, chosen = select(tokenizer, prompts, task or [], count, length, data_dir, window)
        model = load_model(checkpoint, device, dtype)
        identity = identify(model, checkpoint, name)
        folder = output or Path("runs/diagnose") / identity.model
        _refuse_another(folder / "diagnosis.json", identity.weights, output is None)
        with progress_bar() as progress:
            bar = progress.add_task(f"prompts read by {identity.model}", total=total)
            protocol = {"count": count, "length": length, "window": window}
            result = run(model, chosen, lambda _: progress.advance(bar), identity=identity, protocol=protocol)
        path = save_json(folder / "diagnosis.json", result)
        plots.save(plots.diagnosis({identity.model: result}), folder)
    for table in diagnosis_tables(result):
        show(table)
    speed, agreement = result["speed"], result["agreement"]
    console.print(
        f"measured and closed-form q_t differ by at most {agreement['largest_difference']:.1e}; "
        f"{100 * agreement['negligible_share']:.2f} % of the residuals were negligible and left out"
    )
    if left_out := result["attention_layers_left_out"]:
        layers = "attention layer has" if left_out == 1 else "attention layers have"
        console.print(f"left out: {left_out} {layers} no writes to measure")
    if result["rule"] is not None and result["scale"] is None:
        console.print(
            f"the rule of this model is {result['rule']}, which keeps no scale: its columns are left out"
        )
    rate = f"{speed['tokens']:,} tokens at {speed['tokens_per_second']:,.0f} per second"
    console.print(f"{rate}; {path}", soft_wrap=True)


def _refuse_another(path: Path, weights: str | None, chosen_here: bool) -> None:
    """Results of another model with the same name are not replaced unless the folder was named."""
    import json

    if not chosen_here or not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8")).get("weights")
    except (ValueError, AttributeError):
        return
    if before != weights:
        raise ValueError(
            f"{path} is of a model with the same name and other weights; give this one a --name, or a folder "
            f"with --output"
        )


def inspect(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="The text to read; a context read twice is recognised.")],
    length: Annotated[int, typer.Option(min=2, help="Tokens of the prompt at most, its last.")] = 1024,
    device: Device = "cpu",
    dtype: Dtype = None,
    quantize: Quantize = None,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("runs/inspect.html"),
    name: Name = None,
) -> None:
    """Write a page that shows a prompt's residual ratios, gates and scale, by layer and head."""
    from osdn.analysis.inspector import inspect_prompt
    from osdn.analysis.prompts import encode
    from osdn.models.checkpoints import load_model, load_tokenizer
    from osdn.models.identity import identify
    from osdn.results.inspector import write_inspector

    with plain_errors():
        made(output.parent)
        tokenizer = load_tokenizer(checkpoint)
        encoded = encode("prompt", prompt, tokenizer, length)
        model = load_model(checkpoint, device, dtype, quantize)
        texts = [tokenizer.decode([token]) for token in encoded.ids.tolist()]
        data = inspect_prompt(model, encoded, texts, identify(model, checkpoint, name).model)
        page = write_inspector(output, data)
    console.print(f"{page} shows {len(texts)} tokens; open it in a browser", soft_wrap=True)


def describe(
    model: Annotated[str, typer.Argument(help="A preset, such as osdn-340m, or a saved model's directory.")],
) -> None:
    """Show a model's parameters, state and flops next to the paper's figures."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from osdn.models import describe as run

    with plain_errors():
        description = run(model)
    table = Table(box=box.SIMPLE, show_header=False)
    for label, value in description.rows():
        table.add_row(label, escape(value))
    console.print(table)


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
    from osdn.analysis.theory.suite import Config, run_suite
    from osdn.results.summaries import check_tables

    with plain_errors():
        config = Config(seed, problems, backend)
        made(output)
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
    console.print(f"{path} and {len(figures)} figures beside it", soft_wrap=True)
    console.print(report.summary())
    if not report.passed:
        raise typer.Exit(1)


def zoo(
    key_dim: Annotated[int, typer.Option(min=1, help="K, the channels of a key.")] = 128,
    value_dim: Annotated[int, typer.Option(min=1, help="V, the channels of a value.")] = 128,
    slots: Annotated[int, typer.Option(min=1, help="M, for the rows that keep slots.")] = 64,
    markdown: Annotated[bool, typer.Option(help="Print the page docs/zoo.md instead.")] = False,
) -> None:
    """List the rows of the taxonomy with the size of their state."""
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
