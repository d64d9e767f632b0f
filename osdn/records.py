"""Result files: whatever the project measures is saved with what made it, and written whole or not at all."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

DIGITS = 16  # of a digest


def now() -> str:
    """The time as result files state it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def digest(rows: Iterable[Any]) -> str:
    """The beginning of a SHA-256 over rows of data in their order, whatever the order of a row's fields.

    >>> digest([{"text": "a", "label": 1}]) == digest([{"label": 1, "text": "a"}])
    True
    """
    total = hashlib.sha256()
    for row in rows:
        total.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return total.hexdigest()[:DIGITS]


def environment() -> dict[str, Any]:
    """Date, versions and machine, for the head of a result file."""
    packages = {}
    for name in ("osdn", "torch", "transformers", "datasets", "lm_eval", "triton"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": now(),
        "versions": {"python": platform.python_version(), **packages},
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }


def save_json(path: str | Path, content: dict[str, Any]) -> Path:
    """Writes `content` under the current environment; a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**environment(), **content}, indent=2)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text + "\n")
    partial.replace(path)
    return path


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
