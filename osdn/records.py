"""Result files: whatever the project measures is saved with what made it, and written whole or not at all."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Versions and machine, for the head of a result file."""
    packages = {}
    for name in ("osdn", "torch", "transformers", "datasets", "lm_eval", "triton"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "versions": {"python": platform.python_version(), **packages},
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }


def save_json(path: str | Path, content: dict[str, Any]) -> Path:
    """Writes `content` under the current environment; a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**environment(), **content}, indent=2)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())  # else a power cut may leave the new name with nothing in it
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
