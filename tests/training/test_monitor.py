"""The log of a run: the final loss does not depend on how often losses were logged."""

from itertools import pairwise

import numpy as np
import pytest

from osdn.results.losses import final_loss


def lines_of(losses, ends):
    """The log lines of a run with these losses per step (None if skipped), logged at the steps `ends`."""
    lines = []
    for start, end in pairwise([0, *ends]):
        taken = [loss for loss in losses[start:end] if loss is not None]
        mean = float(np.mean(taken)) if taken else None
        lines.append({"step": end, "loss": mean, "loss_steps": len(taken)})
    return lines


def mean_of(losses):
    return np.mean([loss for loss in losses if loss is not None])


@pytest.mark.parametrize(
    "ends", [range(1, 1001), range(10, 1001, 10), [*range(7, 900, 7), 900, 903, 998, 1000]]
)
@pytest.mark.parametrize("skipped", [(), (0, 899, 950, 951), range(900, 998)])
def test_the_final_loss_is_the_mean_of_the_last_tenth_for_any_logging_interval(ends, skipped):
    losses = list(np.random.default_rng(0).normal(size=1000))
    for step in skipped:
        losses[step] = None
    assert final_loss(lines_of(losses, ends)) == pytest.approx(mean_of(losses[900:]))


def test_the_final_loss_covers_at_most_256_steps():
    losses = list(np.random.default_rng(0).normal(size=4000))
    assert final_loss(lines_of(losses, range(8, 4001, 8))) == pytest.approx(mean_of(losses[-256:]))
    assert final_loss(lines_of(losses[:5], range(1, 6))) == losses[4]  # a tenth of five steps is one


def test_a_line_that_spans_the_start_counts_only_its_later_steps():
    lines = [{"step": 92, "loss": 1.0, "loss_steps": 92}, {"step": 100, "loss": 2.0, "loss_steps": 4}]
    assert final_loss(lines) == pytest.approx(
        (2 * 1.0 + 4 * 2.0) / 6
    )  # of steps 91 to 100, four were skipped


def test_lines_without_losses_are_ignored():
    event = {"step": 50, "extended_to": 100}
    assert final_loss([]) is None
    assert final_loss([event]) is None
    assert final_loss([{"step": 5, "loss": 1.0, "loss_steps": 5}, event]) == 1.0
    skipped = [{"step": step, "loss": None, "loss_steps": 0} for step in range(1, 4)]
    assert final_loss(skipped) is None
    assert final_loss([{"step": 99, "loss": 3.0, "loss_steps": 99}, {"step": 100, "loss": None}]) == 3.0
