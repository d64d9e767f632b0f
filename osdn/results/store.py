"""Result files: how they are written, and the only reader, which everything that shows results uses.

A file identifies its model by an `Identity` (name, preset, digest of the weights, block) and records what was
measured: the protocol (limit, window, dtype, ...) and the data (source, number of documents, digest).
Reading it gives one measurement per column.  If two measurements agree in model, weights, column, protocol
and data, the newer one counts.  A file that cannot be read is reported and ignored as a whole.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from osdn.models.identity import DIGITS, Identity
from osdn.results.names import title
from osdn.results.scores import Score

METRICS, TRAINING = "metrics.jsonl", "training.json"  # a training run's log, and its record
# A table's title mentions only what differs from this protocol.
STANDARD = {
    "window": 1000, "dtype": "float32", "context": 4096, "block": 20_480,  # osdn eval
    "count": 16, "length": 2048,  # osdn diagnose
    "prefill": 2048, "decode": 128,  # osdn bench throughput
}  # fmt: skip
WORDS = {"max_length": "max length"}


def now() -> str:
    """The current time in the format of result files."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def digest(rows: Iterable[Any]) -> str:
    """The first digits of a SHA-256 over rows of data; it depends on the order of rows, not of their fields.

    >>> digest([{"text": "a", "label": 1}]) == digest([{"label": 1, "text": "a"}])
    True
    """
    total = hashlib.sha256()
    for row in rows:
        total.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return total.hexdigest()[:DIGITS]


def environment() -> dict[str, Any]:
    """Date, versions and machine, for the start of a result file."""
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
    """Write the current environment and `content`; a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**environment(), **content}, indent=2)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())  # otherwise a power cut may leave an empty file under the new name
    partial.replace(path)
    return path


@dataclass(frozen=True)
class Data:
    """The data of a result; the digest decides whether two results are about the same documents."""

    source: str
    documents: int | None = None
    digest: str | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Data":
        split = record.get("split")
        source = ", ".join(str(part) for part in (record["source"], record.get("name"), split) if part)
        return cls(source, record.get("documents"), record.get("digest"))

    def __str__(self) -> str:
        count = "" if self.documents is None else f", {self.documents:,} documents"
        return f"{self.source}{count}"


@dataclass(frozen=True)
class Measurement:
    """One number of one model."""

    model: Identity
    column: str
    score: Score
    file: Path
    date: str
    protocol: str = ""  # in words, how it differs from the standard
    data: Data = Data("")
    cut: int = 0  # prompts that were truncated
    documents: np.ndarray | None = field(default=None, compare=False)  # the score of each document

    @property
    def key(self) -> tuple[Any, ...]:
        return (*model_key(self.model), self.column, self.protocol, self.data.digest or self.data.source)


@dataclass(frozen=True)
class Run:
    """A training run's losses."""

    model: Identity
    folder: Path
    lines: list[dict[str, Any]]  # of its log


@dataclass
class Store:
    """All results found in some folders."""

    measurements: list[Measurement] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    diagnoses: list[tuple[Identity, dict[str, Any]]] = field(default_factory=list)
    experiments: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)  # of the lab
    contests: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)  # of the referee
    operators: list[dict[str, Any]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)  # file -> reason

    def models(self) -> list[Identity]:
        """Every model with a result, grouped by block, each block's baseline first."""
        identities: dict[tuple[Any, ...], Identity] = {}
        for identity in self._identities():
            identities.setdefault(model_key(identity), identity)
        blocks = list(dict.fromkeys(model.block for model in identities.values()))
        return sorted(identities.values(), key=lambda m: (blocks.index(m.block), not m.baseline))

    def labels(self) -> dict[tuple[Any, ...], str]:
        """The label of each model: its title, plus the place of its weights if several models share it."""
        models = self.models()
        trained = [m for m in models if m.weights is not None or m.checkpoint != m.preset]  # or in training
        names = [model.model for model in trained]
        places = [(model.model, model.checkpoint) for model in trained]
        labels = {}
        for model in models:
            label = title(model.model)
            if model in trained and names.count(model.model) > 1:
                twins = places.count((model.model, model.checkpoint)) > 1
                label += f" ({model.checkpoint}{f', {str(model.weights)[:6]}' if twins else ''})"
            labels[model_key(model)] = label
        return labels

    def _identities(self) -> Iterator[Identity]:
        # Presets that were only timed come last, so a trained model of the same name takes precedence.
        identities = [m.model for m in self.measurements] + [run.model for run in self.runs]
        yield from sorted(identities, key=lambda model: model.weights is None)


def model_key(model: Identity) -> tuple[Any, ...]:
    """Results with the same key are about the same model; while it is trained, it is known by its place."""
    return (model.model, model.weights or model.checkpoint)


def read_results(paths: Iterable[str | Path]) -> Store:
    """All results in the paths; if something was measured several times, the newest result counts."""
    store = Store()
    newest: dict[tuple[Any, ...], Measurement] = {}
    for path in _candidates(map(Path, paths)):
        try:
            if path.name == METRICS:
                measurements = _read_log(store, path)
            else:
                measurements = _read_file(store, path)
        except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            store.unreadable[path] = what or type(error).__name__
            continue
        if measurements is None:
            continue  # not one of our files
        store.files.append(path)
        for measurement in measurements:
            before = newest.get(measurement.key)
            if before is None or before.date <= measurement.date:
                newest[measurement.key] = measurement
    store.measurements = list(newest.values())
    return store


def _candidates(paths: Iterable[Path]) -> list[Path]:
    candidates: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; name a result file or folder, such as runs")
        files = [path] if path.is_file() else [*path.rglob("*.json"), *path.rglob(METRICS)]
        candidates |= {f for f in files if not any(part.startswith("checkpoint-") for part in f.parts)}
    return sorted(candidates)


def _read_file(store: Store, path: Path) -> list[Measurement] | None:
    """The measurements of a result file; None if it is not one of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        if path.parent.name == "model" or path.name.startswith("."):
            return None
        raise
    readers = {
        "evaluation": _read_evaluation,
        "diagnosis": _read_diagnosis,
        "throughput": _read_throughput,
        "training": _read_training,
    }
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind in readers:
        return readers[kind](store, path, content)
    if kind == "lab":
        store.experiments.append((path.parent, {**content, "rows": _checked_rows(content["rows"])}))
    elif kind in ("referee", "write-gate"):
        store.contests.append((path.parent, _checked_contest(content)))
    elif kind == "operators":
        store.operators.append({"device": content.get("gpu") or content["machine"]["cpu"], **content})
    else:
        return None
    return []


def _identity(content: dict[str, Any]) -> Identity:
    names = Identity.__dataclass_fields__
    return Identity(**{name: content[name] for name in names})


def _read_evaluation(store: Store, path: Path, content: dict[str, Any]) -> list[Measurement]:
    model = _identity(content)
    measurements = []
    for task in content["tasks"].values():
        date = task.get("date", content["date"])
        documents = task.get("by_document", {})
        for column, value in task["results"].items():
            score = Score(_number(value), _error(task.get("errors", {}).get(column)))
            by_document = np.array(documents[column], float) if column in documents else None
            protocol, data = in_words(task["protocol"]), Data.of(task["data"])
            cut = task.get("truncated", {}).get("prompts", 0)
            measurements.append(
                Measurement(model, column, score, path, date, protocol, data, cut, by_document)
            )
    return measurements


def _read_diagnosis(store: Store, path: Path, content: dict[str, Any]) -> list[Measurement]:
    model, data, protocol = _identity(content), Data.of(content["data"]), in_words(content["protocol"])
    columns = {key: content["all"][key] for key in ("q_geo", "q_arith")}
    columns |= {f"q_{task}": summary["q_geo"] for task, summary in content["tasks"].items()}
    store.diagnoses.append((model, content))
    cut = content.get("truncated", {}).get("prompts", 0)
    return [
        Measurement(model, name, _interval(q), path, content["date"], protocol, data, cut)
        for name, q in columns.items()
        if q is not None
    ]


def _read_throughput(store: Store, path: Path, content: dict[str, Any]) -> list[Measurement]:
    columns = ("tokens_per_second", "prefill_ms", "decode_ms", "paired_change", "state_mib")
    protocol = in_words({key: content[key] for key in ("prefill", "decode")})
    data = Data(f"{content['device']}, {content['dtype']}")
    measurements = []
    for row in content["rows"]:
        values = {key: row[key] for key in columns if row.get(key) is not None}
        if row.get("change") is not None:
            values["throughput_change"] = row["change"]
        measurements += [
            Measurement(_identity(row), key, Score(_number(x)), path, content["date"], protocol, data)
            for key, x in values.items()
        ]
    return measurements


def _read_training(store: Store, path: Path, content: dict[str, Any]) -> list[Measurement]:
    if not content["finished"]:
        return []  # its losses so far are in its log
    columns = {"final_loss": content["final_loss"], "validation_loss": content["validation_loss"]}
    columns["training_mtokens"] = content["tokens"] / 1e6
    data = Data.of(content["data"])
    return [
        Measurement(_identity(content), key, Score(_number(x)), path, content["date"], "", data)
        for key, x in columns.items()
        if x is not None
    ]


def _read_log(store: Store, path: Path) -> list[Measurement] | None:
    """Add the losses of a run; its final numbers are in `training.json` next to the log."""
    if not (path.parent / TRAINING).is_file():
        return None  # not one of our logs
    run = read_run(path.parent)
    if not run.lines:
        return None  # the run has just started
    store.runs.append(run)
    return []


def read_run(folder: Path) -> Run:
    """A training run and its losses."""
    if not (folder / METRICS).is_file() or not (folder / TRAINING).is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: it needs {METRICS} and {TRAINING}")
    lines = []
    for line in (folder / METRICS).read_text(errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # cut off when the run was killed
            continue
    record = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
    return Run(_identity(record), folder, lines)


def in_words(protocol: dict[str, Any]) -> str:
    """How a protocol differs from the standard: {"limit": 10, "window": 1000} is "limit 10"."""
    parts = []
    for name, value in protocol.items():
        if value is None or STANDARD.get(name) == value:
            continue
        parts.append(str(value) if name == "dtype" else f"{WORDS.get(name, name)} {value}")
    return ", ".join(parts)


def _interval(q: dict[str, float]) -> Score:
    """A score from a 95 % interval."""
    return Score(_number(q["value"]), (_number(q["high"]) - _number(q["low"])) / (2 * 1.96))


def _number(x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"expected a number, got {x!r}")
    return float(x)


def _error(x: Any) -> float | None:
    return None if x is None or not math.isfinite(_number(x)) else float(x)


def _checked_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        for key in ("variant", "metric", "baseline"):
            row[key].strip()
        _number(row["value"]["mean"])
    return rows


def _checked_contest(content: dict[str, Any]) -> dict[str, Any]:
    """The result, if it has every contestant in every trial after a quarter, half and all of the budget."""
    rows, trials = content["rows"], [trial["name"] for trial in content["trials"]]
    if content["kind"] == "write-gate":
        trials = [f"{trial['group']}, {trial['change']}" for trial in content["trials"]]
        trials += [row["trial"] for row in content["writes"]]
    numbers = [content["seeds"], *(row["value"]["mean"] for row in rows)]
    for row in (row for row in rows if row["difference"] is not None):
        numbers += [row["difference"][key] for key in ("mean", "low", "high", "seeds", "p_value")]
        numbers += [row["t_p"], row["adjusted"]]
    for x in numbers:
        _number(x)
    present = {(row["trial"], row["contestant"], row["budget"]) for row in rows}
    names = dict.fromkeys(row["contestant"] for row in rows)
    expected = [(t, n, b) for t in trials for n in names for b in (0.25, 0.5, 1.0)]
    missing = [cell for cell in expected if cell not in present]
    if missing or not expected:
        trial, name, budget = (*missing, ("any trial", "no contestant", 1.0))[0]
        raise ValueError(f"{name} has no result in {trial} after {budget:g} of the budget")
    return content


def _cpu_name() -> str:
    """The processor's name; in virtual machines it may be as short as "AMD EPYC", so x86 adds its model.

    >>> bool(_cpu_name())
    True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = known.get("model name") or platform.processor() or platform.machine()
    model = [f"{key} {known[key]}" for key in ("cpu family", "model") if key in known]
    return f"{name} ({', '.join(model)})" if model else name
