"""A row of the taxonomy: named state, named inputs, and one function that advances the state by a token.

A step function takes its state tensors first, then its inputs and weights by name, and returns the new state
followed by the output.  Everything else follows from the axes and the domain declared for each name: the
initial state, its size, the loop over tokens and the values an input may take.  A row that is a delta rule in
disguise also has a fast form, one call of the operator for all tokens (`osdn.zoo.fast`).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]

# Maps an unconstrained projection to the values a step function expects.
DOMAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "real": lambda x: x,
    "unit": lambda x: F.normalize(x, dim=-1),
    "gate": torch.sigmoid,
    # sigmoid(x) ** (1 / 16), as in GLA: an untrained layer already has a long memory
    "decay": lambda x: (F.logsigmoid(x) / 16).exp(),
    # starts at 0.999, like the retention of adaptive preconditioner forgetting
    "retention": lambda x: torch.sigmoid(x + 6.9068),
    "positive": F.softplus,
    # starts near 0.02, inside the range 0.001 to 0.1 of Mamba's time steps
    "timestep": lambda x: F.softplus(x - 4),
    "simplex": lambda x: x.softmax(-1),
}


class Input(NamedTuple):
    """The axes of a tensor, one letter each (K: key, V: value, M: slot, 1: a number), and its domain."""

    axes: str
    domain: str = "real"

    def shape(self, **sizes: int) -> tuple[int, ...]:
        return tuple(1 if axis == "1" else sizes[axis] for axis in self.axes)


@dataclass(frozen=True)
class Recurrence:
    """A row: `step` advances the state by one token; the other fields describe it."""

    name: str
    title: str
    citation: str
    update: str
    readout: str
    state: Mapping[str, str]  # name -> axes
    inputs: Mapping[str, Input]  # one value per token
    weights: Mapping[str, Input]  # one value per head
    function: Callable[..., tuple[Tensor, ...]]
    note: str
    fast: Callable[..., tuple[Tensor, ...]] | None = None

    def initial_state(self, *batch: int, K: int, V: int, M: int, like: Tensor | None = None) -> State:
        """Zeros of shape `[*batch, axes]`, and ones for the scale of the online-scaled rows."""
        like = torch.empty(0) if like is None else like
        shapes = {name: (*batch, *Input(axes).shape(K=K, V=V, M=M)) for name, axes in self.state.items()}
        return {name: like.new_full(s, 1.0 if name == "d" else 0.0) for name, s in shapes.items()}

    def step(self, state: State, inputs: Mapping[str, Tensor]) -> tuple[State, Tensor]:
        """One token.  `inputs` holds the token's inputs and the head's weights, `[*batch, axes]` each."""
        *new_state, o = self.function(**state, **inputs)
        return dict(zip(self.state, new_state)), o

    def scan(
        self,
        inputs: Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None = None,
        state: State | None = None,
        stepwise: bool = False,
    ) -> tuple[Tensor, State]:
        """All tokens.  Inputs are `[*batch, T, axes]`, weights broadcast over the batch.

        A row with a fast form uses it.  `stepwise` calls the step function for every token instead, which is
        slow but can be differentiated any number of times.

        Returns the outputs `[*batch, T, V]` and the last state, from which another scan continues.
        """
        weights = weights or {}
        if missing := (self.inputs.keys() | self.weights.keys()) - (inputs.keys() | weights.keys()):
            raise ValueError(f"{self.name} also needs {', '.join(sorted(missing))}")
        v = inputs["v"]
        if state is None:
            sizes = self._sizes(inputs, weights)
            state = self.initial_state(*v.shape[:-2], **sizes, like=v)
        if self.fast is not None and not stepwise:
            return self._scan_at_once(inputs, weights, state)
        outputs = []
        for t in range(v.shape[-2]):
            token = {name: x.select(-2, t) for name, x in inputs.items()}
            state, o = self.step(state, {**token, **weights})
            outputs.append(o)
        return torch.stack(outputs, -2) if outputs else torch.zeros_like(v), state

    def _scan_at_once(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], state: State
    ) -> tuple[Tensor, State]:
        """The fast form, in the operators' layout: the last batch dimension holds the heads."""
        assert self.fast is not None
        *batch, T, V = inputs["v"].shape
        B, H = torch.Size(batch[:-1]).numel(), batch[-1] if batch else 1
        transposed = self.state["S"] == "VK"
        arguments = {name: x.reshape(B, H, T, x.shape[-1]).transpose(1, 2) for name, x in inputs.items()}
        for name, x in weights.items():
            arguments[name] = x.expand(*batch, x.shape[-1]).reshape(B, 1, H, x.shape[-1])
        for name, x in state.items():
            x = x.mT if name == "S" and transposed else x
            arguments[name] = x.reshape(B, H, *x.shape[len(batch) :])
        *last, o = self.fast(**arguments)
        final_state = {}
        for name, x in zip(self.state, last):
            x = x.mT if name == "S" and transposed else x
            final_state[name] = x.reshape(*batch, *x.shape[2:])
        return o.transpose(1, 2).reshape(*batch, T, V), final_state

    def state_size(self, K: int, V: int, M: int) -> int:
        """How many numbers a head carries from one token to the next."""
        return sum(torch.Size(Input(axes).shape(K=K, V=V, M=M)).numel() for axes in self.state.values())

    @property
    def state_formula(self) -> str:
        """The state size as a formula, such as `VK + K`."""
        return " + ".join(
            axes if len(set(axes)) == len(axes) else f"{axes[0]}²" for axes in self.state.values()
        )

    @property
    def line(self) -> int:
        """Where the step function starts in its file."""
        return inspect.getsourcelines(self.function)[1]

    def _sizes(self, inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, int]:
        sizes = {"K": 1, "V": 1, "M": 1}
        for declared, tensors in ((self.inputs, inputs), (self.weights, weights)):
            for name, spec in declared.items():
                sizes.update(zip(spec.axes, tensors[name].shape[-len(spec.axes) :]))
        sizes.pop("1", None)
        return sizes
