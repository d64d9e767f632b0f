"""The packed trainer against a bare loop of forward, backward and step with the same model, rows and
optimizer.

The loop has its rows in memory, logs nothing and saves nothing, so it is an upper bound for any trainer.  The
two take turns, and the median time per step counts.
"""

import tempfile
import time
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback

from osdn import OSDNForCausalLM
from osdn.results.store import save_json
from osdn.training.data import load_tokenizer
from osdn.training.monitor import Metrics
from osdn.training.packing import PackedRows
from osdn.training.settings import RunSettings, load_settings
from osdn.training.trainer import PackedTrainer, load_pieces, training_arguments

WARMUP = 3  # steps that do not count


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.times.append(time.perf_counter())


def build(settings: RunSettings) -> tuple[OSDNForCausalLM, PackedRows]:
    set_seed(settings.training.seed)
    model = OSDNForCausalLM(settings.model_config())
    pieces = load_pieces(settings, load_tokenizer(settings.data.tokenizer))
    return model, PackedRows(pieces, settings.data.seq_len)


def trainer_steps(settings: RunSettings) -> list[float]:
    """Seconds of every step of the trainer, which logs every step."""
    model, rows = build(settings)
    tokenizer, clock = load_tokenizer(settings.data.tokenizer), Clock()
    arguments = training_arguments(settings, devices=1)
    trainer = PackedTrainer(settings, rows, model=model, args=arguments, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Metrics())
    trainer.add_callback(clock)
    trainer.train()
    return [b - a for a, b in pairwise(clock.times)][WARMUP:]


def loop_steps(settings: RunSettings) -> list[float]:
    """Seconds of every step of the loop."""
    model, rows = build(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.optimizer.learning_rate)
    accumulation, steps = settings.accumulation(1), settings.training.steps
    batches = list(islice(rows, steps * accumulation))
    times = []
    model.train()
    for step in range(steps):
        start = time.perf_counter()
        for batch in batches[step * accumulation : (step + 1) * accumulation]:
            inputs = {key: batch[key] for key in ("input_ids", "labels", "cu_seqlens")}
            (model(**inputs).loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return times[WARMUP:]


def run(config: str, steps: int, rounds: int, output: Path) -> dict[str, Any]:
    """Time both in turn and save the result."""
    loop: list[float] = []
    trainer: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        changes = [f"training.steps={steps + WARMUP}", "logging.every=1", "optimizer.warmup_steps=1"]
        for i in range(rounds):
            place = [f"output_dir={directory}/{i}", f"checkpoints.every={steps + WARMUP}"]
            settings = load_settings(config, changes + place)
            loop += loop_steps(settings)
            trainer += trainer_steps(settings)
    tokens = settings.training.tokens_per_step
    rates = {"loop": tokens / median(loop), "trainer": tokens / median(trainer)}
    share = rates["trainer"] / rates["loop"]
    result = {"config": config, "steps": len(loop), "tokens_per_second": rates, "share": share}
    save_json(output / "training.json", {"kind": "trainer benchmark", **result})
    return result
