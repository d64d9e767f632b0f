"""Where the sequences and their chunks of tokens lie: index tables, made on the host and kept.

A batch is a packed row whose boundaries are multiples of T, so kernels know of packed sequences alone.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from osdn.ops.checks import boundaries


@dataclass(frozen=True)
class Chunks:
    table: Tensor  # [chunks, 2], int32: the first token of a chunk and how many it has
    sequences: Tensor  # [N + 1], int32: the first chunk of a sequence
    tokens: Tensor  # [N + 1], int32: the first token of a sequence
    longest: int  # tokens in the longest sequence
    size: int  # tokens of a whole chunk, a power of two

    @property
    def count(self) -> int:
        return self.table.shape[0]

    @property
    def N(self) -> int:  # noqa: N802
        return self.tokens.shape[0] - 1

    def sizes(self) -> dict[str, int]:
        return {"C": self.size, "LEVELS": self.size.bit_length() - 1}


def chunk_size(k: Tensor) -> int:
    """64 tokens; 32 where 64 keys alone would fill the 64 KB that a block has on an AMD GPU.

    No more tokens than channels, since K tokens can replace all that a state holds: in a longer chunk writes
    nearly cancel its first state, whose rounding errors stay.  A matrix product has at least 16 rows, though.
    """
    K = k.shape[3]
    return min(64 if K * k.element_size() <= 512 else 32, max(16, 1 << (K.bit_length() - 1)))


def upper_bound(k: Tensor, N: int) -> int:
    """No batch and no packing makes more chunks of these keys, whatever the boundaries."""
    return k.shape[0] * k.shape[1] // chunk_size(k) + N


def chunks_of(k: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    """Of keys [B, T, H, K]."""
    B, T = k.shape[:2]
    size, device = chunk_size(k), k.device
    if cu_seqlens is None:
        return _tables(tuple(range(0, B * T + 1, T)) if T else (0,) * (B + 1), size, device)
    return _tables(boundaries(cu_seqlens, T), size, device)


@lru_cache(maxsize=32)
def _tables(cuts: tuple[int, ...], size: int, device: torch.device) -> Chunks:
    rows, sequences = [], [0]
    for begin, end in pairwise(cuts):
        rows += [(start, min(size, end - start)) for start in range(begin, end, size)]
        sequences.append(len(rows))
    longest = max((b - a for a, b in pairwise(cuts)), default=0)

    def put(values: list[Any]) -> Tensor:
        # The copy is waited for: the tables are kept, and another stream may be the next to read them.
        return torch.tensor(values, dtype=torch.int32).to(device)

    return Chunks(put(rows).reshape(-1, 2), put(sequences), put(list(cuts)), longest, size)
