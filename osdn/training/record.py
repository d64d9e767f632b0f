"""Documents a run: a header on the terminal, and `training.json` at the start and at the end."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import TrainingArguments

from osdn.models import OSDNConfig
from osdn.models.identity import block, changed_writes, identify
from osdn.results.losses import final_loss
from osdn.results.store import TRAINING, save_json
from osdn.training.monitor import Metrics
from osdn.training.packing import Corpus
from osdn.training.settings import RunSettings


def print_header(
    settings: RunSettings,
    config: OSDNConfig,
    parameters: int,
    arguments: TrainingArguments,
    corpus: Corpus,
    step: int,
    precision_reason: str,
) -> None:
    """Print what is about to run: the model, the device, the data, the length and the starting point."""
    data, training, validation = settings.data, settings.training, settings.validation
    total, known = training.steps * training.tokens_per_step, corpus.train.count_tokens()
    device = (
        torch.cuda.get_device_name(arguments.device) if arguments.device.type == "cuda" else arguments.device
    )
    lines = {
        "run": f"{settings.name} in {settings.output_dir}",
        "model": f"{block(config)}: {parameters:,} parameters",
        "writes": ", ".join(f"{name} {value}" for name, value in changed_writes(config).items())
        or "of the plain delta rule",
        "device": f"{arguments.world_size} × {device}",
        "precision": f"{training.precision}: {precision_reason}",
        "data": f"{_source(settings, data.split)}{_size(corpus.train.documents, known)}",
        "validation": "none",
        "steps": f"{training.steps:,} of {training.tokens_per_step:,} tokens: {total:,} tokens"
        + (f", {total / known:.2f} epochs" if known else ""),
        "start": f"continuing from step {step:,}" if step else "from the beginning",
    }
    if corpus.validation is not None:
        when = f"every {validation.every:,} steps and at the end" if validation.every else "at the end"
        lines["validation"] = (
            f"{_source(settings, validation.split)}, {corpus.validation_tokens:,} tokens {when}"
        )
    console = Console(stderr=True)
    for label, value in lines.items():
        console.print(Text.assemble((f"{label:<12}", "bold"), value), soft_wrap=True)


def save_record(
    settings: RunSettings, config: OSDNConfig, arguments: TrainingArguments, corpus: Corpus, finished: bool
) -> Path:
    """Write what is trained on which data and, once finished, the final numbers."""
    run, data = Path(settings.output_dir), settings.data
    model, lines = run / "model", Metrics.read(run) if finished else []
    steps = settings.training.steps
    validation = [line.get("validation_loss") for line in lines if line["step"] == steps]
    content: dict[str, Any] = {
        "kind": "training",
        "finished": finished,
        **identify(config, model, settings.name).record(),
        "steps": steps,
        "tokens": steps * settings.training.tokens_per_step,
        "seconds": sum(line.get("seconds", 0.0) for line in lines),
        "final_loss": final_loss(lines),
        "validation_loss": validation[-1] if validation else None,
        "skipped_steps": lines[-1]["skipped_steps"] if lines else 0,
        "extensions": [
            {"at_step": line["step"], "to_steps": line["extended_to"]}
            for line in lines
            if "extended_to" in line
        ],
        "data": {
            "source": data.source,
            "name": data.name,
            "split": data.split,
            "documents": corpus.train.documents,
            "tokens": corpus.train.count_tokens(),
            "digest": corpus.train.fingerprint,
        },
        "validation": None
        if corpus.validation is None
        else {
            "split": settings.validation.split,
            "documents": corpus.validation.documents,
            "tokens": corpus.validation_tokens,
        },
        "device": str(arguments.device),
        "devices": arguments.world_size,
        "precision": settings.training.precision,
        "settings": asdict(settings),
    }
    return save_json(run / TRAINING, content)


def is_finished(run: Path) -> bool:
    """Whether the run's record says that it is finished."""
    return bool(_recorded(run).get("finished"))


def recorded_precision(run: Path) -> str | None:
    """The precision of a run that has started."""
    return _recorded(run).get("precision")


def _recorded(run: Path) -> dict[str, Any]:
    try:
        content = json.loads((run / TRAINING).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _source(settings: RunSettings, split: str | None) -> str:
    data = settings.data
    return f"{data.source}{f' {data.name}' if data.name else ''}, split {split}"


def _size(documents: int | None, tokens: int | None) -> str:
    return "" if documents is None else f", {documents:,} documents, {tokens:,} tokens"
