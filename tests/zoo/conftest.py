"""Random inputs for any row, computed from unconstrained leaves so that gradients can be compared."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from osdn.zoo import DOMAINS, RECURRENCES, Recurrence


@dataclass
class Case:
    recurrence: Recurrence
    leaves: dict[str, Tensor]

    def tensors(self, names) -> dict[str, Tensor]:
        specs = {**self.recurrence.inputs, **self.recurrence.weights}
        return {name: DOMAINS[specs[name].domain](self.leaves[name]) for name in names}

    @property
    def inputs(self) -> dict[str, Tensor]:
        return self.tensors(self.recurrence.inputs)

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.tensors(self.recurrence.weights)


def make_case(
    name: str, T: int = 11, K: int = 5, V: int = 3, M: int = 4, batch=(2, 3), seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    row, sizes = RECURRENCES[name], {"K": K, "V": V, "M": M}

    def leaf(*shape: int) -> Tensor:
        # twice the spread of an untrained projection, so that gates and decays cover their range
        return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()

    leaves = {x: leaf(*batch, T, *spec.shape(**sizes)) for x, spec in row.inputs.items()}
    leaves |= {x: leaf(batch[-1], *spec.shape(**sizes)) for x, spec in row.weights.items()}
    return Case(row, leaves)


@pytest.fixture(params=list(RECURRENCES))
def name(request) -> str:
    return request.param
