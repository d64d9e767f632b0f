"""An operator's answer to a problem, computed where the kernels run."""

from typing import Any

import torch
from torch import Tensor

from tests.ops.problems import OUTPUTS, Config, Problem, answer, gradients, make, weighted_sum

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPERANDS = ("q", "k", "v", "write_keys")


def rounded(config: Config, dtype: torch.dtype) -> Problem:
    """A problem whose queries, keys and values a 16-bit dtype holds exactly."""
    problem = make(config)
    for name in OPERANDS:
        problem.tensors[name] = problem.tensors[name].to(dtype).float()
    return problem


def truth(operator: Any, problem: Problem) -> dict[str, Tensor]:
    return answer(operator, problem, "reference", torch.float64)


def kernels(operator: Any, problem: Problem, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What backend="triton" answers, with queries, keys and values in `dtype`."""
    tensors, options = problem.arguments(operator)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = options["cu_seqlens"].to(DEVICE)
    leaves = {
        name: x.to(dtype if name in OPERANDS else torch.float32).detach().requires_grad_()
        for name, x in tensors.items()
    }
    results = operator(**{name: x.to(DEVICE) for name, x in leaves.items()}, **options, backend="triton")
    outputs = {name: x.cpu() for name, x in zip(OUTPUTS[operator], results)}
    found = gradients(weighted_sum(outputs.values()), leaves)
    return {**{name: x.detach() for name, x in outputs.items()}, **found}
