"""Evaluation with several processes, started by `accelerate launch -m osdn eval`."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes of an evaluation: each takes a share of the documents, the first saves the results."""

    accelerator: "Accelerator | None" = None  # None for a single process

    @classmethod
    def launched(cls) -> "Processes":
        """The processes that a launcher has started."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return ALONE
        from accelerate import Accelerator

        return cls(Accelerator())

    @property
    def rank(self) -> int:
        return 0 if self.accelerator is None else int(self.accelerator.process_index)

    @property
    def count(self) -> int:
        return 1 if self.accelerator is None else int(self.accelerator.num_processes)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device of this process; resolves "cuda" to this process's GPU."""
        return name if self.accelerator is None or name != "cuda" else str(self.accelerator.device)

    def share(self, items: Iterable[T]) -> Iterator[T]:
        """Every n-th item, starting at this process's rank."""
        return islice(iter(items), self.rank, None, self.count)

    def gather(self, shares: list[T]) -> list[T]:
        """Combine the results of all processes, in the order of the items; every process gets them."""
        if self.accelerator is None:
            return shares
        by_rank: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(by_rank, shares)
        return [by_rank[i % self.count][i // self.count] for i in range(sum(map(len, by_rank)))]

    def total(self, number: int) -> int:
        """The sum over all processes."""
        return sum(self.gather([number]))

    def wait(self) -> None:
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()


ALONE = Processes()
