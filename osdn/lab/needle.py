"""Needles in a haystack: facts among filler, queried at the end; accuracy by depth and length.

The synthetic form of Kamradt's test, as in RULER (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654, "NIAH"
with several needles and queries).  A needle is a marker, a key and a value; the rest is filler.  At the end
every key is queried once, in random order.  The depth of a needle is its distance from the beginning.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from osdn.lab.synthetic import IGNORED, SyntheticTask, answers, at_least, distinct, evaluation_generator

DEPTHS = 5  # bins of depth


@dataclass(frozen=True)
class NeedleTask(SyntheticTask):
    """Needles in filler, tested in haystacks of up to eight times the length.

    Args:
        vocab_size: token 0 marks a needle; of the rest, a quarter are keys, a quarter values, half filler.
        length: tokens per sequence, including the questions.
        needles: number of needles, all of which are queried.
        evaluation: sequences per reported accuracy.
    """

    vocab_size: int = 64
    length: int = 128
    needles: int = 4
    evaluation: int = 128

    def __post_init__(self) -> None:
        at_least(self, needles=1, evaluation=1)
        at_least(self, vocab_size=4 * self.needles + 5, length=5 * self.needles)

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, labels, _ = self._placed(n, generator)
        return inputs, labels

    def _placed(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, labels, and the position of each question's needle, `[n, needles]`."""
        part, needles = (self.vocab_size - 1) // 4, self.needles
        keys = 1 + distinct(n, part, needles, generator)
        values = 1 + part + torch.randint(part, (n, needles), generator=generator)
        inputs = torch.randint(1 + 2 * part, self.vocab_size, (n, self.length), generator=generator)
        hay = self.length - 2 * needles
        # A needle takes three places, so choose places in a haystack that is two tokens shorter per needle.
        gaps = distinct(n, hay - 2 * needles, needles, generator).sort(1).values
        starts = gaps + 2 * torch.arange(needles)
        for offset, content in enumerate((torch.zeros_like(keys), keys, values)):
            inputs.scatter_(1, starts + offset, content)
        order = distinct(n, needles, needles, generator)
        questions = torch.stack([torch.zeros_like(order), keys.gather(1, order)], 2)  # marker, key
        inputs[:, hay:] = questions.flatten(1)
        labels = torch.full_like(inputs, IGNORED)
        labels[:, hay + 1 :: 2] = values.gather(1, order)
        return inputs, labels, starts.gather(1, order)

    def harder(self) -> dict[str, SyntheticTask]:
        return {f"{factor}x": replace(self, length=factor * self.length) for factor in (2, 4, 8)}

    @torch.no_grad()
    def evaluate(self, model: Any, seed: int) -> dict[str, Any]:
        """What every task reports, plus accuracy by depth and length."""
        longer = [task for task in self.harder().values() if isinstance(task, NeedleTask)]
        grid = [row for task in (self, *longer) for row in task.by_depth(model)]
        return super().evaluate(model, seed) | {"grid": grid}

    def by_depth(self, model: Any) -> list[dict[str, float]]:
        """Accuracy for needles in each fifth of the haystack."""
        _, _, starts = self._placed(self.evaluation, evaluation_generator())
        bins = starts.flatten() * DEPTHS // (self.length - 2 * self.needles)  # in the order of the questions
        right = answers(self, model)
        rows = []
        for depth in range(DEPTHS):
            share = right[bins == depth].mean().item()
            rows.append({"length": self.length, "depth": (depth + 0.5) / DEPTHS, "accuracy": share})
        return rows
