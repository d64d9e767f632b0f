"""State tracking: the running product of a sequence of group elements.

The word problem of Merrill et al. 2024, "The Illusion of State" (https://arxiv.org/abs/2404.08819): every
token is an element of a group, and its label is the product of all elements so far.  Parity is the group of
two elements; S3 and S5 are the permutations of three and five items.  A linear recurrence whose transition
matrix has only eigenvalues between 0 and 1 cannot compute parity; write strengths up to 2 add negative ones
(Grazzi et al. 2024, https://arxiv.org/abs/2411.12537).
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor

from osdn.lab.synthetic import SyntheticTask, at_least

POINTS = {"parity": 2, "s3": 3, "s5": 5}  # how many items are permuted


@dataclass(frozen=True)
class TrackingTask(SyntheticTask):
    """The running product, tested on sequences of up to eight times the length.

    Args:
        group: parity, s3 or s5.
        length: tokens per sequence.
        evaluation: sequences per reported accuracy.
    """

    group: Literal["parity", "s3", "s5"] = "s3"
    length: int = 32
    evaluation: int = 128

    def __post_init__(self) -> None:
        at_least(self, length=1, evaluation=1)
        if self.group not in POINTS:
            raise ValueError(f"group is {self.group!r}; it must be one of {', '.join(POINTS)}")

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return len(products(POINTS[self.group]))

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        table = products(POINTS[self.group])
        inputs = torch.randint(len(table), (n, self.length), generator=generator)
        labels = inputs.clone()
        for t in range(1, self.length):
            labels[:, t] = table[labels[:, t - 1], inputs[:, t]]
        return inputs, labels

    def harder(self) -> dict[str, SyntheticTask]:
        return {f"{factor}x": replace(self, length=factor * self.length) for factor in (2, 4, 8)}


@cache
def products(points: int) -> Tensor:
    """The multiplication table of all permutations of so many items: `[a, b]` is a followed by b."""
    elements = list(permutations(range(points)))
    place = {element: i for i, element in enumerate(elements)}
    return torch.tensor([[place[tuple(b[i] for i in a)] for b in elements] for a in elements])
