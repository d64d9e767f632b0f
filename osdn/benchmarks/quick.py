"""Two speeds worth knowing: training steps against the token-by-token reference, operators against a peer.

Contenders take turns, round after round, so that a slow spell of the machine hits them all; the best round of
each counts.  `osdn bench ops` does the same at length.
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
    """Recall without the shorter sequences that training mixes in."""

    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self.sample(size, generator)


def training(run: Run) -> dict[str, float]:
    """Steps a second of the run's model on 256-token sequences, with the fast operators and the reference."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the lab trains
    run = replace(run, task=FullLength(length=256), batch=8)
    try:
        fast = steps_per_second(run, 30)
        return {"auto": fast, "reference": steps_per_second(replace(run, backend="reference"), 3)}
    finally:
        torch.set_num_threads(threads)


def steps_per_second(run: Run, steps: int) -> float:
    """Of the training loop, at the best of its steps; the first two are not counted."""
    stamps: list[float] = []
    train(replace(run, steps=steps + 2), lambda *_: stamps.append(time.perf_counter()))
    return 1 / min(after - before for before, after in pairwise(stamps[1:]))


def operators(rounds: int = 3) -> dict[str, float]:
    """Milliseconds of a forward and backward pass: the operators, and the fallback in `transformers`."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    from transformers.utils import logging

    logging.set_verbosity_error()  # it recommends a package; here it is the fallback that is timed
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
    return {name: min(found[1:]) for name, found in times.items()}
