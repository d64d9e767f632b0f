"""Language modelling on text that is always available: the sources of Python's standard library.

A byte-pair vocabulary is trained on them in seconds.  Training and validation use different files (see
`osdn.training.data`), which are the same for everyone with the same version of Python.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from osdn.lab.residual import write_statistics
from osdn.lab.synthetic import TokenTask, at_least
from osdn.training.data import load_tokenizer, stdlib_documents, train_tokenizer

PROMPT = "def __init__(self, "


@dataclass(frozen=True)
class TextTask(TokenTask):
    """Next-token prediction on the corpus that `prepare` left in `folder`.

    Args:
        folder: where the tokenizer and the tokens are.
        vocab_size: entries in the byte-pair vocabulary.
        length: tokens per sequence.
        megabytes: how much of the standard library to use.
        evaluation: number of validation sequences.
        longest: also test on sequences up to this many times as long (2, 4 or 8).
    """

    folder: str
    vocab_size: int = 1024
    length: int = 256
    megabytes: float = 4.0
    evaluation: int = 64
    longest: int = 1

    def __post_init__(self) -> None:
        at_least(self, vocab_size=257, length=2, evaluation=1, longest=1)
        if self.megabytes < 0.1:
            raise ValueError(f"megabytes is {self.megabytes}; it must be at least 0.1")

    def prepare(self, output: Path) -> "TextTask":
        name = f"corpus-{self.vocab_size}-{self.megabytes:g}MB"
        task = replace(self, folder=str(output / name))
        prepare(task)
        return task

    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows at random places in the training files; every model gets the same ones for a given seed."""
        tokens = _tokens(self.folder, "train")
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(tokens) - self.length, (size, 1), generator=generator)
            windows = tokens[starts + torch.arange(self.length + 1)]
            yield windows[:, :-1], windows[:, 1:]

    @torch.no_grad()
    def evaluate(self, model: Any, seed: int) -> dict[str, Any]:
        """Validation loss by position and beyond the trained length, write statistics, and a text sample."""
        windows = self._windows(self.evaluation, self.length)
        by_position = _loss_by_position(model, windows)
        longer_losses = {}
        if self.longest > 1:
            longer = self._windows(max(1, self.evaluation // self.longest), self.longest * self.length)
            losses = _loss_by_position(model, longer)
            for factor in (f for f in (2, 4, 8) if f <= self.longest):  # the second half of each length
                part = losses[factor * self.length // 2 : factor * self.length]
                longer_losses[f"loss_{factor}x"] = part.mean().item()
        return {
            **longer_losses,
            "loss": by_position.mean().item(),
            "perplexity": by_position.mean().exp().item(),
            "loss_by_position": by_position.tolist(),
            "sample": self.generate(model, seed),
            **write_statistics(model, windows[::4, :-1]),
        }

    def _windows(self, count: int, length: int) -> Tensor:
        """`count` evenly spaced windows of the validation text, `[count, length + 1]`."""
        tokens = _tokens(self.folder, "validation")
        starts = torch.linspace(0, len(tokens) - length - 1, count).long()
        return tokens[starts[:, None] + torch.arange(length + 1)]

    def generate(self, model: Any, seed: int) -> str:
        """The model's continuation of a prompt."""
        tokenizer = load_tokenizer(str(Path(self.folder).resolve()))
        ids = torch.tensor([tokenizer.encode(PROMPT)])
        torch.manual_seed(seed)
        settings: dict[str, Any] = {
            "use_cache": model.config.use_cache,
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 40,
            "max_new_tokens": 96,
        }
        out = model.generate(ids, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, **settings)
        return str(tokenizer.decode(out[0]))


def prepare(task: TextTask) -> None:
    """Train the vocabulary and encode the corpus into `task.folder`, unless that is done."""
    folder = Path(task.folder)
    if (folder / "validation.npy").exists():  # written last
        return
    train = corpus("train", task.megabytes)
    tokenizer = train_tokenizer(train, task.vocab_size)
    tokenizer.save_pretrained(folder)
    for split, texts in (("train", train), ("validation", corpus("validation", task.megabytes / 8))):
        ids = tokenizer.eos_token.join(texts)
        partial = folder / f".{split}.npy"
        np.save(partial, np.array(tokenizer.encode(ids), np.uint16))
        partial.replace(folder / f"{split}.npy")


def corpus(split: str, megabytes: float) -> list[str]:
    """Shuffled files of one split, up to so many megabytes."""
    texts = list(stdlib_documents(split))
    random.Random(0).shuffle(texts)
    sizes = np.cumsum([len(text) for text in texts])
    return texts[: 1 + int(np.searchsorted(sizes, megabytes * 1e6))]


@cache
def _tokens(folder: str, name: str) -> Tensor:
    return torch.from_numpy(np.load(Path(folder) / f"{name}.npy").astype(np.int64))


def _loss_by_position(model: Any, windows: Tensor) -> Tensor:  # [B, T + 1] -> [T]
    losses = []
    for part in windows.split(16):
        logits = model(part[:, :-1], use_cache=False).logits
        losses.append(F.cross_entropy(logits.mT, part[:, 1:], reduction="none"))
    return torch.cat(losses).double().mean(0)
