"""The token mixers: DeltaNet, Gated DeltaNet and Kimi Delta Attention, with or without online scaling.

They are one layer.  `TokenMixer` projects, convolves, normalises, runs the recurrence and keeps its state; a
mixer adds only how its state decays and how its output is read.  `operator_inputs` computes what the
recurrence is called with, and the submodule `recurrence` calls it: a hook there sees exactly what the layer
computed with.  Parameters are named and shaped as in flash-linear-attention, so that weights move between the
two.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdn.layers import decoding
from osdn.layers.convolution import ShortConvolution
from osdn.layers.linear import Linear
from osdn.layers.precision import GatedRMSNorm, l2_normalize, widen
from osdn.layers.preconditioner import (
    OPERATORS,
    NewtonConfig,
    NewtonPreconditioner,
    PGDNConfig,
    PGDNPreconditioner,
    Preconditioner,
    Settings,
    first_decay,
    for_strength,
    set_values,
)
from osdn.layers.updates import check_update, make_update
from osdn.ops import checks, delta_rule
from osdn.ops.cpu.convolution import usable
from osdn.ops.cpu.decay import log_decay
from osdn.ops.operators import check_backend


class MixerState(NamedTuple):
    """All that a mixer remembers of N sequences: hand it back to continue them."""

    recurrent: Tensor  # [N, HV, K, V]
    scale: (
        Tensor | None
    )  # what the preconditioner carries, [N, HV, K] or [N, HV, K / b, b, b]; None without one
    q_tail: Tensor  # [N, W - 1, H * K], the last inputs of the convolutions
    k_tail: Tensor  # [N, W - 1, H * K]
    v_tail: Tensor  # [N, W - 1, HV * V]

    def map(self, function: Callable[[Tensor], Tensor]) -> "MixerState":
        """Of every tensor its image."""
        states: list[Any] = [None if x is None else function(x) for x in self]
        return MixerState(*states)


class OperatorInputs(NamedTuple):
    """What a mixer calls its recurrence with."""

    q: Tensor  # [B, T, H, K], normalised
    k: Tensor  # [B, T, H, K], normalised
    v: Tensor  # [B, T, HV, V]
    beta: Tensor  # [B, T, HV]
    log_decay: Tensor | None  # [B, T, HV] or [B, T, HV, K]
    preconditioner: dict[str, Any] | None  # arguments of phase 1; None is the plain delta rule
    initial_state: Tensor | None  # [N, HV, K, V]
    cu_seqlens: Tensor | None  # [N + 1]
    write_keys: Tensor | None = None  # [B, T, HV, K], of an update without phase 1; None is `k`
    rule: str = "hypergradient"  # of phase 1, whose arguments are in `preconditioner`


def write_keys(inputs: OperatorInputs, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """What a mixer writes with, `[B, T, HV, K]`, and what its preconditioner carries after the last token."""
    if inputs.write_keys is not None:
        return inputs.write_keys, None
    if inputs.preconditioner is None:
        return inputs.k.repeat_interleave(inputs.v.shape[2] // inputs.k.shape[2], 2), None
    arguments = dict(inputs.preconditioner)
    gate = arguments.pop("gain", inputs.beta)  # PGDN's phase 1 sees a gate of its own
    phase1 = OPERATORS[inputs.rule][0]
    return phase1(inputs.k, gate, **arguments, cu_seqlens=inputs.cu_seqlens, backend=backend)


class Recurrence(nn.Module):
    """Calls the operator; a module without parameters, so that hooks can see its inputs and outputs."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        check_backend(backend)
        self.backend = backend

    def forward(
        self, inputs: OperatorInputs, output_final_state: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The outputs `[B, T, HV, V]`, the final state and what the preconditioner carries on."""
        q, k, v, beta, log_decay, preconditioner, initial_state, cu_seqlens, write_keys, rule = inputs
        shared: dict[str, Any] = {
            "log_decay": log_decay,
            "initial_state": initial_state,
            "output_final_state": output_final_state,
            "cu_seqlens": cu_seqlens,
            "backend": self.backend,
        }
        if preconditioner is None:
            return *delta_rule(q, k, v, beta, write_keys=write_keys, **shared), None
        return OPERATORS[rule][1](q, k, v, beta, **preconditioner, **shared)


class WriteGate(Linear):
    """The write strengths before their sigmoid; with `start`, a learned bias begins there."""

    def __init__(self, hidden_size: int, num_heads: int, start: float | None) -> None:
        self.start = None if start is None else checks.number("beta_bias", start)
        super().__init__(hidden_size, num_heads, bias=start is not None)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_bias()

    def reset_bias(self) -> None:
        if self.start is not None:
            nn.init.constant_(self.bias, self.start)


class TokenMixer(nn.Module):
    """What the mixers share.

    Args:
        hidden_size: width of the inputs and outputs.
        num_heads: heads of the queries and keys.
        head_k_dim, head_v_dim: channels of a key and of a value.
        num_v_heads: heads of the values, a multiple of `num_heads`; None is `num_heads`.
        conv_size: width of the short convolutions.
        norm_eps: epsilon of the output norm.
        preconditioner: settings of the online preconditioner; None is the plain delta rule.
        beta_bias: where a learned bias of the write gate starts; None is a gate without one, as in
            flash-linear-attention, which starts at a write strength of a half.
        write_scale: a constant factor of every write strength; for the plain delta rule the same as writing
            with keys of that length.
        allow_neg_eigval: whether write strengths reach 2 instead of 1, so that a write can reverse the sign
            of what is stored under its key; the box of the scale then ends at 1 (see `for_strength`).
        update_rule: another update than the plain delta rule, by its name: "longhorn", "efla", "kaczmarz",
            "comba", "gdn2" or "product-2"; None is the plain one.
        backend: which implementation of the operators to use.
    """

    has_decay = False
    fuses = False  # whether its gate layers are all that `log_decay` and `read_out` call
    output_gate: str | None = None  # the activation of a gate on the output
    rates: tuple[float, float] = (0, 16)  # a decay's exp(A_log) starts as a uniform draw from this range
    preconditioner: Preconditioner | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        *,
        num_v_heads: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        preconditioner: Settings | Mapping[str, Any] | None = None,
        beta_bias: float | None = None,
        write_scale: float = 1.0,
        allow_neg_eigval: bool = False,
        update_rule: str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        checks.flag("allow_neg_eigval", allow_neg_eigval)
        self.strongest = 2.0 if allow_neg_eigval else 1.0
        self.write_scale = checks.number("write_scale", write_scale, 0)
        check_update(update_rule, preconditioner)
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        for name in ("hidden_size", "num_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_size"):
            checks.size(name, locals()[name])
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        if self.num_v_heads % num_heads:
            raise ValueError(f"num_v_heads is {num_v_heads}; it must be a multiple of num_heads, {num_heads}")
        self.update = make_update(update_rule, num_v_heads, head_k_dim, head_v_dim)
        self.writes = writes = 1 if self.update is None else self.update.writes
        gates = num_v_heads if self.update is None else self.update.gates
        key_dim, value_dim = num_heads * head_k_dim, self.num_v_heads * head_v_dim
        self.q_proj = Linear(hidden_size, key_dim, bias=False)
        self.k_proj = Linear(hidden_size, writes * key_dim, bias=False)
        self.v_proj = Linear(hidden_size, writes * value_dim, bias=False)
        self.b_proj = WriteGate(hidden_size, gates, beta_bias)
        self.q_conv1d = ShortConvolution(key_dim, conv_size)
        self.k_conv1d = ShortConvolution(writes * key_dim, conv_size)
        self.v_conv1d = ShortConvolution(writes * value_dim, conv_size)
        self.recurrence = Recurrence(backend)
        self.o_norm = GatedRMSNorm(head_v_dim, norm_eps, self.output_gate)
        self.o_proj = Linear(value_dim, hidden_size, bias=False)
        self.preconditioner = None
        if preconditioner is not None:
            self.preconditioner = self._preconditioner(for_strength(preconditioner, self.strongest))

    def _preconditioner(self, settings: Settings) -> Preconditioner:
        sizes = (self.hidden_size, self.num_v_heads, self.head_k_dim)
        if isinstance(settings, NewtonConfig):
            return NewtonPreconditioner(settings, *sizes, self.has_decay)
        if isinstance(settings, PGDNConfig):
            return PGDNPreconditioner(settings, *sizes, self.num_heads, self.rates)
        return Preconditioner(settings, *sizes, self.has_decay)

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool | None = None,
        overwrite_state: bool = False,
    ) -> tuple[Tensor, MixerState | None]:
        """Mix the tokens of `x` `[B, T, D]`, causally.

        Args:
            x: the inputs; the caller normalises them.
            state: what an earlier call returned for these sequences; None starts them.
            cu_seqlens: `[N + 1]` boundaries of N sequences packed into one row (B is 1).
            output_final_state: whether to return the state that continues the sequences; None does if one
                was given.
            overwrite_state: whether the state's tensors may be written over, which saves a copy of it when
                decoding; only the state that is returned is then valid.

        Returns:
            the outputs `[B, T, D]`, and the state or None.
        """
        if output_final_state is None:
            output_final_state = state is not None
        if state is not None and output_final_state and decoding.fused(self, x, cu_seqlens):
            return decoding.step(self, x, state, overwrite_state)
        inputs, tails = self.operator_inputs(x, state, cu_seqlens, output_final_state)
        o, recurrent, scale = self.recurrence(inputs, output_final_state)
        if self.update is not None:
            o = self.update.outputs(o)
        y = self.o_proj(self.read_out(o, x).flatten(-2))
        if not output_final_state:
            return y, None
        return y, MixerState(recurrent, scale, *tails)

    def operator_inputs(
        self,
        x: Tensor,
        state: MixerState | None = None,
        cu_seqlens: Tensor | None = None,
        output_tails: bool = False,
    ) -> tuple[OperatorInputs, list[Any]]:
        """What the recurrence is called with for `x` `[B, T, D]`, and the last inputs of the convolutions.

        The arguments are those of `forward`; the tails are None unless asked for.

        >>> mixer = DeltaNet(64, num_heads=2, head_k_dim=32, head_v_dim=32)
        >>> inputs, _ = mixer.operator_inputs(torch.ones(1, 5, 64))
        >>> inputs.k.shape, inputs.beta.shape
        (torch.Size([1, 5, 2, 32]), torch.Size([1, 5, 2]))
        """
        checks.dense("x", x, "[B, T, D]")
        if x.ndim != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(f"x has shape {list(x.shape)}; it must be [B, T, {self.hidden_size}]")
        N = checks.sequence_count(cu_seqlens, x.shape[0])
        if cu_seqlens is not None and not torch.compiler.is_compiling():
            checks.boundaries(cu_seqlens, x.shape[1])
        recurrent = scale = q_tail = k_tail = v_tail = None
        if state is not None:
            recurrent, scale, q_tail, k_tail, v_tail = self._checked(state, N)
        q, q_tail = self.q_conv1d(self.q_proj(x), q_tail, cu_seqlens, output_tails)
        k, k_tail = self.k_conv1d(self.k_proj(x), k_tail, cu_seqlens, output_tails)
        v, v_tail = self.v_conv1d(self.v_proj(x), v_tail, cu_seqlens, output_tails)
        q = l2_normalize(q.unflatten(-1, (self.num_heads, self.head_k_dim)))  # [B, T, H, K]
        k = k.unflatten(-1, (self.writes * self.num_heads, self.head_k_dim))
        if self.update is None or self.update.unit_keys:
            k = l2_normalize(k)
        v = v.unflatten(-1, (self.writes * self.num_v_heads, self.head_v_dim))  # [B, T, HV, V]
        beta = widen(self.b_proj(x)).sigmoid()  # [B, T, HV]
        if self.write_scale * self.strongest != 1:
            beta = self.write_scale * self.strongest * beta
        log_decay = self.log_decay(x)
        inputs = OperatorInputs(q, k, v, beta, log_decay, None, recurrent, cu_seqlens)
        if self.preconditioner is not None:
            arguments = self.preconditioner(x, log_decay, scale)
            inputs = inputs._replace(preconditioner=arguments, rule=self.preconditioner.config.rule)
        if self.update is not None:
            inputs = self.update(inputs)
        return inputs, [q_tail, k_tail, v_tail]

    def state_shapes(self, N: int) -> tuple[Any, ...]:
        """The shapes of a `MixerState` of N sequences, in its order; None for what this mixer lacks."""
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        recurrent = (N, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        scale = None if self.preconditioner is None else (N, *self.preconditioner.state_shape)
        return recurrent, scale, *((N, conv.kernel_size[0] - 1, conv.in_channels) for conv in convolutions)

    def _checked(self, state: MixerState, N: int) -> MixerState:
        """The state, if it is one of N sequences of this mixer."""
        if not isinstance(state, tuple) or len(state) != len(MixerState._fields):
            raise ValueError(f"state is a {type(state).__name__}; it must be what an earlier call returned")
        for name, x, shape in zip(MixerState._fields, state, self.state_shapes(N)):
            actual = None if x is None else tuple(x.shape)
            if actual != shape:
                raise ValueError(
                    f"state.{name} has shape {actual}; for {N} sequences of this mixer it must be {shape}"
                )
        return MixerState(*state)

    def log_decay(self, x: Tensor) -> Tensor | None:
        """The logarithm of what the state keeps of itself at each token; None keeps it all."""
        return None

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:  # [B, T, HV, V], [B, T, D]
        return self.o_norm(o)

    def gate_layers(self) -> tuple[nn.Module, ...]:
        """The layers of the decay and of the output gate that read the mixer's input."""
        return ()

    def inner_gate_layers(self) -> tuple[nn.Module, ...]:
        """The layers that read the outputs of `gate_layers`, if there are any."""
        return ()


class DeltaNet(TokenMixer):
    """DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2406.06484); with a preconditioner, OSDN.

    >>> y, _ = DeltaNet(64, num_heads=2, head_k_dim=32, head_v_dim=32)(torch.randn(1, 5, 64))
    >>> y.shape
    torch.Size([1, 5, 64])
    """

    fuses = True


class DecayingMixer(TokenMixer):
    """A mixer whose state decays by `exp(-exp(A_log) * softplus(f(x) + dt_bias))`, as in Mamba 2.

    `A_log` has one entry per head, `dt_bias` one for each output of the projection `f`.
    """

    has_decay = True
    A_log: nn.Parameter  # [HV]
    dt_bias: nn.Parameter  # [HV] or [HV * K]

    def _add_decay_parameters(self, steps: int) -> None:
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(steps))
        set_values((self.A_log, self.dt_bias), self.initial_decay())

    def initial_decay(self) -> tuple[Tensor, Tensor]:
        """Fresh values of `A_log` and `dt_bias`."""
        return first_decay(self.A_log.shape, self.dt_bias.shape, self.rates)

    def _decay(self, f: Tensor, bound: float | None = None) -> Tensor:  # [B, T, HV * n] -> [B, T, HV, n]
        rate = widen(self.A_log).exp()
        if usable(f):
            every = rate.repeat_interleave(f.shape[-1] // len(rate))
            return log_decay(f, every, self.dt_bias, bound).unflatten(-1, (self.num_v_heads, -1))
        steps = (widen(f) + self.dt_bias).unflatten(-1, (self.num_v_heads, -1))
        if bound is not None:
            return bound * (rate[:, None] * steps).sigmoid()
        return -rate[:, None] * F.softplus(steps)


GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}  # by their names in flash-linear-attention


class GatedDeltaNet(DecayingMixer):
    """Gated DeltaNet (Yang et al. 2025, https://arxiv.org/abs/2412.06464); with a preconditioner, OSGDN.

    Its state decays by one number per token and head, and its output is gated, by SiLU ("swish" or "silu") or
    by a "sigmoid".
    """

    fuses = True

    def __init__(
        self, hidden_size: int, *args: Any, output_gate_activation: str = "swish", **kwargs: Any
    ) -> None:
        if output_gate_activation not in GATES:
            raise ValueError(
                f"output_gate_activation is {output_gate_activation!r}; it must be one of {', '.join(GATES)}"
            )
        self.output_gate = GATES[output_gate_activation]
        super().__init__(hidden_size, *args, **kwargs)
        self.a_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.g_proj = Linear(hidden_size, self.o_proj.in_features, bias=False)
        self._add_decay_parameters(self.num_v_heads)

    def log_decay(self, x: Tensor) -> Tensor:
        return self._decay(self.a_proj(x)).squeeze(-1)  # [B, T, HV]

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_norm(o, self.g_proj(x).unflatten(-1, o.shape[2:]))

    def gate_layers(self) -> tuple[nn.Module, ...]:
        return self.a_proj, self.g_proj


class KimiDeltaAttention(DecayingMixer):
    """Kimi Delta Attention (Kimi Team 2025, https://arxiv.org/abs/2510.26692); with a preconditioner, OSKDA.

    Its state decays by one number per token, value head and key channel; decay and output gate have low rank.
    With `decay_lower_bound` L, below 0, its logarithm is `L * sigmoid(exp(A_log) * (f(x) + dt_bias))`,
    between L and 0 (`lower_bound` in flash-linear-attention).
    """

    output_gate = "sigmoid"
    rates = (1, 16)
    fuses = True

    def __init__(
        self, hidden_size: int, *args: Any, decay_lower_bound: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, *args, **kwargs)
        self.decay_lower_bound = check_lower_bound(decay_lower_bound)
        self.fuses = decay_lower_bound is None
        rank, value_dim, decays = (
            self.head_v_dim,
            self.o_proj.in_features,
            self.num_v_heads * self.head_k_dim,
        )
        self.f_proj = nn.Sequential(Linear(hidden_size, rank, bias=False), Linear(rank, decays, bias=False))
        self.g_proj = nn.Sequential(Linear(hidden_size, rank, bias=False), Linear(rank, value_dim))
        self._add_decay_parameters(decays)

    def initial_decay(self) -> tuple[Tensor, Tensor]:
        A_log, dt_bias = super().initial_decay()
        return (A_log if self.decay_lower_bound is None else torch.zeros_like(A_log)), dt_bias

    def log_decay(self, x: Tensor) -> Tensor:
        return self._decay(self.f_proj(x), self.decay_lower_bound)  # [B, T, HV, K]

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_norm(o, self.g_proj(x).unflatten(-1, o.shape[2:]))

    def gate_layers(self) -> tuple[nn.Module, ...]:
        return self.f_proj[0], self.g_proj[0]

    def inner_gate_layers(self) -> tuple[nn.Module, ...]:
        return self.f_proj[1], self.g_proj[1]


def check_lower_bound(x: float | None) -> float | None:
    """A `decay_lower_bound` that can be."""
    if x is not None and not checks.number("decay_lower_bound", x) < 0:
        raise ValueError(f"decay_lower_bound is {x}; it must be below 0, being the logarithm of a decay")
    return x
