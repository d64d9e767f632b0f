"""The fast forms of the zoo's rows against their step functions, forward and backward.

Measured on one thread, as in the lab, and in CPU time, which ignores whatever else the machine is doing.
"""

import time
from typing import Any

import torch

from osdn.results.tables import Cell, Row, Table
from osdn.zoo import DOMAINS, RECURRENCES

SHAPE = {"B": 2, "H": 2, "T": 256, "K": 32, "V": 32}


def run(rounds: int = 3, shape: dict[str, int] = SHAPE) -> Table:
    """Milliseconds of both forms of every row that has a fast one; they take turns, the best round counts."""
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, row in RECURRENCES.items():
            if row.fast is None:
                continue
            slow, fast = (min(x) for x in zip(*(_times(name, shape) for _ in range(rounds))))
            cells = [f"{slow:.1f}", f"{fast:.2f}", f"{slow / fast:.0f}"]
            rows.append(Row(name, [Cell(text) for text in cells]))
    finally:
        torch.set_num_threads(threads)
    sizes = ", ".join(f"{name} = {size}" for name, size in shape.items())
    return Table(f"Forward and backward, {sizes}", ["step function, ms", "fast form, ms", "ratio"], rows)


def _times(name: str, shape: dict[str, int]) -> tuple[float, float]:
    row, generator = RECURRENCES[name], torch.Generator().manual_seed(0)
    B, H, T, sizes = shape["B"], shape["H"], shape["T"], {"K": shape["K"], "V": shape["V"], "M": 1}

    def draw(spec: Any, *batch: int) -> torch.Tensor:
        x = torch.randn(*batch, *spec.shape(**sizes), generator=generator)
        return DOMAINS[spec.domain](x).requires_grad_()

    inputs = {x: draw(spec, B, H, T) for x, spec in row.inputs.items()}
    weights = {x: draw(spec, H) for x, spec in row.weights.items()}
    leaves, milliseconds = [*inputs.values(), *weights.values()], []
    for stepwise in (True, False):
        start = time.process_time()
        o, _ = row.scan(inputs, weights, stepwise=stepwise)
        torch.autograd.grad(o.sum(), leaves)
        milliseconds.append((time.process_time() - start) * 1e3)
    return milliseconds[0], milliseconds[1]
