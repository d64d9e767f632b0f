"""The online preconditioner's settings, and the few parameters that some of them have.

The scale itself is not a parameter: phase 1 computes it from the keys.  What can be learned is where it
starts and how much of it is kept at each token; everything else is a number handed to the operator, which
is why plain online scaling adds no parameter to a model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from osdn.layers.precision import widen
from osdn.ops import checks

RETENTIONS = ("learned", "learned_per_channel", "tied")
INITIAL_SCALES = ("projected", "free")
FIRST_RETENTION = 0.999  # where a learned retention starts


@dataclass(frozen=True)
class PreconditionerConfig:
    """What the online preconditioner does.

    Args:
        eta: step size of the online gradient.
        bounds: the box the scale is projected into after every token; None leaves it free.
        retention: what the scale keeps of itself at each token: None (all of it), a number in (0, 1],
            "learned" (a gate a token and head), "learned_per_channel" (and key channel), or "tied" (the decay
            of the layer's own state).
        initial_scale: None (ones), or a learned one: "projected" into the bounds, or "free" of them.
        beta_aware: whether the inner loss sees the write strength `beta`.
    """

    eta: float = 0.003
    bounds: tuple[float, float] | None = (0.5, 2.0)
    retention: float | str | None = None
    initial_scale: str | None = None
    beta_aware: bool = True

    def __post_init__(self) -> None:
        checks.scaling(self.eta, self.bounds, self.beta_aware, eps=1e-6)
        if self.bounds is not None:
            object.__setattr__(self, "bounds", tuple(self.bounds))
        if isinstance(self.retention, str):
            if self.retention not in RETENTIONS:
                raise ValueError(
                    f"retention is {self.retention!r}; it must be None, a number or one of {RETENTIONS}"
                )
        elif self.retention is not None and not 0 < checks.number("retention", self.retention) <= 1:
            raise ValueError(f"retention is {self.retention}; as a constant it must be in (0, 1]")
        if self.initial_scale not in (None, *INITIAL_SCALES):
            raise ValueError(
                f"initial_scale is {self.initial_scale!r}; it must be None or one of {INITIAL_SCALES}"
            )
        if self.initial_scale == "projected" and self.bounds is None:
            raise ValueError(
                'initial_scale="projected" needs bounds to project into; without them use "free"'
            )

    @classmethod
    def of(cls, settings: "PreconditionerConfig | Mapping[str, Any]") -> "PreconditionerConfig":
        """The settings as this class; a mapping may name any of the fields."""
        if isinstance(settings, cls):
            return settings
        if not isinstance(settings, Mapping):
            raise TypeError(f"preconditioner must be None or a dictionary, got {type(settings).__name__}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(settings) - set(known)):
            raise ValueError(f"preconditioner has no setting {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**settings)


class Retention(nn.Linear):
    """A learned retention before its sigmoid; it starts at 0.999 for every token, whatever the input."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(FIRST_RETENTION / (1 - FIRST_RETENTION)))


class Preconditioner(nn.Module):
    """The arguments of phase 1 for a mixer with `num_heads` value heads and keys of `head_k_dim` channels."""

    retention: Retention | None
    log_scale: nn.Parameter | None

    def __init__(
        self, config: PreconditionerConfig, hidden_size: int, num_heads: int, head_k_dim: int, has_decay: bool
    ) -> None:
        super().__init__()
        if config.retention == "tied" and not has_decay:
            raise ValueError('retention="tied" needs a layer whose state decays; DeltaNet\'s does not')
        self.config = config
        self.head_shape = (num_heads, head_k_dim)
        self.retention = self.log_scale = None
        if config.retention in ("learned", "learned_per_channel"):
            per_head = head_k_dim if config.retention == "learned_per_channel" else 1
            self.retention = Retention(hidden_size, num_heads * per_head)
        if config.initial_scale is not None:
            self.log_scale = nn.Parameter(torch.empty(self.head_shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A learned initial scale starts at one."""
        if self.log_scale is not None:
            nn.init.zeros_(self.log_scale)

    def forward(self, x: Tensor, log_decay: Tensor | None, scale: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of `online_scaled_delta_rule`.

        Args:
            x: the layer's input `[B, T, D]`.
            log_decay: the decay of the layer's state, `[B, T, HV]` or `[B, T, HV, K]`.
            scale: the scale `[N, HV, K]` to continue from; None starts anew.
        """
        config = self.config
        retention: float | str | Tensor | None = config.retention
        if self.retention is not None:  # in bfloat16 a retention above 0.998 would round to 1
            retention = widen(self.retention(x)).sigmoid()
            if config.retention == "learned_per_channel":
                retention = retention.unflatten(-1, self.head_shape)
        elif config.retention == "tied":
            assert log_decay is not None  # the constructor saw to it
            retention = log_decay.exp()
        return {
            "eta": config.eta,
            "bounds": config.bounds,
            "beta_aware": config.beta_aware,
            "retention": retention,
            "initial_scale": self.initial_scale() if scale is None else scale,
        }

    def initial_scale(self) -> Tensor | None:
        """`[HV, K]`, or None where the scale starts at one."""
        if self.log_scale is None:
            return None
        scale = widen(self.log_scale).exp()
        if self.config.initial_scale == "projected":
            assert self.config.bounds is not None  # checked with the settings
            scale = scale.clamp(*self.config.bounds)
        return scale

    def extra_repr(self) -> str:
        return ", ".join(f"{field.name}={getattr(self.config, field.name)}" for field in fields(self.config))
