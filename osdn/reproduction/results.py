"""One small file with all that the tables need: what each run scored, by model and seed."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from osdn.reproduction.finished import read_finished, rounded
from osdn.reproduction.plan import BEGUN, Plan
from osdn.reproduction.profiles import baseline_of
from osdn.reproduction.runner import MACHINE, hours_taken
from osdn.results.statistics import Estimate, t_interval
from osdn.results.store import environment

RESULTS = "results.json"
OF_A_RUN = ("model", "seed", "data", "scores", "loss", "ratio_by_position", "second_reading_at")
Content = dict[str, Any]


def collect(plan: Plan) -> Content:
    """Everything that a finished reproduction has measured."""
    begun = json.loads((plan.folder / BEGUN).read_text(encoding="utf-8"))
    machine = json.loads((plan.folder / MACHINE).read_text(encoding="utf-8"))
    speeds = json.loads(plan.speeds.read_text(encoding="utf-8"))
    runs = list(read_finished(plan))
    check_same_data(runs)
    sizes = {run["model"]: run["parameters"] for run in runs}
    return {
        "kind": "reproduction",
        **environment(),
        "profile": asdict(plan.profile),
        "text": begun["text"] | runs[0]["text"],
        "machine_choice": {key: machine[key] for key in ("layout", "precision", "trials")},
        "hours": rounded(hours_taken(plan.folder)),
        "cpus": sorted({run["machine"]["cpu"] for run in runs}),
        "models": {model: {"baseline": baseline_of(model), "parameters": n} for model, n in sizes.items()},
        "runs": [{key: run[key] for key in OF_A_RUN} for run in runs],
        "throughput": {model: speed for model, speed in speeds["models"].items() if model in sizes},
    }


def check_same_data(runs: Sequence[Mapping[str, Any]]) -> None:
    """Reject runs that read different text or answered different questions from most."""
    usual = Counter(run["data"] for run in runs).most_common(1)[0][0]
    if others := [f"{run['model']}, seed {run['seed']}" for run in runs if run["data"] != usual]:
        raise ValueError(
            f"these runs read other text than the rest: {'; '.join(others)}. Packages were installed or "
            f"removed meanwhile, and text and questions are installed files. Remove these runs from the "
            f"folders `runs` and `finished`, and run the same command to repeat them"
        )


def save(content: Content, folder: Path) -> Path:
    """Write the results, one run per line, so that a change to one is a change to a line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS
    without_runs = {name: value for name, value in content.items() if name != "runs"}
    head = json.dumps(without_runs, indent=1).removesuffix("\n}")
    runs = ",\n".join(f"  {json.dumps(run)}" for run in content["runs"])
    path.write_text(f'{head},\n "runs": [\n{runs}\n ]\n}}\n', encoding="utf-8")
    return path


def load(folder: Path) -> Content:
    path = folder / RESULTS
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `osdn reproduce --output {folder}` writes it")
    try:
        content: Content = json.loads(path.read_text(encoding="utf-8"))
        if content["kind"] != "reproduction":
            raise ValueError("it is of another kind")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result of `osdn reproduce` ({error})") from error
    return content


def values(content: Content, model: str, column: str) -> dict[int, float]:
    """What each seed of a model scored."""
    return {
        run["seed"]: run["scores"][column]
        for run in content["runs"]
        if run["model"] == model and column in run["scores"]
    }


def estimate(by_seed: Mapping[int, float]) -> Estimate | None:
    """The mean over seeds with Student's 95 % interval."""
    return t_interval(list(by_seed.values())) if by_seed else None


def difference(content: Content, model: str, base: str, column: str) -> Estimate | None:
    """The mean of what a model's seeds differ by from the same seeds of another."""
    ours, theirs = values(content, model, column), values(content, base, column)
    return estimate({seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())})


def mean_rows(rows: list[list[float | None]]) -> list[Estimate | None]:
    """The means over seeds of rows of equal length."""
    columns = np.array(rows, dtype=float).T
    return [None if np.isnan(column).any() else t_interval(column.tolist()) for column in columns]
