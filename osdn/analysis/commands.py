"""The commands `osdn diagnose`, `osdn inspect`, `osdn bench` and `osdn report`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from osdn.terminal import made, plain_errors

console = Console()

Checkpoint = Annotated[str, typer.Argument(help="A directory or hub name of a causal model.")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def diagnose(
    checkpoint: Checkpoint,
    prompts: Annotated[
        Path | None, typer.Option(help='A .jsonl with a "text" (and perhaps a "task") a line, or a .txt.')
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="An evaluation task, as fda_twice; may be repeated.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="A mirror of the tasks' data sets.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a prompt at most.")] = 2048,
    device: Device = "cpu",
    output: Annotated[
        Path | None,
        typer.Option(help="Where diagnosis.json and figures go; runs/diagnose/MODEL if not named."),
    ] = None,
) -> None:
    """Measure the residual ratio q_t of every write while a model reads prompts.

    Without prompts or tasks, the prompts are passages of Python's own documentation, each read twice.
    """
    from osdn.analysis.diagnose import diagnose as run
    from osdn.analysis.figures import draw
    from osdn.analysis.prompts import select
    from osdn.analysis.tables import diagnosis_tables
    from osdn.models.checkpoints import load_model, load_tokenizer
    from osdn.models.describe import model_name
    from osdn.records import save_json
    from osdn.training.plot import drawable

    with plain_errors():
        made(output or Path("runs/diagnose"))
        tokenizer = load_tokenizer(checkpoint)
        total, chosen = select(tokenizer, prompts, task or [], count, length, data_dir)
        model = load_model(checkpoint, device)
        name = model_name(model, checkpoint)
        output = output or Path("runs/diagnose") / name
        with _progress() as progress:
            bar = progress.add_task(f"prompts read by {name}", total=total)
            result = run(model, chosen, lambda _: progress.advance(bar))
        for table in diagnosis_tables(name, result):
            console.print(table)
        settings = {"checkpoint": checkpoint, "model": name, "count": count, "length": length}
        path = save_json(output / "diagnosis.json", {**result, **settings})
        draw({drawable(name): result}, output)
    speed, agreement = result["speed"], result["agreement"]
    console.print(
        f"measured and closed-form q_t differ by at most {agreement['largest_difference']:.1e}; "
        f"{100 * agreement['negligible_share']:.2f} % of the residuals were negligible and left out"
    )
    console.print(f"{speed['tokens']:,} tokens at {speed['tokens_per_second']:,.0f} a second; {path}")


def inspect(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="The text to read; a context read twice is recognised.")],
    length: Annotated[int, typer.Option(min=2, help="Tokens of the prompt at most, its last.")] = 1024,
    device: Device = "cpu",
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("runs/inspect.html"),
) -> None:
    """Write a page that shows a prompt's residual ratios, gates and scale, by layer and head."""
    from osdn.analysis.inspector import inspect_prompt, write_page
    from osdn.analysis.prompts import encode
    from osdn.models.checkpoints import load_model, load_tokenizer
    from osdn.models.describe import model_name

    with plain_errors():
        made(output.parent)
        tokenizer = load_tokenizer(checkpoint)
        encoded = encode("prompt", prompt, tokenizer, length)
        model = load_model(checkpoint, device)
        texts = [tokenizer.decode([token]) for token in encoded.ids.tolist()]
        data = inspect_prompt(model, encoded, texts, model_name(model, checkpoint))
        console.print(f"{write_page(output, data)} shows {len(texts)} tokens; open it in a browser")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders or files of results, such as runs.")],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("runs/report.html"),
) -> None:
    """Gather the results there are into one page with the paper's tables and figures."""
    from osdn.analysis.report import collect, write_report

    with plain_errors():
        results = collect(runs)
        page = write_report(results, output)
    console.print(f"{page} holds {len(results.files)} results; open it in a browser")


bench = typer.Typer(help="Timings.", no_args_is_help=True)
Output = Annotated[Path, typer.Option(help="Folder of the results.")]


@bench.callback()
def bench_main() -> None:
    """Timings: each compares within one process, on an idle machine."""


@bench.command("throughput")
def bench_throughput(
    models: Annotated[
        list[str] | None, typer.Argument(help="Presets, or a size for all of its presets: 340m, tiny, 1.3b.")
    ] = None,
    device: Device = "cpu",
    output: Output = Path("runs/bench"),
) -> None:
    """Prefill and greedy decoding by the paper's protocol, all variants back to back."""
    from osdn.analysis.tables import throughput_table
    from osdn.analysis.throughput import REPEATS, WARM_UPS, throughput
    from osdn.models import PRESETS
    from osdn.records import save_json

    with plain_errors():
        asked = models or ["340m"]
        names = [name for m in asked for name in PRESETS if name == m or name.endswith(f"-{m}")]
        if unknown := [m for m in asked if not any(n == m or n.endswith(f"-{m}") for n in PRESETS)]:
            raise ValueError(
                f"there is no preset or size {', '.join(unknown)}; presets: {', '.join(PRESETS)}"
            )
        made(output)
        with _progress() as progress:
            bar = progress.add_task("throughput", total=len(names) * (WARM_UPS + REPEATS))

            def advance(name: str) -> None:
                progress.update(bar, advance=1, description=name)

            result = throughput(names, device=device, progress=advance)
        console.print(throughput_table(result))
        console.print(str(save_json(output / "throughput.json", result)))


@bench.command("ops")
def bench_ops(
    quick: Annotated[bool, typer.Option(help="Only the main table and decoding.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds a table.")] = 9,
    device: Device = "cpu",
    output: Output = Path("runs/bench"),
) -> None:
    """The operators against their peers."""
    from osdn.analysis.bench_ops import run

    with plain_errors():
        run(quick, rounds, made(output), device)


@bench.command("training")
def bench_training(output: Output = Path("runs/bench")) -> None:
    """The packed trainer against a bare loop."""
    _script("training", ["--output", str(output / "training.json")])


def _script(name: str, arguments: list[str]) -> None:
    """Runs one of the scripts in `benchmarks/`, which come with the source, not with the wheel."""
    import runpy
    import sys
    from unittest.mock import patch

    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    with plain_errors():
        if not path.exists():
            raise FileNotFoundError(f"benchmarks/{name}.py is not there: run this in a checkout that has it")
    with patch.object(sys, "argv", [str(path), *arguments]):
        runpy.run_path(str(path), run_name="__main__")
