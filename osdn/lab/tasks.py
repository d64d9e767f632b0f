"""Every task of the lab by the name of its command: its default settings, sizes and metrics."""

from dataclasses import dataclass
from typing import Any

from osdn.lab.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopying
from osdn.lab.needle import NeedleTask
from osdn.lab.recall import RecallTask
from osdn.lab.text import TextTask
from osdn.lab.tracking import TrackingTask


@dataclass(frozen=True)
class Experiment:
    """A task, and the defaults of its command."""

    task: Any
    words: str  # the command's help
    metrics: tuple[str, ...] = ("accuracy", "q_geo")
    seeds: int = 6
    steps: int = 400
    batch: int = 32


LONGER = ("accuracy", "accuracy_2x", "accuracy_4x", "accuracy_8x", "q_geo")

EXPERIMENTS: dict[str, Experiment] = {
    "recall": Experiment(
        RecallTask(),
        "Multi-query associative recall.",
        ("accuracy", "accuracy_2x", "q_geo"),
        steps=200,
    ),
    "text": Experiment(
        TextTask(""),
        "A small language model on the sources of Python's standard library.",
        ("loss", "loss_2x", "loss_4x", "loss_8x", "perplexity", "q_geo"),
        seeds=3,
        steps=600,
        batch=8,
    ),
    "in-context-recall": Experiment(InContextRecall(), "MAD: recall the value of every key seen before."),
    "noisy-recall": Experiment(
        InContextRecall(vocab_size=32, noise_vocab_size=16, noise=0.2),
        "MAD: in-context recall among pairs of noise.",
    ),
    "fuzzy-recall": Experiment(
        FuzzyRecall(), "MAD: in-context recall with keys and values of 1 to 3 tokens."
    ),
    "selective-copying": Experiment(SelectiveCopying(), "MAD: copy the tokens that are not blanks."),
    "compression": Experiment(Compression(), "MAD: decode a whole sequence from a single output."),
    "memorization": Experiment(Memorization(), "MAD: memorize facts that are the same in every sequence."),
    "tracking": Experiment(
        TrackingTask(), "State tracking: the running product in a group.", LONGER, steps=600
    ),
    "needle": Experiment(NeedleTask(), "Needles in a haystack of filler, by depth and length.", LONGER),
}
