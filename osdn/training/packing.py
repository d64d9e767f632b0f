"""Documents packed end to end into rows of a fixed number of tokens.

There is one stream of rows, whatever the number of devices: row i goes to device i mod n, so that a step
reads the same rows on one device as on many.  A place in the stream is three integers (epoch, document,
offset); every row carries the place where the next round of rows begins, which is all a checkpoint keeps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from osdn.training.data import tokenize

IGNORED_LABEL = -100
READ_AHEAD = 256  # documents fetched at once from a data set on disk
SHUFFLE_BUFFER = 10_000  # documents a stream is shuffled within


class Position(NamedTuple):
    """How far a stream has been read: epochs, documents of this epoch, and tokens of this document."""

    epoch: int = 0
    document: int = 0
    offset: int = 0


BEGINNING = Position()


class Documents:
    """The tokens of a data set, document by document, in an order that the seed decides for every epoch."""

    def __init__(
        self, data: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        self.data, self.tokenizer, self.seed = data, tokenizer, seed
        if isinstance(data, Dataset):
            self.data = tokenize(data, tokenizer).with_format("numpy")

    def read(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        """The documents of an epoch, without the first `start`."""
        generator = np.random.default_rng((self.seed, epoch))
        if isinstance(self.data, Dataset):
            order = generator.permutation(len(self.data))[start:]
            for i in range(0, len(order), READ_AHEAD):
                yield from self.data[order[i : i + READ_AHEAD]]["input_ids"]
        else:  # skip before tokenising: what was read already costs its download only
            stream = self.data.shuffle(generator=generator, buffer_size=SHUFFLE_BUFFER).skip(start)
            for row in tokenize(stream, self.tokenizer):
                yield np.asarray(row["input_ids"])


@dataclass
class PackedRows(torch.utils.data.IterableDataset):
    """The rows of device `rank` of `ranks`, without end.

    A document longer than `context_len` is split, and what does not fit in a row goes on in the next one;
    each piece is a sequence of its own, whose first token is nobody's target.
    """

    documents: Documents
    seq_len: int
    context_len: int
    rank: int = 0
    ranks: int = 1
    position: Position = BEGINNING

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = self._rows()
        while True:
            round_of_rows = list(islice(rows, self.ranks))
            pieces, _ = round_of_rows[self.rank]
            yield pack(pieces) | {"position": round_of_rows[-1][1]}

    def _rows(self) -> Iterator[tuple[list[np.ndarray], Position]]:
        """Every row as its pieces, and the place where it ends."""
        epoch, document, offset = self.position
        pieces, room = [], self.seq_len
        while True:
            empty = True
            for tokens in self.documents.read(epoch, document):
                empty = False
                while offset < len(tokens):
                    piece = tokens[offset : offset + min(self.context_len, room)]
                    pieces.append(piece)
                    offset, room = offset + len(piece), room - len(piece)
                    if room == 0:
                        yield pieces, Position(epoch, document, offset)
                        pieces, room = [], self.seq_len
                document, offset = document + 1, 0
            if empty and document == 0:
                raise ValueError("the data set has no documents")
            epoch, document = epoch + 1, 0


def pack(pieces: list[np.ndarray]) -> dict[str, Tensor]:
    """The model's inputs: one row of the pieces end to end; labels are shifted by the model."""
    cu_seqlens = np.cumsum([0, *map(len, pieces)])
    input_ids = torch.from_numpy(np.concatenate(pieces).astype(np.int64))[None]  # [1, T]
    labels = input_ids.clone()
    labels[0, cu_seqlens[:-1]] = IGNORED_LABEL
    return {"input_ids": input_ids, "labels": labels, "cu_seqlens": torch.from_numpy(cu_seqlens).int()}
