"""`osdn lab recall`, `osdn lab text` and `osdn demo`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from osdn.terminal import console, made, plain_errors, show

if TYPE_CHECKING:
    from osdn.lab.summary import Results
    from osdn.lab.variants import Variant

app = typer.Typer(help="Small experiments that run on a CPU in minutes.", no_args_is_help=True)


class ManyValues(TyperCommand):
    """Lets an option that may be repeated take its values in a row: `--eta 0.001 0.003`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeated = {name for p in self.params if getattr(p, "multiple", False) for name in p.opts}
        spread: list[str] = []
        option = None
        for arg in args:
            if arg.startswith("--"):
                option = arg if arg in repeated else None
            elif option is not None and spread[-1] != option:
                spread.append(option)
            spread.append(arg)
        return super().parse_args(ctx, spread)


Variants = Annotated[
    list[str], typer.Option("--variants", help="Names: osdn-apf, osdn+d0, or a row of the zoo.")
]
Etas = Annotated[list[float], typer.Option("--eta", help="Step sizes to sweep, in a row.")]
Boxes = Annotated[list[str], typer.Option("--box", help="Boxes to sweep, as 0.5:2.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds.")]
Width = Annotated[int, typer.Option(min=8, help="Width of the model.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers of the model.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per step.")]
Rate = Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs side by side; default: one per core.")]


@app.command(cls=ManyValues)
def recall(
    variants: Variants = ["delta_net", "osdn", "osdn-apf"],  # noqa: B006
    eta: Etas = [],  # noqa: B006
    box: Boxes = [],  # noqa: B006
    seeds: Seeds = 6,
    vocab_size: Annotated[int, typer.Option(help="Half keys, half values.")] = 128,
    pairs: Annotated[int, typer.Option(help="Key-value pairs in a sequence.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 64,
    passes: Annotated[int, typer.Option(help="How often the pairs are presented.")] = 2,
    overwrites: Annotated[int, typer.Option(help="Keys given again with another value.")] = 0,
    width: Width = 64,
    layers: Layers = 2,
    steps: Steps = 200,
    batch: Batch = 32,
    learning_rate: Rate = 0.005,
    jobs: Jobs = None,
    output: Annotated[Path, typer.Option(help="Where results and figures go.")] = Path("runs/lab/recall"),
) -> None:
    """Multi-query associative recall, for any variants over several seeds."""
    from osdn.lab.recall import RecallTask
    from osdn.lab.summary import by_label
    from osdn.lab.training import Run
    from osdn.results import lab_plots as fig

    chosen = _sweep(variants, eta, box, width, output)
    try:
        task = RecallTask(vocab_size, pairs, length, passes, overwrites)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    runs = [
        Run(task, v, seed, width, layers, steps, batch, learning_rate)
        for v in chosen
        for seed in range(seeds)
    ]
    metrics = ["accuracy", "accuracy_2x", "q_geo"]
    grouped = _experiment("recall", runs, chosen, metrics, output, jobs)
    results = by_label(grouped)
    figures = {
        "learning": fig.learning_curves(results, "accuracy"),
        "accuracy": fig.accuracy_by_pairs(results),
    }
    if any("log_q" in mine[0] for mine in results.values()):
        figures["residual"] = fig.residual_by_position(results, task.boundaries())
    _finish(figures | _sweep_figures(grouped, metrics, eta), output)


@app.command(cls=ManyValues)
def text(
    variants: Variants = ["delta_net", "osdn", "osdn-apf"],  # noqa: B006
    eta: Etas = [],  # noqa: B006
    box: Boxes = [],  # noqa: B006
    seeds: Seeds = 3,
    vocab_size: Annotated[int, typer.Option(min=257, help="Entries of the byte-pair vocabulary.")] = 1024,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a sequence.")] = 256,
    megabytes: Annotated[
        float, typer.Option(min=0.1, help="How much of the standard library to take.")
    ] = 4.0,
    width: Width = 64,
    layers: Layers = 2,
    steps: Steps = 600,
    batch: Batch = 8,
    learning_rate: Rate = 0.005,
    jobs: Jobs = None,
    output: Annotated[Path, typer.Option(help="Where results and figures go.")] = Path("runs/lab/text"),
) -> None:
    """A small language model on the sources of Python's standard library."""
    from osdn.lab.summary import by_label
    from osdn.lab.text import TextTask, prepare
    from osdn.lab.training import Run
    from osdn.results import lab_plots as fig
    from osdn.results.names import title

    chosen = _sweep(variants, eta, box, width, output)
    task = TextTask(str(output / f"corpus-{vocab_size}-{megabytes:g}MB"), vocab_size, length, megabytes)
    with console.status("training a vocabulary on the standard library"):
        prepare(task)
    runs = [
        Run(task, v, seed, width, layers, steps, batch, learning_rate)
        for v in chosen
        for seed in range(seeds)
    ]
    grouped = _experiment("text", runs, chosen, ["loss", "perplexity", "q_geo"], output, jobs)
    results = by_label(grouped)
    for label, mine in results.items():
        console.rule(f"{title(label)} writes")
        console.print(mine[0]["sample"], markup=False, highlight=False)
    figures = {
        "learning": fig.learning_curves(results, "loss"),
        "loss": fig.loss_by_position(results),
    }
    if any("log_q" in mine[0] for mine in results.values()):
        figures["residual"] = fig.residual_by_position(results)
    _finish(figures | _sweep_figures(grouped, ["loss", "q_geo"], eta), output)


def demo(
    output: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("runs/demo"),
) -> None:
    """Train small models in minutes and write a page on what online scaling did."""
    from osdn.demo import run_demo

    with plain_errors():
        path = run_demo(made(output), console)
    console.print(f"the report is {path.resolve()}", soft_wrap=True)


def _sweep(
    names: Sequence[str], etas: Sequence[float], boxes: Sequence[str], width: int, output: Path
) -> "list[Variant]":
    """The models asked for; what cannot work is refused before the first of them is trained."""
    from osdn.lab.variants import sweep

    try:
        found = sweep(names, etas, [_bounds(box) for box in boxes])
        for variant in found:
            variant.config(width=width)  # refuses what no model can be built from
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with plain_errors():
        made(output)
    return found


def _bounds(box: str) -> tuple[float, float]:
    low, _, high = box.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise ValueError(f"box is {box!r}; it must be two numbers, as 0.5:2") from None


def _experiment(
    title: str, runs: Any, variants: "list[Variant]", metrics: list[str], output: Path, jobs: int | None
) -> "Results":
    from osdn.lab import runner, summary
    from osdn.results.experiments import experiment_table

    with plain_errors(), runner.progress_bar(console) as progress:
        bar = progress.add_task(title, total=sum(runner.cost(run) for run in runs), live="")
        results = summary.group(variants, runner.run_all(runs, output, progress, bar, jobs))
    rows = summary.summarize(results, metrics)
    show(experiment_table(summary.records(rows), title.capitalize()))
    summary.write(results, rows, output, title)
    return results


def _sweep_figures(results: "Results", metrics: list[str], etas: Sequence[float]) -> dict[str, Any]:
    """A figure per metric of its values against eta, one line per variant and box."""
    from osdn.lab.variants import Variant
    from osdn.results.lab_plots import step_size_sweep

    swept = {variant: mine for variant, mine in results.items() if variant.eta is not None}
    if len(etas) < 2 or not swept:
        return {}
    figures = {}
    for metric in metrics:
        if metric not in next(iter(swept.values()))[0]:
            continue
        lines: dict[str, list[Any]] = {}
        for variant, mine in swept.items():
            label = Variant(variant.name, None, variant.bounds).label
            lines.setdefault(label, []).append((variant.eta, [run[metric] for run in mine]))
        levels = {v.label: mine for v, mine in results.items() if v.eta is None and metric in mine[0]}
        figures[f"eta_{metric}"] = step_size_sweep(lines, levels, metric)
    return figures


def _finish(figures: dict[str, Any], output: Path) -> None:
    from osdn.results.style import save

    save(figures, output)
    words = f"results, summary.csv, summary.json and {len(figures)} figures are in {output}"
    console.print(words, soft_wrap=True)
