"""Packs pieces of documents end to end into rows of a fixed number of tokens.

Documents are split at the context length and the pieces shuffled; shuffling whole documents would often fill
a row with one long document.  There is one stream of rows for any number of devices: row i goes to device i
mod n, so a step reads the same rows on one device as on many.  A position in the stream is three integers
(epoch, piece, offset).  Every row carries the position where the next round of rows starts, which is all that
a checkpoint has to store.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
import torch.utils.data
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from osdn.training.data import tokenize

IGNORED_LABEL = -100
READ_AHEAD = 256  # pieces fetched at once from a data set on disk
SHUFFLE_BUFFER = 10_000  # pieces of a stream that are shuffled together, unless a run says otherwise
STREAM_START = 1000  # pieces that identify a stream


class Position(NamedTuple):
    """How much of a stream has been read: epochs, pieces of this epoch, and tokens of this piece."""

    epoch: int = 0
    piece: int = 0
    offset: int = 0


BEGINNING = Position()


class Pieces:
    """The tokens of a data set in pieces of at most `context_len`, ordered by seed and epoch."""

    def __init__(
        self,
        data: Dataset | IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        context_len: int,
        seed: int,
        shuffle: int | None = None,
    ) -> None:
        self.data, self.seed = tokenize(data, tokenizer, context_len).with_format("numpy"), seed
        self.shuffle = shuffle  # how far pieces move at most; None is anywhere
        self.documents = len(data) if isinstance(data, Dataset) else None  # unknown for a stream

    def count_tokens(self) -> int | None:
        """The number of tokens per epoch; None for a stream."""
        if not isinstance(self.data, Dataset):
            return None
        return int(pc.sum(pc.list_value_length(self.data.data.column("input_ids"))).as_py())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all tokens, or of the first thousand pieces of a stream."""
        if isinstance(self.data, Dataset):
            checksums = np.asarray(self.data["checksum"][:])
        else:
            checksums = np.array([row["checksum"] for row in self.data.take(STREAM_START)])
        return hashlib.sha256(checksums.astype("<i8").tobytes()).hexdigest()[:16]

    def read(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        """The pieces of an epoch, starting at piece `start`."""
        generator = np.random.default_rng((self.seed, epoch))
        if isinstance(self.data, Dataset):
            order = _order(len(self.data), self.shuffle, generator)[start:]
            for i in range(0, len(order), READ_AHEAD):
                yield from self.data[order[i : i + READ_AHEAD]]["input_ids"]
        else:
            buffer = self.shuffle or SHUFFLE_BUFFER
            stream = self.data.shuffle(generator=generator, buffer_size=buffer).skip(start)
            yield from (row["input_ids"] for row in stream)


def _order(count: int, shuffle: int | None, generator: np.random.Generator) -> np.ndarray:
    """A random order of the numbers below `count`, in which none moves by `shuffle` places or more."""
    if shuffle is None:
        return generator.permutation(count)
    return np.argsort(np.arange(count) + generator.uniform(0, shuffle, count))


@dataclass
class PackedRows(torch.utils.data.IterableDataset):
    """The endless rows of device `rank` of `ranks`.

    A piece that does not fit into a row continues in the next one as a separate sequence; the first token of
    a sequence is not a target.
    """

    pieces: Pieces
    seq_len: int
    rank: int = 0
    ranks: int = 1
    position: Position = BEGINNING

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = cut(self.pieces, self.seq_len, self.position)
        while True:
            round_of_rows = list(islice(rows, self.ranks))
            sequences, _ = round_of_rows[self.rank]
            yield pack(sequences) | {"position": round_of_rows[-1][1]}


@dataclass(frozen=True)
class Corpus:
    """The text of a run: the training data, and the rows of the held-out split for validation."""

    train: Pieces
    validation: Pieces | None = None
    validation_rows: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def validation_tokens(self) -> int:
        return sum(row["input_ids"].numel() for row in self.validation_rows)


def held_out_rows(pieces: Pieces, seq_len: int, tokens: int) -> list[dict[str, Tensor]]:
    """Rows with `tokens` tokens in total, rounded up to whole rows, or fewer if the data ends: no repeats."""
    rows = cut(pieces, seq_len, BEGINNING, epochs=1)
    return [pack(sequences) for sequences, _ in islice(rows, -(-tokens // seq_len))]


def cut(
    pieces: Pieces, seq_len: int, position: Position, epochs: float = math.inf
) -> Iterator[tuple[list[np.ndarray], Position]]:
    """Yields the sequences of every row from a position on, and where it ends; only the last can be short."""
    epoch, piece, offset = position
    row, room = [], seq_len
    while epoch < epochs:
        empty = piece == 0
        for tokens in pieces.read(epoch, piece):
            empty = False
            while offset < len(tokens):
                row.append(tokens[offset : offset + room])
                offset, room = offset + len(row[-1]), room - len(row[-1])
                if room == 0:
                    yield row, Position(epoch, piece, offset)
                    row, room = [], seq_len
            piece, offset = piece + 1, 0
        if empty:
            raise ValueError("the data set has no documents")
        epoch, piece = epoch + 1, 0
    if row:
        yield row, Position(epoch, piece, offset)


def pack(sequences: list[np.ndarray]) -> dict[str, Tensor]:
    """The model's inputs: one row with the sequences end to end; the model shifts the labels."""
    cu_seqlens = np.cumsum([0, *map(len, sequences)])
    input_ids = torch.from_numpy(np.concatenate(sequences).astype(np.int64))[None]  # [1, T]
    labels = input_ids.clone()
    labels[0, cu_seqlens[:-1]] = IGNORED_LABEL
    return {"input_ids": input_ids, "labels": labels, "cu_seqlens": torch.from_numpy(cu_seqlens).int()}
