"""`osdn lab TASK` for every task of the lab, and `osdn demo`."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from osdn.terminal import console, plain_errors, show, writable_folder

if TYPE_CHECKING:
    from osdn.lab.summary import Results
    from osdn.lab.variants import Variant


class Tasks(TyperGroup):
    """Adds one command per task, from a file that lists their options: help needs no torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._load()
        return super().get_command(ctx, cmd_name)

    def _load(self) -> None:
        from osdn.cli import task_options

        if "recall" in self.commands:
            return
        tasks = typer.Typer()
        for name, task in task_options.load().items():
            tasks.command(name, cls=ManyValues)(task_command(name, task))
        group = typer.main.get_command(tasks)
        self.commands = {**group.commands, **self.commands}  # type: ignore[attr-defined]


app = typer.Typer(
    help="Small experiments on a CPU: minutes for a task, hours for the two studies.",
    no_args_is_help=True,
    cls=Tasks,
)


class ManyValues(TyperCommand):
    """Lets a repeatable option take several values in a row: `--eta 0.001 0.003`."""

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
    list[str], typer.Option("--variants", help="Models: osdn-apf, osdn+d0, or a recurrence of the zoo.")
]
Etas = Annotated[list[float], typer.Option("--eta", help="Step sizes to sweep, such as 0.001 0.003.")]
Boxes = Annotated[list[str], typer.Option("--box", help="Bounds of the scale to sweep, such as 0.5:2.")]
Bias = Annotated[
    float | None, typer.Option(help="Initial value of a learned bias in every write gate; default: no bias.")
]
WriteScale = Annotated[
    float, typer.Option(min=0.0, help="Factor on every write strength; with 2, strengths go up to 2.")
]
Output = Annotated[Path, typer.Option(help="Folder for results and figures.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds.")]
Width = Annotated[int, typer.Option(min=8, help="Hidden size of the model.")]
Layers = Annotated[int, typer.Option(min=1, help="Number of layers.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per step.")]
Rate = Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the runs and their expected time, and exit.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Number of parallel runs; default: one per core.")]


# Options that every task has, in the order of --help; those of the task come after `seeds`.
BEFORE: dict[str, Any] = {
    "variants": (Variants, ["delta_net", "osdn", "osdn-apf"]),
    "eta": (Etas, []),
    "box": (Boxes, []),
    "beta_bias": (Bias, None),
    "write_scale": (WriteScale, 1.0),
}
AFTER: dict[str, Any] = {"width": (Width, 64), "layers": (Layers, 2)}
TYPES = {"int": int, "float": float, "str": str, "bool": bool}


def task_command(name: str, task: dict[str, Any]) -> Callable[..., None]:
    """The command of a task: the options that all tasks share, plus its own."""
    own = {
        field: (Annotated[_type(option["type"]), typer.Option(help=option["help"])], option["default"])
        for field, option in task["options"].items()
    }
    options = {
        **BEFORE,
        "seeds": (Seeds, task["seeds"]),
        **own,
        **AFTER,
        "steps": (Steps, task["steps"]),
        "batch": (Batch, task["batch"]),
        "learning_rate": (Rate, 0.005),
        "jobs": (Jobs, None),
        "output": (Output, Path("runs/lab") / name),
    }

    def command(**values: Any) -> None:
        run_task(name, {field: values[field] for field in own}, values)

    command.__doc__ = task["help"]
    command.__annotations__ = {field: kind for field, (kind, _) in options.items()} | {"return": None}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for field, (kind, default) in options.items()
        ]
    )
    return command


def _type(described: str | list[str]) -> Any:
    """The type of an option: by name, or one of several words."""
    return TYPES[described] if isinstance(described, str) else Literal[tuple(described)]


def run_task(name: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Train and evaluate every variant with every seed; write tables and figures."""
    from osdn.lab.summary import by_label
    from osdn.lab.tasks import EXPERIMENTS
    from osdn.lab.training import Run
    from osdn.results.names import title

    experiment, output = EXPERIMENTS[name], options["output"]
    gate = (options["beta_bias"], options["write_scale"])
    chosen = _sweep(options["variants"], options["eta"], options["box"], gate, options["width"], output)
    try:
        task = replace(experiment.task, **settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with console.status("preparing the task"):
        task = task.prepare(output)
    sizes = [options[x] for x in ("width", "layers", "steps", "batch", "learning_rate")]
    runs = [Run(task, v, seed, *sizes) for v in chosen for seed in range(options["seeds"])]
    grouped = _experiment(name, runs, chosen, list(experiment.metrics), output, options["jobs"])
    results = by_label(grouped)
    for label, finished in results.items():
        if "sample" in finished[0]:
            console.rule(f"{title(label)} writes")
            console.print(finished[0]["sample"], markup=False, highlight=False)
    figures = _figures(results, task)
    _save_figures(figures | _sweep_figures(grouped, list(experiment.metrics), options["eta"]), output)


def _figures(results: dict[str, Any], task: Any) -> dict[str, Any]:
    """The figures of a task: its learning curve, and whatever its evaluation measured."""
    from osdn.results import lab_plots as fig

    first = next(iter(results.values()))[0]
    figures = {"learning": fig.learning_curves(results, "loss" if "loss" in first else "accuracy")}
    if "loss_by_position" in first:
        figures["loss"] = fig.loss_by_position(results)
    if "pairs" in first.get("grid", [{}])[0]:
        figures["accuracy"] = fig.accuracy_by_pairs(results)
    elif "depth" in first.get("grid", [{}])[0]:
        figures["accuracy"] = fig.accuracy_by_depth(results)
    elif "accuracy_2x" in first:
        figures["accuracy"] = fig.accuracy_by_length(results)
    if any("log_q" in runs[0] for runs in results.values()):
        boundaries = task.boundaries() if hasattr(task, "boundaries") else ()
        figures["residual"] = fig.residual_by_position(results, boundaries)
    return figures


@app.command(cls=ManyValues)
def referee(
    contestants: Annotated[
        list[str], typer.Option(help="Names as for --variants; default: every rule on three backbones.")
    ] = [],  # noqa: B006
    tasks: Annotated[list[str], typer.Option(help="Names of tasks; default: all that can be learned.")] = [],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=2, help="Number of seeds.")] = 6,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer tasks, contestants and steps.")] = False,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    output: Output = Path("runs/referee"),
) -> None:
    """Compare preconditioners and other updates with plain delta rules, all tuned in the same way."""
    from osdn.lab import referee as lab

    with plain_errors():
        writable_folder(output)
        names = contestants or (lab.QUICK_CONTESTANTS if quick else lab.CONTESTANTS)
        protocol = lab.Protocol(lab.TRIALS, tuple(names), seeds=seeds)
        protocol = lab.with_tasks(protocol, tasks or (lab.QUICK if quick else ()))
        if quick:
            protocol = lab.quick(protocol)
        content = _contest("referee", protocol, lab.planned, lab.run_referee, output, jobs, dry_run)
        if content is not None:
            _show_contest(content, output, " --quick" * quick)


@app.command("write-gate")
def write_gate(
    seeds: Annotated[int, typer.Option(min=2, help="Number of seeds.")] = 6,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    output: Output = Path("runs/write-gate"),
) -> None:
    """Study where the initial value of DeltaNet's write gate matters: widths, heads, lengths, budgets."""
    from osdn.lab import write_gate as lab

    with plain_errors():
        writable_folder(output)
        study = lab.Study(seeds=seeds)
        content = _contest("write-gate", study, lab.planned, lab.run_study, output, jobs, dry_run)
        if content is not None:
            _show_contest(content, output)


def _contest(
    name: str,
    contest: Any,
    planned: Callable[..., Any],
    run: Callable[..., dict[str, Any]],
    output: Path,
    jobs: int | None,
    dry_run: bool,
) -> dict[str, Any] | None:
    """Show what is left to run, run it and save the result; a dry run stops after the plan."""
    from osdn.lab.referee import plan_table, prepared
    from osdn.lab.runner import pack, progress_bar
    from osdn.results.store import save_json

    with console.status("timing a few steps of every task"):
        contest = prepared(contest, output)
        plan = plan_table(planned(contest, output), output, jobs)
    show(plan)
    if dry_run:
        return None
    with progress_bar(console) as progress:
        content = run(contest, output, progress, jobs)
    save_json(output / f"{name}.json", content)
    pack(output)
    return content


def _show_contest(content: dict[str, Any], output: Path, options: str = "") -> None:
    """Print the main tables and findings, as in the report, and write the page."""
    from osdn.results.contests import CONTESTS, fill_document

    contest = CONTESTS[content["kind"]]
    page = contest.write_page(output / f"{content['kind']}.html", content, contest.command + options)
    for table in contest.tables(content, 1.0):
        show(table)
    for words in contest.verdicts(content):
        console.print(words, soft_wrap=True, markup=False, highlight=False)
    console.print(f"wrote {page.resolve()}; open it in a browser", soft_wrap=True)
    if fill_document(content, output):
        console.print(f"filled in {output.with_suffix('.md')}", soft_wrap=True)


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("runs/demo"),
) -> None:
    """Train small models in minutes and write a page that shows what online scaling did."""
    from osdn.demo import run_demo

    with plain_errors():
        path = run_demo(writable_folder(output), console)
    console.print(f"wrote {path.resolve()}; open it in a browser", soft_wrap=True)


def _sweep(
    names: Sequence[str],
    etas: Sequence[float],
    boxes: Sequence[str],
    gate: tuple[float | None, float],
    width: int,
    output: Path,
) -> "list[Variant]":
    """The models to train; settings that cannot work are rejected before the first one is trained."""
    from osdn.lab.variants import sweep

    try:
        variants = sweep(names, etas, [_bounds(box) for box in boxes], *gate)
        for variant in variants:
            variant.config(width=width)  # raises if no model can be built from it
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with plain_errors():
        writable_folder(output)
    return variants


def _bounds(box: str) -> tuple[float, float]:
    low, _, high = box.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise ValueError(f"box is {box!r}; it must be two numbers, such as 0.5:2") from None


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
    """One figure per metric: its values against eta, one line per variant and box."""
    from osdn.results.lab_plots import step_size_sweep

    swept = {variant: runs for variant, runs in results.items() if variant.eta is not None}
    if len(etas) < 2 or not swept:
        return {}
    figures = {}
    for metric in metrics:
        if metric not in next(iter(swept.values()))[0]:
            continue
        lines: dict[str, list[Any]] = {}
        for variant, runs in swept.items():
            label = replace(variant, eta=None).label
            lines.setdefault(label, []).append((variant.eta, [run[metric] for run in runs]))
        levels = {v.label: runs for v, runs in results.items() if v.eta is None and metric in runs[0]}
        figures[f"eta_{metric}"] = step_size_sweep(lines, levels, metric)
    return figures


def _save_figures(figures: dict[str, Any], output: Path) -> None:
    from osdn.results.style import save

    save(figures, output)
    message = f"wrote results, summary.csv, summary.json and {len(figures)} figures to {output}"
    console.print(message, soft_wrap=True)
