"""Multi-query associative recall: key-value pairs, then their keys as queries among random tokens.

The data follows Arora et al. 2024, "Zoology" (https://arxiv.org/abs/2312.04927, Section 4 and Appendix E):
each key occurs once, the distance from the pairs to a query follows a power law, and only queries have
labels.  Three parameters are ours. `passes` presents the pairs again in the same order, like the prompts of
"just read twice" (Arora et al. 2024, https://arxiv.org/abs/2407.05483). `overwrites` presents some keys again
with another value, and the last value is the answer. `noise` replaces presented values by others, so that
trusting the last one is often wrong.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from osdn.lab.residual import scales, write_statistics
from osdn.lab.synthetic import IGNORED, SyntheticTask, accuracy, at_least, distinct, evaluation_generator


@dataclass(frozen=True)
class RecallTask(SyntheticTask):
    """The task and its sizes.

    Args:
        vocab_size: half are keys, half values; filler is drawn from the whole vocabulary.
        pairs: key-value pairs per sequence.
        length: tokens per sequence.
        passes: how often the pairs are presented.
        overwrites: how many keys are presented again in every pass, with another value.
        noise: share of presented values that are replaced by random ones, redrawn in every pass.
        power: exponent a of the law p(gap) ~ gap ** (a - 1) for the gap between the pairs and a query.
        evaluation: sequences per reported accuracy.
    """

    vocab_size: int = 128
    pairs: int = 8
    length: int = 64
    passes: int = 2
    overwrites: int = 0
    noise: float = 0.0
    power: float = 0.01
    evaluation: int = 128

    def __post_init__(self) -> None:
        at_least(self, pairs=1, passes=1, evaluation=1)
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise is {self.noise}; it must be at least 0 and below 1")
        if not 0 <= self.overwrites <= self.pairs:
            raise ValueError(
                f"overwrites is {self.overwrites}; it must be between 0 and pairs = {self.pairs}"
            )
        if self.context + 2 * self.pairs > self.length:
            raise ValueError(
                f"length is {self.length}; {self.passes} passes over {self.pairs} pairs and their queries "
                f"need {self.context + 2 * self.pairs}"
            )
        if self.vocab_size // 2 <= self.pairs + self.overwrites:
            raise ValueError(
                f"vocab_size is {self.vocab_size}; {self.pairs} keys and {self.pairs + self.overwrites} "
                f"values need at least {2 * (self.pairs + self.overwrites + 1)}"
            )

    @property
    def context(self) -> int:
        """The number of tokens before the first possible query."""
        return 2 * (self.pairs + self.overwrites) * self.passes

    def boundaries(self) -> list[tuple[int, str]]:
        """Where the later passes and the queries start."""
        once = self.context // self.passes
        passes = [(i * once, f"pass {i + 1}") for i in range(1, self.passes)]
        return [*passes, (self.context, "queries")]

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n sequences: inputs `[n, T]`, and labels `[n, T]` with the answer at each query."""
        pairs, half = self.pairs, self.vocab_size // 2
        keys = 1 + distinct(n, half - 1, pairs, generator)  # [n, pairs]; 0 is never a key
        values = half + distinct(n, self.vocab_size - half, pairs + self.overwrites, generator)
        changed = distinct(n, pairs, self.overwrites, generator)  # which pairs are overwritten
        once = torch.stack([torch.cat([keys, keys.gather(1, changed)], 1), values], 2)  # [n, pairs, 2]
        answers = values[:, :pairs].scatter(1, changed, values[:, pairs:])

        space = (self.length - self.context) // 2
        law = torch.arange(1, space + 1, dtype=torch.float64) ** (self.power - 1)
        gaps = torch.multinomial(law.expand(n, -1), pairs, generator=generator)  # without replacement
        inputs = torch.randint(self.vocab_size, (n, self.length), generator=generator)  # filler
        inputs[:, : self.context] = once.flatten(1).repeat(1, self.passes)
        if self.noise:
            shown = inputs[:, 1 : self.context : 2]  # the values, in every pass
            wrong = torch.randint(half, self.vocab_size, shown.shape, generator=generator)
            replaced = torch.rand(shown.shape, generator=generator) < self.noise
            inputs[:, 1 : self.context : 2] = torch.where(replaced, wrong, shown)
        queries = self.context + 2 * gaps
        inputs.scatter_(1, queries, keys)
        labels = torch.full_like(inputs, IGNORED).scatter_(1, queries, answers)
        return inputs, labels

    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless training batches; every model gets the same ones for a given seed.

        They alternate between a quarter, half and all of the pairs, with proportionally shorter and more
        sequences.  With all pairs from the start, some seeds take several times as long to find the rule.
        """
        generator = torch.Generator().manual_seed(seed)
        for part in itertools.cycle((4, 2, 1)):
            if self.pairs % part == 0 and self.overwrites % part == 0 and self.length % part == 0:
                sizes = {"pairs": self.pairs // part, "overwrites": self.overwrites // part}
                task = replace(self, **sizes, length=self.length // part)
                yield task.sample(size * part, generator)

    @torch.no_grad()
    def evaluate(self, model: Any, seed: int) -> dict[str, Any]:
        """Accuracy by number of pairs and passes, and the residual ratio, on unseen sequences."""
        rows = [
            {"pairs": task.pairs, "passes": task.passes, "accuracy": accuracy(task, model)}
            for task in self.grid()
        ]
        by_size = {r["pairs"] / self.pairs: r["accuracy"] for r in rows if r["passes"] == self.passes}
        prompts, _ = self.sample(32, evaluation_generator())
        metrics = {"accuracy": by_size[1], "grid": rows, **write_statistics(model, prompts)}
        if 2 in by_size:  # a harder task than in training
            metrics["accuracy_2x"] = by_size[2]
        settings = model.config.preconditioner
        if seed == 0 and settings is not None and "rule" not in settings:  # one is enough for the figure
            scale = scales(model, prompts[:1]).transpose(0, 1).flatten(1)  # [T, layers * HV * K]
            metrics["scale"] = [[round(d, 4) for d in token] for token in scale.tolist()]
        return metrics

    def grid(self) -> list["RecallTask"]:
        """This task with half to four times the pairs and with fewer passes; lengths grow with the pairs."""
        tasks = []
        for factor in (0.5, 1, 2, 3, 4):
            pairs, overwrites = max(1, int(self.pairs * factor)), int(self.overwrites * factor)
            if pairs + overwrites < self.vocab_size // 2:
                length = max(self.length, self.length * pairs // self.pairs)
                sizes = {"pairs": pairs, "overwrites": overwrites, "length": length}
                tasks += [replace(self, **sizes, passes=n) for n in range(1, self.passes + 1)]
        return tasks
