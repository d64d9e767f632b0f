"""Result files for tests, as the commands write them."""

from pathlib import Path
from typing import Any

from osdn import OSDNConfig
from osdn.models.identity import Identity, identify
from osdn.results.store import save_json


def identity(name: str, weights: str | None = "w", **changes: Any) -> Identity:
    """The identity of a preset, or of a model with its own name and block."""
    try:
        model = identify(OSDNConfig.from_preset(name), name)
    except ValueError:
        model = Identity(name, None, f"runs/{name}/model", weights, name, True)
    return Identity(**{**model.record(), "weights": weights, **changes})


def save_evaluation(
    folder: Path,
    model: Identity | str,
    results: dict[str, float],
    errors: dict[str, float] | None = None,
    *,
    suite: str = "suite",
    protocol: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    date: str = "2026-01-02T03:04:05+00:00",
    **task: Any,
) -> Path:
    """Save an evaluation of one task with these results."""
    model = identity(model) if isinstance(model, str) else model
    entry = {
        "results": results,
        "errors": errors or {},
        "protocol": {"limit": None, **(protocol or {})},
        "data": {"source": "data", "split": "test", "documents": 10, "digest": "d", **(data or {})},
        **task,
    }
    content = {"kind": "evaluation", "suite": suite, **model.record(), "tasks": {"task": entry}}
    return save_json(folder / f"{model.model}.json", {**content, "results": results, "date": date})


def save_throughput(folder: Path, rows: list[tuple[Identity, dict[str, Any]]]) -> Path:
    times = {"tokens_per_second": 10.0, "prefill_ms": 1.0, "decode_ms": 2.0, "state_mib": 1.0}
    timed = [{**model.record(), **times, **row} for model, row in rows]
    content = {"kind": "throughput", "device": "cpu", "dtype": "float32", "prefill": 2048, "decode": 128}
    return save_json(folder / "throughput.json", {**content, "rows": timed})


CONTESTANTS = {
    "delta_net": "delta_net",
    "osdn": "delta_net",
    "osdn-newton": "delta_net",
    "gdn": "gdn",
    "gdn+pgdn": "gdn",
}


def referee_row(trial, contestant, budget, mean=0.0, adjusted=1.0, spread=0.02):
    difference = None
    if contestant != CONTESTANTS[contestant]:
        difference = {"mean": mean, "low": mean - spread, "high": mean + spread, "seeds": 6, "p_value": 0.03}
    value = {"mean": 0.5 + mean, "low": 0.4, "high": 0.6, "seeds": 6}
    row = {
        "trial": trial,
        "metric": "accuracy",
        "contestant": contestant,
        "baseline": CONTESTANTS[contestant],
    }
    return row | {
        "budget": budget, "value": value, "difference": difference, "t_p": adjusted / 4, "adjusted": adjusted,
    }  # fmt: skip


def referee_content(effects, trials=("capacity", "text")):
    """A referee's result; `effects` maps (trial, contestant, budget) to a mean and an adjusted p-value."""
    cells = [(t, n) for t in trials for n in CONTESTANTS]
    rows = [
        referee_row(t, n, b, *effects.get((t, n, b), (0.0, 1.0))) for b in (0.25, 0.5, 1.0) for t, n in cells
    ]
    tuned = [
        {"trial": t, "contestant": n, "learning_rate": 0.01, "beta_bias": None if n == "gdn" else -2.0,
         "score": 0.5, "score_without_bias": 0.4}
        for t, n in cells
    ]  # fmt: skip
    writes = [{"trial": t, "contestant": n, "beta": 0.2, "key_scale": 0.9, "q_geo": 0.6} for t, n in cells]
    task = {"vocab_size": 64, "length": 128, "folder": ""}
    return {
        "kind": "referee", "seeds": 6, "tuning_seeds": [1000], "width": 32, "layers": 2, "rows": rows,
        "tuned": tuned, "writes": writes, "parameters": {n: 1000 + 10 * i for i, n in enumerate(CONTESTANTS)},
        "trials": [
            {"name": t, "metric": "accuracy", "steps": 10, "batch": 2, "write_scale": 1.0,
             "lower_is_better": False, "task": task}
            for t in trials
        ],
    }  # fmt: skip
