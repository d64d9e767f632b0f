"""The six tasks of MAD, mechanistic architecture design (Poli et al. 2024, https://arxiv.org/abs/2403.17844).

Definitions and sizes are as published (Section 3.1 and Appendix B, and the base settings of
https://github.com/athms/mad-lab): in-context recall asks for the value of every key seen before, noisy recall
adds pairs of noise, and fuzzy recall has keys and values of several tokens. These three train on every token,
but only the values of known keys are scored. One thing differs:  MAD trains for several epochs on a fixed set
of 12,800 sequences (memorization: 256); here every batch is new.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from osdn.lab.synthetic import IGNORED, SyntheticTask, at_least

MAP_SEED = 12345  # draws the facts to memorize, which are the same for every model and seed


class NextToken(SyntheticTask):
    """A task that trains on every next token of a sequence and scores some of them."""

    def sequences(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens `[n, length]`, and which of them are scored."""
        raise NotImplementedError

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, scored = self.sequences(n, generator)
        return tokens[:, :-1], tokens.masked_fill(~scored, IGNORED)[:, 1:]

    def training_sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, _ = self.sequences(n, generator)
        return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class InContextRecall(NextToken):
    """Random keys, each followed by its value in this sequence; with noise, noisy in-context recall.

    Args:
        vocab_size: without the noise tokens, half are keys and half values.
        length: tokens per sequence, an even number.
        noise_vocab_size: number of noise tokens.
        noise: share of pairs that are replaced by noise tokens.
        evaluation: sequences per reported accuracy.
    """

    vocab_size: int = 16
    length: int = 128
    noise_vocab_size: int = 0
    noise: float = 0.0
    evaluation: int = 128

    def __post_init__(self) -> None:
        at_least(self, length=4, noise_vocab_size=int(self.noise > 0), evaluation=1)
        if self.length % 2:
            raise ValueError(f"length is {self.length}; it must be even, since a sequence consists of pairs")
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise is {self.noise}; it must be at least 0 and below 1")
        at_least(self, vocab_size=2 + self.noise_vocab_size)

    def sequences(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        pairs, words = self.length // 2, self.vocab_size - self.noise_vocab_size
        half = words // 2
        keys = torch.randint(half, (n, pairs), generator=generator)
        value_of = torch.randint(half, words, (n, half), generator=generator)  # of each key, per sequence
        noisy = torch.rand(n, pairs, generator=generator) < self.noise
        clean = torch.randint(pairs - 1, (n, 1), generator=generator)  # at least one pair is not noise
        noisy = noisy.scatter(1, clean, False)
        noisy[:, -1] = False
        # the last pair repeats an earlier key
        weights = (~noisy[:, :-1]).double()
        again = torch.multinomial(weights, 1, generator=generator)
        keys[:, -1:] = keys.gather(1, again)
        tokens = torch.stack([keys, value_of.gather(1, keys)], 2)  # [n, pairs, 2]
        if self.noise:
            other = torch.randint(words, self.vocab_size, tokens.shape, generator=generator)
            tokens = torch.where(noisy[..., None], other, tokens)
        same = (keys[:, :, None] == keys[:, None, :]) & ~noisy[:, None, :]  # [n, pair, earlier pair]
        known = same.tril(-1).any(2) & ~noisy
        scored = torch.stack([torch.zeros_like(known), known], 2)
        return tokens.flatten(1), scored.flatten(1)


@dataclass(frozen=True)
class FuzzyRecall(NextToken):
    """In-context recall with keys and values of one to three tokens; in tests, all keys have three.

    Args:
        vocab_size: one token is padding, half of the others are for keys, half for values.
        length: tokens per sequence, padded on the left.
        motif: most tokens in a key or value, all of them different.
        evaluation: sequences per reported accuracy.
    """

    vocab_size: int = 16
    length: int = 128
    motif: int = 3
    evaluation: int = 128

    def __post_init__(self) -> None:
        at_least(self, motif=1, evaluation=1)
        at_least(self, vocab_size=2 * self.motif + 1, length=4 * self.motif)

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, scored = self._rows(n, generator, [self.motif])
        return tokens[:, :-1], tokens.masked_fill(~scored, IGNORED)[:, 1:]

    def sequences(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self._rows(n, generator, range(1, self.motif + 1))

    def _rows(self, n: int, generator: torch.Generator, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        draw = random.Random(int(torch.randint(2**62, (1,), generator=generator)))
        rows = [self._row(draw, sizes) for _ in range(n)]
        tokens, scored = zip(*rows)
        return torch.tensor(tokens), torch.tensor(scored)

    def _row(self, draw: random.Random, key_sizes: Sequence[int]) -> tuple[list[int], list[bool]]:
        """As many pairs as fit; the last has a known key."""
        pad, half = self.vocab_size - 1, (self.vocab_size - 1) // 2
        value_of: dict[tuple[int, ...], list[int]] = {}
        tokens: list[int] = []
        scored: list[bool] = []

        def add(key: tuple[int, ...]) -> None:
            known = key in value_of
            if not known:
                value_of[key] = draw.sample(range(half, pad), draw.randint(1, self.motif))
            tokens.extend((*key, *value_of[key]))
            scored.extend([False] * len(key) + [known] * len(value_of[key]))

        while len(tokens) + 4 * self.motif <= self.length:  # there is room for this pair and the last
            add(tuple(draw.sample(range(half), draw.choice(key_sizes))))
        add(draw.choice(list(value_of)))
        empty = self.length - len(tokens)
        return [pad] * empty + tokens, [False] * empty + scored


@dataclass(frozen=True)
class SelectiveCopying(SyntheticTask):
    """Tokens among blanks; after a marker they must be repeated in order, one per trailing blank.

    Args:
        vocab_size: the last two tokens are the blank and the marker.
        length: tokens per sequence.
        tokens: how many tokens to copy.
        evaluation: sequences per reported accuracy.
    """

    vocab_size: int = 16
    length: int = 256
    tokens: int = 16
    evaluation: int = 128

    def __post_init__(self) -> None:
        at_least(self, tokens=1, vocab_size=3, evaluation=1)
        at_least(self, length=2 * self.tokens + 1)

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        blank, marker = self.vocab_size - 2, self.vocab_size - 1
        content = torch.randint(blank, (n, self.tokens), generator=generator)
        before = self.length - self.tokens - 1
        places = torch.rand(n, before, generator=generator).argsort(1)[:, : self.tokens].sort(1).values
        inputs = torch.full((n, self.length), blank).scatter(1, places, content)
        inputs[:, before] = marker
        labels = torch.full_like(inputs, IGNORED)
        labels[:, before + 1 :] = content
        return inputs, labels


@dataclass(frozen=True)
class Memorization(SyntheticTask):
    """Facts that are the same in every sequence: after each key, a marker asks for its value.

    Args:
        vocab_size: the last token is the marker, half of the others are keys, half values.
        length: tokens per sequence.
        evaluation: sequences per reported accuracy.
    """

    vocab_size: int = 256
    length: int = 32
    evaluation: int = 128

    def __post_init__(self) -> None:
        at_least(self, vocab_size=3, length=2, evaluation=1)

    def value_of(self) -> Tensor:
        """The value of each key; different keys have different values."""
        words, half = self.vocab_size - 1, (self.vocab_size - 1) // 2
        order = torch.randperm(words - half, generator=torch.Generator().manual_seed(MAP_SEED))
        return half + order[:half]

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        values = self.value_of()
        keys = torch.randint(len(values), (n, self.length // 2), generator=generator)
        marker = torch.full_like(keys, self.vocab_size - 1)
        nothing = torch.full_like(keys, IGNORED)
        inputs, labels = torch.stack([keys, marker], 2), torch.stack([nothing, values[keys]], 2)
        return inputs.flatten(1), labels.flatten(1)


@dataclass(frozen=True)
class Compression(SyntheticTask):
    """Random tokens and a marker; an MLP must decode all tokens from the model's output at the marker.

    Args:
        vocab_size: the last token is the marker.
        length: tokens per sequence, including the marker.
        evaluation: sequences per reported accuracy.
    """

    vocab_size: int = 16
    length: int = 32
    evaluation: int = 128

    def __post_init__(self) -> None:
        at_least(self, vocab_size=2, length=2, evaluation=1)

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randint(self.vocab_size - 1, (n, self.length), generator=generator)
        inputs[:, -1] = self.vocab_size - 1
        labels = inputs.clone()
        labels[:, -1] = IGNORED
        return inputs, labels

    def adapt(self, model: Any) -> None:
        width = model.config.hidden_size
        model.decoder = nn.Sequential(
            *(nn.RMSNorm(width), nn.Linear(width, width), nn.GELU()),
            *(nn.RMSNorm(width), nn.Linear(width, width), nn.GELU()),
            *(nn.RMSNorm(width), nn.Linear(width, self.vocab_size)),
        )

    def logits(self, model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        summary = model.model(inputs, use_cache=False).last_hidden_state[:, -1:]  # [B, 1, D]
        decoded = model.decoder(summary + positions(self.length, summary.shape[-1]))  # [B, T, vocabulary]
        return decoded[labels != IGNORED]


def positions(length: int, width: int) -> Tensor:
    """Sines and cosines of every position, with geometrically spaced wavelengths up to 10,000, `[T, D]`."""
    rates = torch.exp(torch.arange(width // 2) * (-math.log(10_000) / max(1, width // 2 - 1)))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)
