"""What the lab's tasks share: reading a model's answers, seeded batches, and accuracy on unseen sequences.

A synthetic task is a dataclass with `vocab_size`, `length` and `evaluation` that implements one method,
`sample`.  Evaluation sequences come from a seed that no training run uses.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from osdn.lab.residual import write_statistics

IGNORED = -100
EVALUATION_SEED = 2**31  # training seeds are small numbers


class TokenTask:
    """Reads a model's answers from its language-model head, at the positions that have a label."""

    def prepare(self, output: Path) -> Any:
        """This task, ready to run; a task that needs files finds or creates them in the output folder."""
        return self

    def adapt(self, model: Any) -> None:
        """Add to a new model whatever the task needs beyond the language model; most need nothing."""

    def logits(self, model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        """`[n, vocabulary]` for the n labels that are not ignored, in order."""
        hidden = model.model(inputs, use_cache=False).last_hidden_state
        return model.lm_head(hidden[labels != IGNORED])


class SyntheticTask(TokenTask):
    """Batches and accuracy of a task that samples its own sequences."""

    vocab_size: int
    length: int
    evaluation: int

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n sequences: inputs `[n, T]` and labels `[n, T]`, which are IGNORED where nothing is asked."""
        raise NotImplementedError

    def training_sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n training sequences; sampled like test sequences unless a task overrides this."""
        return self.sample(n, generator)

    def harder(self) -> dict[str, "SyntheticTask"]:
        """Tasks for testing only, by the suffix of their metric: `2x` is reported as `accuracy_2x`."""
        return {}

    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless training batches; every model gets the same ones for a given seed."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self.training_sample(size, generator)

    @torch.no_grad()
    def evaluate(self, model: Any, seed: int) -> dict[str, Any]:
        """Accuracy on this task and on harder ones, and the statistics of the layers' writes."""
        metrics: dict[str, Any] = {"accuracy": accuracy(self, model)}
        metrics |= {f"accuracy_{name}": accuracy(task, model) for name, task in self.harder().items()}
        prompts, _ = self.sample(min(32, self.evaluation), evaluation_generator())
        return metrics | write_statistics(model, prompts)


def accuracy(task: SyntheticTask, model: Any) -> float:
    """The share of labels that the model predicts correctly, on the task's evaluation sequences."""
    return answers(task, model).mean().item()


def answers(task: SyntheticTask, model: Any, part: int = 32) -> Tensor:
    """Whether the model predicts each label of the evaluation sequences, `[n]` in float64, in order."""
    inputs, labels = task.sample(task.evaluation, evaluation_generator())
    right = [
        task.logits(model, x, y).argmax(-1) == y[y != IGNORED]
        for x, y in zip(inputs.split(part), labels.split(part))
    ]
    return torch.cat(right).double()


def evaluation_generator() -> torch.Generator:
    return torch.Generator().manual_seed(EVALUATION_SEED)


def distinct(n: int, choices: int, size: int, generator: torch.Generator) -> Tensor:
    """n draws of `size` different numbers below `choices`, `[n, size]`."""
    return torch.rand(n, choices, generator=generator).argsort(1)[:, :size]


def at_least(task: Any, **smallest: int) -> None:
    """Reject sizes below the smallest that make sense."""
    for name, least in smallest.items():
        if getattr(task, name) < least:
            raise ValueError(f"{name} is {getattr(task, name)}; it must be at least {least}")
