"""`osdn bench`: timings; each compares its contenders within one process."""

from pathlib import Path
from typing import Annotated

import typer

from osdn.terminal import Device, Dtype, console, plain_errors, progress_bar, show, writable_folder

app = typer.Typer(help="Timings; run them on an idle machine.", no_args_is_help=True)
Output = Annotated[Path, typer.Option(help="Folder for the results.")]


@app.callback()
def bench_main() -> None:
    """Timings; run them on an idle machine."""


@app.command("throughput")
def throughput(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Presets, checkpoints, or a size for all its presets: 340m, tiny, 1.3b."),
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens in the prompt.")] = 2048,
    decode: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats, after two warm-ups.")] = 5,
    device: Device = "cpu",
    dtype: Dtype = None,
    output: Output = Path("runs/bench"),
) -> None:
    """Time prefill and greedy decoding with the paper's protocol, all models back to back."""
    from osdn.benchmarks.throughput import WARM_UPS, expand
    from osdn.benchmarks.throughput import throughput as run
    from osdn.results.store import save_json
    from osdn.results.summaries import throughput_table

    with plain_errors():
        names = expand(models or ["340m"])
        writable_folder(output)
        with progress_bar() as progress:
            bar = progress.add_task("throughput", total=len(names) * (WARM_UPS + repeats))

            def advance(name: str) -> None:
                progress.update(bar, advance=1, description=name)

            result = run(
                names,
                device=device,
                dtype=dtype,
                prefill=prefill,
                decode=decode,
                repeats=repeats,
                progress=advance,
            )
        show(throughput_table(result))
        console.print(str(save_json(output / "throughput.json", result)), soft_wrap=True)


@app.command("ops")
def ops(
    quick: Annotated[bool, typer.Option(help="Only the main table and decoding.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per table.")] = 9,
    device: Device = "cpu",
    output: Output = Path("runs/bench"),
) -> None:
    """Time the operators against other implementations."""
    from osdn.benchmarks.ops import run

    with plain_errors():
        run(quick, rounds, writable_folder(output), device)


@app.command("training")
def training(
    config: Annotated[str, typer.Option(help="A training config.")] = "tiny/osdn",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
    output: Output = Path("runs/bench"),
) -> None:
    """Time the packed trainer against a bare training loop."""
    from osdn.benchmarks.training import run

    with plain_errors():
        result = run(config, steps, rounds, writable_folder(output))
    rates = result["tokens_per_second"]
    console.print(f"bare loop  {rates['loop']:10,.0f} tokens/s")
    console.print(f"trainer    {rates['trainer']:10,.0f} tokens/s, {100 * result['share']:.1f} % of it")
    console.print(str(output / "training.json"), soft_wrap=True)


@app.command("zoo")
def zoo(rounds: Annotated[int, typer.Option(min=1, help="Rounds per row.")] = 3) -> None:
    """Time the fast forms of the zoo's recurrences against their step functions."""
    from osdn.benchmarks.zoo import run

    with console.status("timing the recurrences"):
        table = run(rounds)
    show(table)
