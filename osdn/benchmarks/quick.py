"""Two quick comparisons: training with the token-by-token reference, and the operators with a peer.

Contenders take turns in every round, so that slow spells of the machine affect all of them; the best round of
each counts.  `osdn bench ops` is the thorough version.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from osdn.lab.recall import RecallTask
from osdn.lab.training import Run, train
from osdn.ops import delta_rule, online_scaled_delta_rule

OPERATORS_SHAPE = {"B": 1, "T": 2048, "H": 8, "K": 128, "V": 128}


class FullLength(RecallTask):
    """Recall without the shorter sequences of training."""

    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self.sample(size, generator)


def training(run: Run) -> dict[str, float]:
    """Training steps per second on 256-token sequences, with the fast operators and with the reference."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the lab
    run = replace(run, task=FullLength(length=256), batch=8)
    try:
        fast = steps_per_second(run, 30)
        return {"auto": fast, "reference": steps_per_second(replace(run, backend="reference"), 3)}
    finally:
        torch.set_num_threads(threads)


def steps_per_second(run: Run, steps: int) -> float:
    """The speed of the training loop in its fastest step; the first two do not count."""
    stamps: list[float] = []
    train(replace(run, steps=steps + 2), lambda *_: stamps.append(time.perf_counter()))
    return 1 / min(after - before for before, after in pairwise(stamps[1:]))


def operators(rounds: int = 3) -> dict[str, float]:
    """Milliseconds of a forward and backward pass of the operators and of the fallback in `transformers`."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    from transformers.utils import logging

    logging.set_verbosity_error()  # no advice to install a package: the fallback is timed on purpose
    B, T, H, K, V = OPERATORS_SHAPE.values()
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = F.normalize(randn(B, T, H, K), dim=-1), F.normalize(randn(B, T, H, K), dim=-1)
    inputs = [x.requires_grad_() for x in (q, k, randn(B, T, H, V), randn(B, T, H).sigmoid())]
    decay, grad = -randn(B, T, H).exp() / 10, randn(B, T, H, V)
    contenders: dict[str, Callable[..., Any]] = {
        "osdn": lambda: online_scaled_delta_rule(*inputs)[0],
        "osgdn": lambda: online_scaled_delta_rule(*inputs, log_decay=decay)[0],
        "gdn": lambda: delta_rule(*inputs, log_decay=decay)[0],
        "gdn in transformers": lambda: torch_chunk_gated_delta_rule(*inputs[:3], decay, inputs[3])[0],
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, call in contenders.items():
            start = time.perf_counter()
            torch.autograd.grad(call(), inputs, grad)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: min(milliseconds[1:]) for name, milliseconds in times.items()}
