"""The paper's taxonomy as running code: every row of its two tables, with one interface and as a mixer."""

from osdn.zoo.inner import INNER_OPTIMISERS, InnerOptimiser, inner_step
from osdn.zoo.mixer import RecurrentMixer
from osdn.zoo.model import causal_lm
from osdn.zoo.recurrence import DOMAINS, Input, Recurrence
from osdn.zoo.recurrences import RECURRENCES

__all__ = [
    "DOMAINS",
    "INNER_OPTIMISERS",
    "RECURRENCES",
    "InnerOptimiser",
    "Input",
    "Recurrence",
    "RecurrentMixer",
    "causal_lm",
    "inner_step",
]
