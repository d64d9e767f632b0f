"""One small file per finished run with all that the tables need of it, and one with the speed of all models.

The commands' own files are read once.  After that neither they nor the weights are needed: with the files
here, a reproduction can be continued on another machine.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osdn.models import describe_model
from osdn.reproduction.plan import THROUGHPUT, Plan
from osdn.results.losses import loss_curve
from osdn.results.scores import derive
from osdn.results.store import TRAINING, digest, read_results, save_json

POINTS = 100  # of a loss curve
DIGITS = 6
SPEED = ("tokens_per_second", "prefill_ms", "decode_ms", "state_mib")
PROTOCOL = ("device", "dtype", "prefill", "decode", "warm_ups", "repeats")


def save_finished(plan: Plan, precision: str) -> None:
    """Write the file of every run whose commands are all done."""
    for model, seed in plan.profile.runs:
        path = plan.finished(model, seed)
        jobs = [plan.training(model, seed, precision), *plan.evaluations(model, seed)]
        if not path.exists() and all(job.is_done() for job in jobs):
            run = read_run(plan.run_folder(model, seed), model, seed)
            save_json(path, {"kind": "reproduction-run", **run})


def save_speeds(plan: Plan) -> None:
    """Write the speed of every model, if it has been measured."""
    path = plan.folder / THROUGHPUT
    if path.exists() and not plan.speeds.exists():
        timed = json.loads(path.read_text(encoding="utf-8"))
        protocol = {key: timed[key] for key in PROTOCOL}
        models = {row["model"]: _speed(row, timed["rows"]) for row in timed["rows"]}
        save_json(plan.speeds, {"kind": "reproduction-speed", **protocol, "models": models})


def _speed(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A model's speed, and by how many per cent each repeat differed from its baseline's."""
    speed: dict[str, Any] = {key: rounded(row[key]) for key in SPEED if row.get(key) is not None}
    base = next((other for other in rows if other["model"] == row["compared_with"]), None)
    if base is not None:
        pairs = zip(base["times_ms"], row["times_ms"])
        speed["changes"] = [rounded(100 * (sum(theirs) / sum(ours) - 1)) for theirs, ours in pairs]
    return speed


def read_finished(plan: Plan) -> Iterator[dict[str, Any]]:
    """What every run of the plan measured, in the plan's order."""
    for model, seed in plan.profile.runs:
        yield json.loads(plan.finished(model, seed).read_text(encoding="utf-8"))


def read_run(folder: Path, model: str, seed: int) -> dict[str, Any]:
    """All that the commands measured of a run."""
    store = read_results([folder])
    if store.unreadable:
        path, reason = next(iter(store.unreadable.items()))
        raise ValueError(f"{path} cannot be read: {reason}; remove it and run the same command")
    scores = {
        name: score.value for name, score in derive({m.column: m.score for m in store.measurements}).items()
    }
    [(_, diagnosis)], [run] = store.diagnoses, store.runs
    overall, curve = diagnosis["all"], loss_curve(run.lines)
    for reading in ("first_reading", "second_reading"):
        if overall[reading] is not None:
            scores[f"q_{reading}"] = overall[reading]["value"]
    scores["lm_ppl"] = math.exp(scores["validation_loss"])
    thin = max(1, len(curve.tokens) // POINTS)
    trained = json.loads((folder / TRAINING).read_text(encoding="utf-8"))["data"]
    return {
        "model": model,
        "seed": seed,
        "parameters": describe_model(folder / "model").parameters,
        "text": {key: trained[key] for key in ("documents", "tokens", "digest")},
        "data": digest(sorted((m.column, m.data.digest or "") for m in store.measurements)),
        "scores": {name: rounded(x) for name, x in sorted(scores.items())},
        "loss": [[int(t), rounded(x)] for t, x in list(zip(curve.tokens, curve.losses))[thin - 1 :: thin]],
        "ratio_by_position": [row and rounded(row["value"]) for row in overall["by_position"]],
        "second_reading_at": overall["boundary"],
    }


def rounded(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")
