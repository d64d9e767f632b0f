"""Updates of the state that compete with the plain delta rule, each as one call of it with other arguments.

`delta_rule` decays the state, reads with one key, corrects a share of the error and writes with another key.
That is enough for a step that follows from the key's length (Longhorn, EFLA, Kaczmarz), for a read that
differs from the write (Comba, Gated DeltaNet-2), and for several writes per token (DeltaProduct).  Formulas
and citations are in docs/models.md; `osdn.zoo` holds every one of them as a step function, against which
these are tested.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdn.layers.precision import widen

if TYPE_CHECKING:
    from osdn.layers.mixers import OperatorInputs

EPS = 1e-6  # of a squared length, as where keys are normalised
SMALL = 0.01  # below it a series is more exact than the quotient it stands for
# Comba's read undoes the decay.  Below this logarithm nothing of a state is left to be read.
LEAST_LOG_DECAY = -60.0


def longhorn_step(beta: Tensor, n: Tensor) -> Tensor:
    """What minimises `|S - S'|^2 + beta |S k - v|^2`, for keys of squared length n."""
    return beta / (1 + beta * n)


def efla_step(beta: Tensor, n: Tensor) -> Tensor:
    """`(1 - exp(-beta n)) / n`: the delta rule as a differential equation, solved over a time beta."""
    x = beta * n
    near = x < SMALL
    away = torch.where(near, torch.ones_like(x), x)
    series = 1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5)))
    return beta * torch.where(near, series, -torch.expm1(-away) / away)


def kaczmarz_step(beta: Tensor, n: Tensor) -> Tensor:
    """The share beta of the way to the nearest state that is right about this token."""
    return beta / (n + EPS)


def undo_decay(k: Tensor, log_decay: Tensor, least: float = LEAST_LOG_DECAY) -> tuple[Tensor, Tensor]:
    """Keys that read from the decayed state what `k` would read from it before, and the decay to use.

    `[B, T, HV, K]` and `[B, T, HV]` or `[B, T, HV, K]`.  A decayed state has the same relative precision, so
    that dividing by one token's decay loses nothing.  Decays are at least `exp(least)`.
    """
    log_decay = log_decay.clamp_min(least)
    per_channel = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    return k * torch.exp(-per_channel), log_decay


def in_a_row(x: Tensor, writes: int) -> Tensor:
    """Several sets of heads per token as that many tokens: `[B, T, n H, ...] -> [B, T n, H, ...]`."""
    return x.unflatten(2, (writes, -1)).flatten(1, 2)


def among_writes(x: Tensor, writes: int, last: bool) -> Tensor:
    """What a token has once, at the first or last of its writes, with zeros at the others."""
    x = x.unsqueeze(2)
    place = (writes - 1, 0) if last else (0, writes - 1)
    return F.pad(x, (0, 0) * (x.ndim - 3) + place).flatten(1, 2)


class Update(nn.Module):
    """What a mixer calls `delta_rule` with.

    Calling it turns the operator inputs of the plain rule into those of this one.  Where a token is written
    several times, the mixer's keys, values and gates arrive as that many sets of heads.
    """

    name = ""  # as in `update_rule`
    unit_keys = True  # whether the mixer scales keys to length one
    writes = 1  # per token
    # What can be said of its writes; `osdn.lab.residual` has the words.
    measured: ClassVar[tuple[str, ...]] = ("beta", "key_scale", "decay", "q_geo")

    def __init__(self, num_heads: int, head_k_dim: int, head_v_dim: int) -> None:
        super().__init__()
        self.sizes = (num_heads, head_k_dim, head_v_dim)
        self.reset_parameters()

    @property
    def gates(self) -> int:
        """Outputs of the mixer's write gate."""
        return self.writes * self.sizes[0]

    def reset_parameters(self) -> None:
        """Where parameters start; most updates have none."""

    def forward(self, inputs: "OperatorInputs") -> "OperatorInputs":
        raise NotImplementedError

    def outputs(self, o: Tensor) -> Tensor:
        """One output per token, of those of the operator."""
        return o if self.writes == 1 else o[:, self.writes - 1 :: self.writes]


class StepOfLength(Update):
    """A write strength that follows from the gate and from the length of the key, which is therefore kept."""

    unit_keys = False

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], *sizes: int) -> None:
        super().__init__(*sizes)
        self.step = step

    def forward(self, inputs: "OperatorInputs") -> "OperatorInputs":
        n = widen(inputs.k).square().sum(-1)  # [B, T, H]
        n = _per_value_head(n, self.sizes[0])
        return inputs._replace(beta=self.step(inputs.beta, n))

    def extra_repr(self) -> str:
        return self.step.__name__


class Comba(Update):
    """`S = a S + k beta (v - b S'k)'`, read by `q - c k`: the error is that of the state before its decay."""

    measured = ("beta", "decay")  # its write contracts no error: the state that it reads is not that it keeps

    def reset_parameters(self) -> None:
        heads = self.sizes[0]
        if not hasattr(self, "feedback"):
            self.feedback = nn.Parameter(torch.empty(heads))  # b before its sigmoid
            self.correction = nn.Parameter(torch.empty(heads))  # c
        nn.init.ones_(self.feedback)
        nn.init.constant_(self.correction, 0.02)

    def forward(self, inputs: "OperatorInputs") -> "OperatorInputs":
        dtype = inputs.k.dtype
        q, k = (widen(_per_value_head(x, self.sizes[0])) for x in (inputs.q, inputs.k))
        read, log_decay = widen(self.feedback).sigmoid()[:, None] * k, inputs.log_decay
        if log_decay is not None:
            # float16 ends at 65,504; a decay to 5e-5 leaves nothing that it could tell from zero
            least = -10.0 if dtype == torch.float16 else LEAST_LOG_DECAY
            read, log_decay = undo_decay(read, log_decay, least)
        q = q - widen(self.correction)[:, None] * k
        return inputs._replace(q=q.to(dtype), k=read.to(dtype), write_keys=k.to(dtype), log_decay=log_decay)


class GatedDeltaNet2(Update):
    """`S = S + k (w * v - S'(b * k))'`: one gate per key channel erases, one per value channel writes."""

    measured = ("decay", "q_geo")  # it has no single write strength

    @property
    def gates(self) -> int:
        heads, K, V = self.sizes
        return heads * (K + V)

    def forward(self, inputs: "OperatorInputs") -> "OperatorInputs":
        heads, K, V = self.sizes
        erase, write = inputs.beta.split([heads * K, heads * V], -1)
        q, k = (_per_value_head(x, heads) for x in (inputs.q, inputs.k))
        read = erase.unflatten(-1, (heads, K)) * k
        v = write.unflatten(-1, (heads, V)) * inputs.v
        ones = torch.ones_like(erase[..., :heads])
        return inputs._replace(q=q, k=read.to(k.dtype), v=v.to(k.dtype), beta=ones, write_keys=k)


class DeltaProduct(Update):
    """Several writes per token, each with a key, a value and a gate of its own; the state decays once."""

    def __init__(self, writes: int, *sizes: int) -> None:
        super().__init__(*sizes)
        self.writes = writes

    def forward(self, inputs: "OperatorInputs") -> "OperatorInputs":
        n, decay, cuts = self.writes, inputs.log_decay, inputs.cu_seqlens
        return inputs._replace(
            q=among_writes(inputs.q, n, last=True),
            k=in_a_row(inputs.k, n),
            v=in_a_row(inputs.v, n),
            beta=in_a_row(inputs.beta, n),
            log_decay=None if decay is None else among_writes(decay, n, last=False),
            cu_seqlens=None if cuts is None else cuts * n,
        )

    def extra_repr(self) -> str:
        return f"writes={self.writes}"


STEPS = {"longhorn": longhorn_step, "efla": efla_step, "kaczmarz": kaczmarz_step}
KEYS: dict[str, type[Update]] = {"comba": Comba, "gdn2": GatedDeltaNet2}
PRODUCT = "product-"  # and the number of writes per token
UPDATES = (*STEPS, *KEYS, f"{PRODUCT}2")


def check_update(name: Any, preconditioner: Any = None) -> None:
    """Reject unknown updates, and an update together with a preconditioner."""
    if name is None:
        return
    known = isinstance(name, str) and (name in UPDATES or _writes(name) is not None)
    if not known:
        raise ValueError(
            f"update_rule is {name!r}; it must be None, the plain delta rule, or one of {', '.join(UPDATES)} "
            f"(or another number of writes per token, from 2 to 9)"
        )
    if preconditioner is not None:
        raise ValueError(
            f"update_rule is {name!r}, and there is a preconditioner; it preconditions the plain delta rule: "
            f"set one of them to None"
        )


def make_update(name: str | None, num_heads: int, head_k_dim: int, head_v_dim: int) -> Update | None:
    """The update of that name; None is the plain delta rule."""
    if name is None:
        return None
    sizes = (num_heads, head_k_dim, head_v_dim)
    if name in STEPS:
        update: Update = StepOfLength(STEPS[name], *sizes)
    elif name in KEYS:
        update = KEYS[name](*sizes)
    else:
        writes = _writes(name)
        assert writes is not None  # `check_update` has checked the name
        update = DeltaProduct(writes, *sizes)
    update.name = name
    return update


def _writes(name: str) -> int | None:
    number = name.removeprefix(PRODUCT)
    return int(number) if name.startswith(PRODUCT) and number in tuple("23456789") else None


def _per_value_head(x: Tensor, heads: int) -> Tensor:
    """`[B, T, H, ...]` repeated to one copy per value head."""
    groups = heads // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, 2)
