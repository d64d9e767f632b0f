"""Loss curves of runs, as in the paper's figure "Token-vs-CE training trajectories".

Curves are centred rolling means over 257 steps, or over a twentieth of a run that is shorter than twenty of
those.  On the left is the whole run on a logarithmic axis, on the right its final quarter on a linear one.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from osdn.training.monitor import METRICS, Metrics

matplotlib.use("agg")
import matplotlib.pyplot as plt

WINDOW = 257  # steps


def drawable(name: str) -> str:
    """A name for a legend: matplotlib reads `$` as mathematics and leaves out what starts with `_`."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def loss_curve(run: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and losses of a run, at every step that was logged."""
    if not Path(run, METRICS).is_file():
        raise FileNotFoundError(f"{run} is not the directory of a run: it has no {METRICS}")
    lines = [line for line in Metrics.read(run) if line.get("loss") is not None]
    if not lines:
        raise ValueError(f"{run} has no losses yet")
    return np.array([line["tokens"] for line in lines]), np.array([line["loss"] for line in lines])


def final_loss(run: str | Path, steps: int) -> float:
    """The mean over the last `steps` steps; a logged loss is the mean of the steps since the log before."""
    lines = [line for line in Metrics.read(run) if line.get("loss") is not None]
    ends = np.array([line["step"] for line in lines])
    starts = np.maximum(np.concatenate([[0], ends[:-1]]), ends[-1] - steps)
    return float(np.average([line["loss"] for line in lines], weights=np.maximum(ends - starts, 0)))


def rolling_mean(x: np.ndarray, window: int) -> np.ndarray:
    """A centred mean over `window` values, an odd number; at the ends, over those that there are."""
    half = window // 2
    total = np.concatenate([[0.0], np.cumsum(x)])
    stop = np.minimum(np.arange(len(x)) + half + 1, len(x))
    start = np.maximum(np.arange(len(x)) - half, 0)
    return (total[stop] - total[start]) / (stop - start)


def plot_losses(runs: Sequence[str | Path], output: str | Path) -> Path:
    """Draw the loss curves of runs into `output`, a PNG, SVG or PDF."""
    figure, (whole, final) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    curves = [loss_curve(run) for run in runs]
    billions = max(tokens[-1] for tokens, _ in curves) >= 1e9
    for i, (run, (tokens, losses)) in enumerate(zip(runs, curves)):
        tokens = tokens / (1e9 if billions else 1e6)
        steps_a_log = max(1, round(Metrics.read(run)[-1]["step"] / len(losses)))
        window = min(WINDOW // steps_a_log, len(losses) // 20) | 1
        smooth = rolling_mean(losses, window)
        end = losses[-max(1, len(losses) // 80) :].mean()
        label = f"{drawable(Path(run).resolve().name)}, {end:.3f} at the end"
        last = tokens >= 0.75 * tokens[-1]
        whole.plot(tokens, smooth, lw=1.2, color=f"C{i}", label=label)
        final.plot(tokens[last], smooth[last], lw=1.2, color=f"C{i}")
    whole.set_yscale("log")
    whole.set_title("Whole run", loc="left", fontsize=10)
    final.set_title("Final quarter", loc="left", fontsize=10)
    for axis in (whole, final):
        axis.set_xlabel(f"{'billions' if billions else 'millions'} of tokens")
        axis.set_ylabel("cross-entropy, nats a token")
        axis.yaxis.set_major_formatter("{x:.2f}")
        axis.yaxis.set_minor_formatter("{x:.1f}" if axis is whole else "")
        axis.tick_params(axis="both", which="both", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, lw=0.5)
    whole.legend(frameon=False, fontsize=8)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=160)
    plt.close(figure)
    return Path(output)
