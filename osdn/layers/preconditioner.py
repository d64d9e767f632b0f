"""The preconditioners' settings, and the few parameters that some of them have.

What a preconditioner carries from token to token (a scale, a covariance, a Gram diagonal) is not a parameter:
phase 1 computes it from the keys.  What can be learned is where it starts and how much of it is kept at each
token; everything else is a number handed to the operator, which is why plain online scaling and Newton's
method add no parameter to a model.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdn import ops
from osdn.layers.linear import Linear
from osdn.layers.precision import widen
from osdn.ops import checks

# The rules of phase 1: the operator of phase 1 alone, and that of both phases.
OPERATORS: dict[str, tuple[Any, Any]] = {
    "hypergradient": (ops.precondition_keys, ops.online_scaled_delta_rule),
    "newton": (ops.newton_keys, ops.newton_delta_rule),
    "pgdn": (ops.pgdn_keys, ops.pgdn_delta_rule),
}
RETENTIONS = ("learned", "learned_per_channel", "tied")
INITIAL_SCALES = ("projected", "free")
FIRST_RETENTION = 0.999  # where a learned retention starts


def _check_retention(retention: Any, learned: tuple[str, ...]) -> None:
    if isinstance(retention, str):
        if retention not in learned:
            raise ValueError(f"retention is {retention!r}; it must be None, a number or one of {learned}")
    elif retention is not None and not 0 < checks.number("retention", retention) <= 1:
        raise ValueError(f"retention is {retention}; as a constant it must be in (0, 1]")


@dataclass(frozen=True)
class PreconditionerConfig:
    """What the online preconditioner does.

    This class holds the settings of the paper's rule, `NewtonConfig` and `PGDNConfig` those of the others.
    `of` finds the right one for a dictionary that names its `rule`.

    Args:
        eta: step size of the online gradient.
        bounds: the box the scale is projected into after every token; None leaves it free.
        retention: what the scale keeps of itself at each token: None (all of it), a number in (0, 1],
            "learned" (a gate per token and head), "learned_per_channel" (and key channel), or "tied" (the
            decay of the layer's own state).
        initial_scale: None (ones), or a learned one: "projected" into the bounds, or "free" of them.
        beta_aware: whether the inner loss sees the write strength `beta`.
    """

    eta: float = 0.003
    bounds: tuple[float, float] | None = (0.5, 2.0)
    retention: float | str | None = None
    initial_scale: str | None = None
    beta_aware: bool = True
    rule: ClassVar[str] = "hypergradient"

    def __post_init__(self) -> None:
        checks.scaling(self.eta, self.bounds, self.beta_aware, eps=1e-6)
        if self.bounds is not None:
            object.__setattr__(self, "bounds", tuple(self.bounds))
        _check_retention(self.retention, RETENTIONS)
        if self.initial_scale not in (None, *INITIAL_SCALES):
            raise ValueError(
                f"initial_scale is {self.initial_scale!r}; it must be None or one of {INITIAL_SCALES}"
            )
        if self.initial_scale == "projected" and self.bounds is None:
            raise ValueError(
                'initial_scale="projected" needs bounds to project into; without them use "free"'
            )

    @staticmethod
    def of(settings: "Settings | Mapping[str, Any]") -> "Settings":
        """The settings of the rule that a mapping names, "hypergradient" unless it does."""
        if isinstance(settings, (PreconditionerConfig, NewtonConfig, PGDNConfig)):
            return settings
        if not isinstance(settings, Mapping):
            raise TypeError(f"preconditioner must be None or a dictionary, got {type(settings).__name__}")
        rule = settings.get("rule", PreconditionerConfig.rule)
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(RULES)}")
        known = [field.name for field in fields(RULES[rule])]
        if unknown := sorted(set(settings) - {"rule", *known}):
            of_rule = "" if rule == PreconditionerConfig.rule else f" of the rule {rule}"
            raise ValueError(
                f"preconditioner{of_rule} has no setting {', '.join(unknown)}; it has {', '.join(known)}"
            )
        return RULES[rule](**{name: x for name, x in settings.items() if name != "rule"})

    def to_dict(self) -> dict[str, Any]:
        """Every setting spelled out, so that a saved configuration does not depend on our defaults."""
        return asdict(self) | {"bounds": None if self.bounds is None else list(self.bounds)}


@dataclass(frozen=True)
class NewtonConfig:
    """Newton's method on blocks of the keys' covariance (`newton_keys`).

    Args:
        prior: the covariance starts at `prior` times the identity, and retention draws it back there.
        block_size: channels per block of the covariance; it divides those of a key.
        retention: what the covariance keeps of itself at each token: None (all of it), a number in (0, 1],
            "learned" (one gate per token and head) or "tied" (the decay of the layer's own state; of a block,
            the geometric mean of its channels' decays).
    """

    prior: float = 1.0
    block_size: int = 1
    retention: float | str | None = None
    rule: ClassVar[str] = "newton"

    def __post_init__(self) -> None:
        checks.newton(self.prior, self.block_size, 0)
        _check_retention(self.retention, ("learned", "tied"))

    def to_dict(self) -> dict[str, Any]:
        return {"rule": self.rule, **asdict(self)}


@dataclass(frozen=True)
class PGDNConfig:
    """The preconditioner of PGDN and PKDA (`pgdn_keys`); its gain and retention are learned gates of its own.

    Args:
        squash: write keys are between `k / squash` and `squash k`.
        center: where the learned center of each head starts.
        eps: added to the Gram diagonal before its logarithm.
    """

    squash: float = 1.5
    center: float = -0.2
    eps: float = 1e-6
    rule: ClassVar[str] = "pgdn"

    def __post_init__(self) -> None:
        checks.squash(self.squash, self.eps)
        checks.number("center", self.center)

    def to_dict(self) -> dict[str, Any]:
        return {"rule": self.rule, **asdict(self)}


Settings = PreconditionerConfig | NewtonConfig | PGDNConfig
RULES: dict[str, Any] = {x.rule: x for x in (PreconditionerConfig, NewtonConfig, PGDNConfig)}


def check_settings(settings: Settings, head_k_dim: int, has_decay: bool) -> None:
    """Whether a layer can have this preconditioner."""
    if getattr(settings, "retention", None) == "tied" and not has_decay:
        raise ValueError(
            'retention="tied" is tied to the decay of the state, and delta_net has none: it needs a layer '
            'whose state decays; use "learned" or a number'
        )
    if isinstance(settings, NewtonConfig) and head_k_dim % settings.block_size:
        raise ValueError(
            f"block_size is {settings.block_size}; it must divide the {head_k_dim} channels of a key"
        )


def for_strength(settings: Settings | Mapping[str, Any], strongest: float) -> Settings:
    """Settings for write strengths up to `strongest`, with a box that keeps every write stable.

    A write multiplies what is stored under its key by `1 - beta * <d, k²>`, which must stay in [-1, 1].  Keys
    have unit length, so `<d, k²>` is at most the upper bound of the box, and that times `strongest` must be
    at most 2.  For strengths up to 1 the usual box, up to 2, is just that; for strengths up to 2 it ends at
    1.  Newton's write keys satisfy it for any strength: `beta * <w, k>` is below 1.
    """
    if strongest > 1 and isinstance(settings, Mapping) and not settings.keys() & {"bounds", "rule"}:
        settings = {**settings, "bounds": (0.5, 2 / strongest)}
    config = PreconditionerConfig.of(settings)
    if isinstance(config, PreconditionerConfig) and strongest > 1:
        free = config.bounds is None or config.initial_scale == "free"
        if free or (config.bounds is not None and config.bounds[1] * strongest > 2):
            raise ValueError(
                f"write strengths reach {strongest:g}, so the scale must not exceed {2 / strongest:g}; "
                f"bounds is {config.bounds} and initial_scale {config.initial_scale!r}: change them"
            )
    return config


class Retention(Linear):
    """A learned retention before its sigmoid; it starts at 0.999 for every token, whatever the input."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(FIRST_RETENTION / (1 - FIRST_RETENTION)))


class Preconditioner(nn.Module):
    """The arguments of phase 1 for a mixer with `num_heads` value heads and keys of `head_k_dim` channels.

    Whatever the rule, `config` holds its settings, `state_shape` is the shape of what it carries for a
    sequence, and calling it gives the arguments of its operators.  This class is the paper's rule.
    """

    config: Settings
    retention: Retention | None
    log_scale: nn.Parameter | None

    def __init__(
        self, config: PreconditionerConfig, hidden_size: int, num_heads: int, head_k_dim: int, has_decay: bool
    ) -> None:
        super().__init__()
        check_settings(config, head_k_dim, has_decay)
        self.config = config
        self.state_shape: tuple[int, ...] = (num_heads, head_k_dim)
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
        assert isinstance(config, PreconditionerConfig)
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
        assert isinstance(self.config, PreconditionerConfig)
        if self.config.initial_scale == "projected":
            assert self.config.bounds is not None  # checked with the settings
            scale = scale.clamp(*self.config.bounds)
        return scale

    def extra_repr(self) -> str:
        return ", ".join(f"{field.name}={getattr(self.config, field.name)}" for field in fields(self.config))


class NewtonPreconditioner(Preconditioner):
    """The arguments of `newton_keys`."""

    def __init__(
        self, config: NewtonConfig, hidden_size: int, num_heads: int, head_k_dim: int, has_decay: bool
    ) -> None:
        nn.Module.__init__(self)
        check_settings(config, head_k_dim, has_decay)
        self.config = config
        b = config.block_size
        self.state_shape = (num_heads, head_k_dim // b, b, b)
        self.log_scale = None
        self.retention = Retention(hidden_size, num_heads) if config.retention == "learned" else None

    def forward(self, x: Tensor, log_decay: Tensor | None, covariance: Tensor | None) -> dict[str, Any]:
        config = self.config
        assert isinstance(config, NewtonConfig)
        retention: float | str | Tensor | None = config.retention
        if self.retention is not None:
            retention = widen(self.retention(x)).sigmoid()
        elif config.retention == "tied":
            assert log_decay is not None
            if log_decay.ndim == 4 and config.block_size > 1:
                log_decay = log_decay.unflatten(-1, (-1, config.block_size)).mean(-1)
            retention = log_decay.exp()
        return {
            "prior": config.prior,
            "block_size": config.block_size,
            "retention": retention,
            "initial_covariance": covariance,
        }


class PGDNPreconditioner(Preconditioner):
    """The arguments of `pgdn_keys`; its gates have one number per key head, as in flash-linear-attention."""

    def __init__(
        self,
        config: PGDNConfig,
        hidden_size: int,
        num_heads: int,
        head_k_dim: int,
        key_heads: int,
        rates: tuple[float, float],
    ) -> None:
        nn.Module.__init__(self)
        self.config, self.state_shape, self.rates = config, (num_heads, head_k_dim), rates
        self.log_scale = self.retention = None
        self.a_proj = nn.Linear(hidden_size, key_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, key_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(key_heads))
        self.dt_bias = nn.Parameter(torch.empty(key_heads))
        self.center = nn.Parameter(torch.full((key_heads,), float(config.center)))
        set_values((self.A_log, self.dt_bias), self.initial_decay())

    def initial_decay(self) -> tuple[Tensor, Tensor]:
        return first_decay(self.A_log.shape, self.dt_bias.shape, self.rates)

    def reset_parameters(self) -> None:
        assert isinstance(self.config, PGDNConfig)
        nn.init.constant_(self.center, self.config.center)

    def forward(self, x: Tensor, log_decay: Tensor | None, gram: Tensor | None) -> dict[str, Any]:
        assert isinstance(self.config, PGDNConfig)
        groups = self.state_shape[0] // len(self.center)

        def per_value_head(x: Tensor) -> Tensor:
            return x if groups == 1 else x.repeat_interleave(groups, -1)

        steps = F.softplus(widen(self.a_proj(x)) + self.dt_bias)
        return {
            "gain": per_value_head(widen(self.b_proj(x)).sigmoid()),
            "retention": per_value_head((-widen(self.A_log).exp() * steps).exp()),
            "center": per_value_head(widen(self.center)),
            "squash": self.config.squash,
            "eps": self.config.eps,
            "initial_gram": gram,
        }


def first_decay(A_log: torch.Size, dt_bias: torch.Size, rates: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Values of a decay's `A_log` and `dt_bias` to start from: log-uniform time steps from 0.001 to 0.1."""
    rate = torch.empty(A_log).uniform_(*rates).clamp_min(1e-6).log()
    dt = torch.empty(dt_bias).uniform_(math.log(0.001), math.log(0.1)).exp().clamp_min(1e-4)
    return rate, dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


@torch.no_grad()
def set_values(parameters: tuple[nn.Parameter, ...], values: tuple[Tensor, ...]) -> None:
    """Give parameters, which may be without memory, their first values."""
    for parameter, value in zip(parameters, values):
        parameter.copy_(value)
