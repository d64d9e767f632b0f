"""Any row of the taxonomy as a token mixer, `[B, T, D] -> [B, T, D]`.

Each input of the row comes from a projection; a short convolution lets queries, keys and values see the
preceding tokens; and the input's domain (a gate, a unit vector, a simplex) constrains the result.  Nothing
here is specific to a row, so comparisons between rows are fair.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osdn.zoo.recurrence import DOMAINS, Input
from osdn.zoo.recurrences import RECURRENCES

CONVOLVED = ("q", "k", "v", "k2", "v2")


class RecurrentMixer(nn.Module):
    """The row called `name`, with its own projections, as a causal layer.

    Args:
        name: a key of `RECURRENCES`.
        hidden_size: D, the width of the tokens.
        num_heads: how many recurrences run side by side.
        head_k_dim, head_v_dim: K and V of a head; None divides D by the number of heads.
        num_slots: M, for rows whose state consists of slots.
        conv_size: how many tokens the short convolutions see.
        stepwise: call the step function for every token, even if the row has a fast form.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        num_heads: int = 1,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        num_slots: int = 64,
        conv_size: int = 4,
        stepwise: bool = False,
    ) -> None:
        super().__init__()
        if name not in RECURRENCES:
            raise ValueError(f"there is no row {name!r}; the rows are {', '.join(RECURRENCES)}")
        K, V = head_k_dim or hidden_size // num_heads, head_v_dim or hidden_size // num_heads
        self.recurrence = RECURRENCES[name]
        self.num_heads, self.stepwise = num_heads, stepwise
        self.sizes = {"K": K, "V": V, "M": num_slots}
        widths = {x: num_heads * self._width(spec) for x, spec in self.recurrence.inputs.items()}
        self.projections = nn.ModuleDict(
            {x: nn.Linear(hidden_size, width, bias=x not in CONVOLVED) for x, width in widths.items()}
        )
        self.convolutions = nn.ModuleDict(
            {
                x: nn.Conv1d(width, width, conv_size, groups=width, padding=conv_size - 1, bias=False)
                for x, width in widths.items()
                if x in CONVOLVED
            }
        )
        self.weights = nn.ParameterDict(
            {
                x: torch.randn(num_heads, *spec.shape(**self.sizes))
                for x, spec in self.recurrence.weights.items()
            }
        )
        self.norm = nn.RMSNorm(V, eps=1e-6)
        self.o_proj = nn.Linear(num_heads * V, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inputs = {name: self._input(name, spec, x) for name, spec in self.recurrence.inputs.items()}
        weights = {
            name: DOMAINS[spec.domain](self.weights[name]) for name, spec in self.recurrence.weights.items()
        }
        o, _ = self.recurrence.scan(inputs, weights, stepwise=self.stepwise)  # [B, H, T, V]
        return self.o_proj(self.norm(o).transpose(1, 2).flatten(2))

    @property
    def state_size(self) -> int:
        """How many numbers the layer carries from token to token, not counting the convolutions' tails."""
        return self.num_heads * self.recurrence.state_size(**self.sizes)

    def extra_repr(self) -> str:
        return f"{self.recurrence.name}, heads={self.num_heads}, {self.sizes}"

    def _width(self, spec: Input) -> int:
        return torch.Size(spec.shape(**self.sizes)).numel()

    def _input(self, name: str, spec: Input, x: Tensor) -> Tensor:
        y = self.projections[name](x)  # [B, T, H * width]
        if name in self.convolutions:
            y = F.silu(self.convolutions[name](y.mT)[..., : x.shape[1]].mT)
        y = y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, width]
        return DOMAINS[spec.domain](y)
