"""Where the sequences and their chunks of 64 tokens lie: index tables, made on the host and kept.

A batch is a packed row whose boundaries are multiples of T, so kernels know of packed sequences alone.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from osdn.ops.checks import boundaries

CHUNK = 64
LEVELS = 6  # 2**6 tokens


@dataclass(frozen=True)
class Chunks:
    table: Tensor  # [chunks, 2], int32: the first token of a chunk and how many it has
    sequences: Tensor  # [N + 1], int32: the first chunk of a sequence
    tokens: Tensor  # [N + 1], int32: the first token of a sequence
    longest: int  # tokens in the longest sequence

    @property
    def count(self) -> int:
        return self.table.shape[0]

    @property
    def N(self) -> int:  # noqa: N802
        return self.tokens.shape[0] - 1


def upper_bound(B: int, T: int, N: int) -> int:
    """No batch and no packing has more chunks than this, whatever the boundaries."""
    return B * T // CHUNK + N


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def chunks_of(B: int, T: int, cu_seqlens: Tensor | None, device: torch.device) -> Chunks:
    if cu_seqlens is None:
        return _tables(tuple(range(0, B * T + 1, T)) if T else (0,) * (B + 1), device)
    if cu_seqlens.is_inference():  # such a tensor does not count its changes
        return _tables(tuple(boundaries(cu_seqlens, T)), device)
    # Reading the boundaries waits for the GPU; every layer of a model passes the same tensor.
    version, T_known, tables = _known.get(cu_seqlens, (None, None, None))
    if version != cu_seqlens._version or T_known != T or tables.table.device != device:
        tables = _tables(tuple(boundaries(cu_seqlens, T)), device)
        _known[cu_seqlens] = (cu_seqlens._version, T, tables)
    return tables


@lru_cache(maxsize=32)
def _tables(cuts: tuple[int, ...], device: torch.device) -> Chunks:
    rows, sequences = [], [0]
    for begin, end in pairwise(cuts):
        rows += [(start, min(CHUNK, end - start)) for start in range(begin, end, CHUNK)]
        sequences.append(len(rows))
    longest = max((b - a for a, b in pairwise(cuts)), default=0)

    def put(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    return Chunks(put(rows).reshape(-1, 2), put(sequences), put(list(cuts)), longest)
