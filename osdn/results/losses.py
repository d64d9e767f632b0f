"""Loss curves of training runs, from their logs.

A logged loss is the mean over the steps since the previous line.  Steps that were skipped because their
gradient was not finite have no loss and do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WINDOW = 257  # steps in the rolling mean, at most a twentieth of the run
FINAL = 256  # steps in the final loss, at most a tenth of the run


@dataclass(frozen=True)
class LossCurve:
    tokens: np.ndarray  # at every line
    losses: np.ndarray
    steps_per_line: float
    final: float
    validation: list[tuple[float, float]]  # tokens and loss


def loss_curve(lines: Sequence[dict[str, Any]]) -> LossCurve:
    """The curve of a run from the lines of its log."""
    known = [line for line in lines if line.get("loss") is not None]
    if not known:
        raise ValueError("the run has no losses yet")
    return LossCurve(
        np.array([line["tokens"] for line in known], float),
        np.array([line["loss"] for line in known], float),
        max(1.0, known[-1]["step"] / len(known)),
        final_loss(lines) or float("nan"),
        [
            (line["tokens"], line["validation_loss"])
            for line in lines
            if line.get("validation_loss") is not None
        ],
    )


def final_loss(lines: Sequence[dict[str, Any]]) -> float | None:
    """The mean loss over the last tenth of the steps, at most 256, weighted by steps rather than lines.

    A line's loss is the mean over `loss_steps` steps since the previous line, not counting skipped steps.
    Returns None if every step was skipped.
    """
    logged = [line for line in lines if "loss" in line]
    if not logged:
        return None
    last = logged[-1]["step"]
    first = last - min(FINAL, -(-last // 10))
    total = weights = 0.0
    for before, line in zip([{"step": 0}, *logged], logged):
        steps = line["step"] - before["step"]
        if line["loss"] is not None and line["step"] > first:
            share = line.get("loss_steps", steps) / steps
            weight = share * (line["step"] - max(before["step"], first))
            total, weights = total + weight * line["loss"], weights + weight
    return total / weights if weights else None


def smooth(curve: LossCurve) -> np.ndarray:
    """The losses as a centred rolling mean."""
    return rolling_mean(curve.losses, min(int(WINDOW / curve.steps_per_line), len(curve.losses) // 20) | 1)


def rolling_mean(x: np.ndarray, window: int) -> np.ndarray:
    """A centred mean over `window` values, an odd number; at the ends, over as many as there are."""
    half = window // 2
    total = np.concatenate([[0.0], np.cumsum(x)])
    stop = np.minimum(np.arange(len(x)) + half + 1, len(x))
    start = np.maximum(np.arange(len(x)) - half, 0)
    return (total[stop] - total[start]) / (stop - start)
