"""Result files as the commands write them, for tests."""

from pathlib import Path
from typing import Any

from osdn import OSDNConfig
from osdn.models.identity import Identity, identify
from osdn.results.store import save_json


def identity(name: str, weights: str | None = "w", **changes: Any) -> Identity:
    """Of a preset, or of a model with its own name and block."""
    try:
        found = identify(OSDNConfig.from_preset(name), name)
    except ValueError:
        found = Identity(name, None, f"runs/{name}/model", weights, name, True)
    return Identity(**{**found.record(), "weights": weights, **changes})


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
    """One task with these results."""
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
