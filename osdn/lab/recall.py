"""Multi-query associative recall: key-value pairs, then their keys as queries among random tokens.

The data of Arora et al. 2024, "Zoology" (https://arxiv.org/abs/2312.04927, Section 4 and Appendix E): every
key once, the distance from the pairs to a key's query from a power law, a label at queries only.  Three
parameters are ours: `passes` presents the pairs again in the same order, as the prompts of "just read twice"
(Arora et al. 2024, https://arxiv.org/abs/2407.05483) do; `overwrites` gives some keys again with another
value, in which case the last value is the answer; and `noise` replaces presented values by others, so that
who believes the last one is often wrong.
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
        vocab_size: half of it are keys, half values; filler is drawn from all of it.
        pairs: keys in a sequence.
        length: tokens in a sequence.
        passes: how often the pairs are presented.
        overwrites: how many of the keys are given again, within every pass, with another value.
        noise: how often a presented value is replaced by a random one, drawn anew in every pass.
        power: exponent a of the law p(gap) ~ gap ** (a - 1) between the pairs and a query.
        evaluation: sequences for each accuracy that is reported.
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
        """Tokens before the first query can come."""
        return 2 * (self.pairs + self.overwrites) * self.passes

    def boundaries(self) -> list[tuple[int, str]]:
        """Where a sequence changes: a later pass begins, or the queries."""
        once = self.context // self.passes
        passes = [(i * once, f"pass {i + 1}") for i in range(1, self.passes)]
        return [*passes, (self.context, "queries")]

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n sequences: inputs `[n, T]`, and labels `[n, T]` with a query's answer at the query."""
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
        """Training batches without end; the same for every model that is given this seed.

        They take turns with a quarter, half and all of the pairs, in sequences that are shorter and more in
        proportion: with all pairs from the start, some seeds take several times as long to find the rule.
        """
        generator = torch.Generator().manual_seed(seed)
        for part in itertools.cycle((4, 2, 1)):
            if self.pairs % part == 0 and self.overwrites % part == 0 and self.length % part == 0:
                sizes = {"pairs": self.pairs // part, "overwrites": self.overwrites // part}
                task = replace(self, **sizes, length=self.length // part)
                yield task.sample(size * part, generator)

    @torch.no_grad()
    def evaluate(self, model: Any, seed: int) -> dict[str, Any]:
        """Accuracy by number of pairs and by pass, and the residual ratio, on sequences nobody trained on."""
        rows = [
            {"pairs": task.pairs, "passes": task.passes, "accuracy": accuracy(task, model)}
            for task in self.grid()
        ]
        by_size = {r["pairs"] / self.pairs: r["accuracy"] for r in rows if r["passes"] == self.passes}
        prompts, _ = self.sample(32, evaluation_generator())
        found = {"accuracy": by_size[1], "grid": rows, **write_statistics(model, prompts)}
        if 2 in by_size:  # a harder task than the one that was learned
            found["accuracy_2x"] = by_size[2]
        settings = model.config.preconditioner
        if seed == 0 and settings is not None and "rule" not in settings:  # one is enough to look at
            scale = scales(model, prompts[:1]).transpose(0, 1).flatten(1)  # [T, layers * HV * K]
            found["scale"] = [[round(d, 4) for d in token] for token in scale.tolist()]
        return found

    def grid(self) -> list["RecallTask"]:
        """This task with half to four times the pairs, after each pass; lengths grow with the pairs."""
        found = []
        for factor in (0.5, 1, 2, 3, 4):
            pairs, overwrites = max(1, int(self.pairs * factor)), int(self.overwrites * factor)
            if pairs + overwrites < self.vocab_size // 2:
                length = max(self.length, self.length * pairs // self.pairs)
                sizes = {"pairs": pairs, "overwrites": overwrites, "length": length}
                found += [replace(self, **sizes, passes=n) for n in range(1, self.passes + 1)]
        return found
