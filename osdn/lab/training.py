"""One model, one task, one seed: the training loop of the lab.

Models that are to be compared meet the same batches in the same order, and start from the same weights: those
of the plain backbone, online scaling adding none or a few that start neutral.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osdn.lab.variants import Variant
from osdn.models import OSDNForCausalLM
from osdn.zoo import causal_lm

POINTS = 50  # of a learning curve


class Task(Protocol):
    """What can be trained on: batches of inputs and labels `[B, T]`, the label beside its input."""

    @property
    def vocab_size(self) -> int: ...
    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]: ...
    def evaluate(self, model: Any, seed: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Run:
    """All that determines a result."""

    task: Any  # a Task that is a dataclass
    variant: Variant
    seed: int
    width: int = 64
    layers: int = 2
    steps: int = 200
    batch: int = 32
    learning_rate: float = 5e-3
    backend: str = field(default="auto", repr=False)

    def settings(self) -> dict[str, Any]:
        return asdict(self) | {"experiment": type(self.task).__name__, "variant": self.variant.label}


def train(run: Run, on_step: Callable[[int, float, float], None] | None = None) -> tuple[nn.Module, Any]:
    """The trained model, and its learning curve as rows of step, loss and accuracy.

    `on_step(step, loss, accuracy)` is called after every step.
    """
    model = build(run)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.learning_rate, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, run.steps))
    curve, recent = [], []
    for step, (inputs, labels) in zip(range(1, run.steps + 1), run.task.batches(run.seed, run.batch)):
        asked = labels >= 0
        hidden = model.model(inputs, use_cache=False).last_hidden_state[asked]
        logits, answers = model.lm_head(hidden), labels[asked]
        loss = F.cross_entropy(logits, answers)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append((loss.item(), (logits.detach().argmax(-1) == answers).double().mean().item()))
        if on_step is not None:
            on_step(step, *recent[-1])
        if step * POINTS // run.steps > (step - 1) * POINTS // run.steps:
            means = torch.tensor(recent, dtype=torch.float64).mean(0)
            curve.append({"step": step, "loss": means[0].item(), "accuracy": means[1].item()})
            recent = []
    return model.eval(), curve


def execute(run: Run, on_step: Callable[[int, float, float], None] | None = None) -> dict[str, Any]:
    """Train and evaluate."""
    model, curve = train(run, on_step)
    return {"settings": run.settings(), "curve": curve, **run.task.evaluate(model, run.seed)}


def build(run: Run) -> Any:
    """The model before training; variants of one backbone share every weight they have in common."""
    config = run.variant.config(
        run.width, num_hidden_layers=run.layers, vocab_size=run.task.vocab_size, backend=run.backend
    )
    torch.manual_seed(run.seed)
    if run.variant.row is not None:
        return causal_lm(run.variant.row, config).train()
    plain = OSDNForCausalLM(type(config)(**config.to_diff_dict() | {"preconditioner": None}))
    model = OSDNForCausalLM(config)
    model.load_state_dict(plain.state_dict(), strict=False)
    return model.train()


def warmup_cosine(step: int, steps: int) -> float:
    """A tenth of the steps up, then half a cosine down."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
