"""Random problems for the operators, an operator's whole answer to one, and how far two answers are apart.

A problem is stored in float32, so that every dtype computes on the very same numbers, and an answer holds
the outputs together with the gradients of every tensor argument, of a loss that sees all outputs.
"""

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from osdn.ops import (
    available_backends,
    delta_rule,
    newton_delta_rule,
    newton_keys,
    online_scaled_delta_rule,
    pgdn_delta_rule,
    pgdn_keys,
    precondition_keys,
)

BACKENDS = [name for name in available_backends() if name != "reference"]
# The rules of phase 1: on its own, with phase 2, and what the state is called that it carries.
PHASE_1 = {precondition_keys: "scale", newton_keys: "covariance", pgdn_keys: "gram"}
BOTH = {online_scaled_delta_rule: "scale", newton_delta_rule: "covariance", pgdn_delta_rule: "gram"}
OPERATORS = [*PHASE_1, delta_rule, *BOTH]
OUTPUTS = {
    delta_rule: ("o", "final_state"),
    **{operator: ("write_keys", f"final_{state}") for operator, state in PHASE_1.items()},
    **{operator: ("o", "final_state", f"final_{state}") for operator, state in BOTH.items()},
}

# A float32 result below this has lost digits to underflow, which is no error of the algorithm.
UNDERFLOW = 1e-30


@dataclass(frozen=True)
class Config:
    """A problem in words; `make` draws its numbers."""

    lengths: tuple[int, ...] = (37,)
    packed: bool = False  # else a batch of len(lengths) rows, all of the first length
    H: int = 2
    group: int = 1  # value heads a key head
    K: int = 8
    V: int = 8
    decay: str = "none"  # none | head | channel
    strength: str = "weak"  # weak | strong | mixed | constant
    retention: str = "none"  # none | constant | head | channel | tied
    bounds: tuple[float, float] | None = (0.5, 2.0)
    eta: float = 0.003
    beta_aware: bool = True
    prior: float = 1.0
    block: int = 1  # channels per block of a covariance, so far as they divide K; 0 is all of them
    squash: float = 1.5
    initial_scale: str = "none"  # none | shared | each; so, too, of a covariance and of a Gram diagonal
    initial_state: bool = False
    scale: float | None = None
    alike: float = 0.0  # how much the keys have in common
    seed: int = 0


@dataclass
class Problem:
    tensors: dict[str, Tensor]  # what is differentiated
    options: dict[str, Any]

    def arguments(self, operator: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The part of the problem that `operator` takes."""
        taken = inspect.signature(operator).parameters
        tensors = {name: x for name, x in self.tensors.items() if name in taken}
        options = {name: x for name, x in self.options.items() if name in taken}
        if "block_size" in taken and tensors.get("retention", torch.empty(0)).ndim == 4:
            tensors["retention"] = tensors["retention"][..., :: options["block_size"]]  # one per block
        return tensors, options


def make(config: Config) -> Problem:
    c = config
    random = torch.Generator().manual_seed(c.seed)
    B, T = (1, sum(c.lengths)) if c.packed else (len(c.lengths), c.lengths[0])
    N, HV = len(c.lengths), c.H * c.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=random)

    k = F.normalize(normal(B, T, c.H, c.K) + c.alike * c.K**0.5 * normal(c.K), dim=-1)
    k = k.masked_fill(uniform(0, 1, B, T, 1, 1) < 0.03, 0)  # a token of padding has a key of zeros
    beta = uniform(-0.05, 1.05, B, T, HV).clamp(0, 1)  # the ends included
    tensors = {
        "q": F.normalize(normal(B, T, c.H, c.K), dim=-1),
        "k": k,
        "v": normal(B, T, HV, c.V),
        "beta": beta,
        "write_keys": k.repeat_interleave(c.group, 2) * uniform(0.5, 2, B, T, HV, c.K),
        "gain": uniform(0, 1, B, T, HV),
        "center": uniform(-0.5, 0.5, HV),
    }
    shapes = {"head": (B, T, HV), "channel": (B, T, HV, c.K)}
    if c.decay != "none":
        tensors["log_decay"] = _log_decay(c.strength, uniform(0, 1, *shapes[c.decay]))
    if c.retention == "tied":
        tensors["retention"] = tensors["log_decay"].exp() if c.decay != "none" else uniform(0, 1, B, T, HV)
    elif c.retention in shapes:
        tensors["retention"] = uniform(0.8, 1, *shapes[c.retention])
    block = math.gcd(c.K, c.block)
    if c.initial_scale != "none":
        shape = (HV, c.K) if c.initial_scale == "shared" else (N, HV, c.K)
        tensors["initial_scale"] = uniform(0.6, 1.8, *shape)
        root = normal(*shape[:-1], c.K // block, block, block) / (2 * block**0.5)
        tensors["initial_covariance"] = c.prior * root @ root.mT
        tensors["initial_gram"] = uniform(0, 2, *shape)
    if c.initial_state:
        tensors["initial_state"] = normal(N, HV, c.K, c.V)
    options: dict[str, Any] = {
        "eta": c.eta,
        "bounds": c.bounds,
        "beta_aware": c.beta_aware,
        "prior": c.prior,
        "block_size": block,
        "squash": c.squash,
        "scale": c.scale,
        "output_final_state": True,
    }
    if c.retention == "constant":
        options["retention"] = 0.999
    if c.packed:
        options["cu_seqlens"] = torch.tensor([0, *c.lengths]).cumsum(0)
    return Problem(tensors, options)


def _log_decay(strength: str, x: Tensor) -> Tensor:
    """Logarithms of decays, `x` being uniform between 0 and 1."""
    if strength == "weak":
        return -0.1 * x
    if strength == "strong":
        return -20 * x
    if strength == "mixed":
        return torch.where(x < 0.1, -20.0, torch.where(x < 0.9, -0.01, 0.0))
    return torch.full_like(x, -20.0)


def answer(operator: Any, problem: Problem, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs by their names, gradients by `grad_` and the argument's."""
    tensors, options = problem.arguments(operator)
    leaves = {name: x.to(dtype).detach().requires_grad_() for name, x in tensors.items()}
    with threads(1 if backend in ("reference", "chunkwise") else 2):
        outputs = dict(zip(OUTPUTS[operator], operator(**leaves, **options, backend=backend)))
        return {
            **{name: x.detach() for name, x in outputs.items()},
            **gradients(weighted_sum(outputs.values()), leaves),
        }


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compiled code must be right with several; between plain PyTorch's small kernels they only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weighted_sum(outputs: Iterable[Tensor]) -> Tensor:
    """A loss that weighs every element of every output differently, and always in the same way."""
    random = torch.Generator().manual_seed(1)
    terms = [(x.double() * torch.randn(x.shape, generator=random)).sum() for x in outputs]
    return torch.stack(terms).sum()


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of `loss`, by `grad_` and the argument's name; zeros where there is no path."""
    if not loss.requires_grad:
        return {f"grad_{name}": torch.zeros_like(x) for name, x in leaves.items()}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {f"grad_{name}": grad for name, grad in zip(leaves, grads)}


def relative_error(got: Tensor, want: Tensor, underflow: float = UNDERFLOW) -> float:
    """Root mean square of the difference, relative to that of what is wanted."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return 0.0
    got, want = got.double(), want.double()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp_min(underflow))


def assert_close(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    outputs: float,
    gradients: float,
    underflow: float = UNDERFLOW,
) -> None:
    """Every output and gradient is within its bound; a failure lists all the errors."""
    assert got.keys() == want.keys()
    errors = {name: relative_error(got[name], want[name], underflow) for name in want}
    bound = {name: gradients if name.startswith("grad_") else outputs for name in want}
    assert all(errors[name] <= bound[name] for name in want), errors  # false for NaN too
