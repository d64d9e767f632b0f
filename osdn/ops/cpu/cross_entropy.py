"""The cross-entropy of logits and its gradient, by cross_entropy.h.

In PyTorch these are a maximum, a difference, an exponential, a sum and a product, each a pass over the
largest tensor of a training step; here it is one.
"""

import struct
from functools import cache

import torch
from torch import Tensor

from osdn.ops.cpu.binding import Kernel, bind, element, run, wide

# `struct CrossEntropy` in cross_entropy.h
FIELDS = ("logits", "labels", "losses", "rows", "C", "ignored", "element", "gradient", "threads")
LAYOUT = struct.Struct(f"{len(FIELDS)}q")


@cache
def _kernels(dtype: torch.dtype) -> list[Kernel]:
    return bind(dtype, "osdn_cross_entropy", FIELDS, LAYOUT.size, ("osdn_cross_entropy",))


def cross_entropies(logits: Tensor, labels: Tensor, ignored: int, *, overwrite: bool) -> Tensor:
    """The cross-entropy of each row, in float32 (float64 for float64); zero where the label is `ignored`.

    Args:
        logits: `[N, V]`, contiguous, on a CPU.
        labels: `[N]`, int64.
        ignored: a label outside of `0 ... V - 1`.
        overwrite: whether to leave the gradient of the sum of the results in `logits`.
    """
    rows, classes = logits.shape
    labels, losses = labels.contiguous(), logits.new_empty(rows, dtype=wide(logits.dtype))
    if not rows:
        return losses
    counted = labels != ignored
    if (counted & ((labels < 0) | (labels >= classes))).any():
        raise IndexError(f"a label is neither {ignored} nor between 0 and {classes - 1}, the last class")
    sizes = (rows, classes, ignored, element(logits.dtype), overwrite, torch.get_num_threads())
    run(_kernels(wide(logits.dtype))[0], LAYOUT, (logits, labels, losses, *sizes))
    return losses
