"""A mixer's decoding step on a CPU: its projections, and all that lies between them in one compiled call."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from osdn.layers.convolution import ShortConvolution
from osdn.layers.linear import has_hooks, linears
from osdn.layers.precision import GatedRMSNorm
from osdn.layers.preconditioner import NewtonConfig, PreconditionerConfig
from osdn.ops.cpu.binding import readable, wide
from osdn.ops.cpu.decode_step import StepInputs, StepSettings, decode_step, usable

if TYPE_CHECKING:
    from osdn.layers.mixers import MixerState, TokenMixer


KNOWN_RULES = (PreconditionerConfig, NewtonConfig)  # of phase 1, that the compiled step has


def fused(mixer: "TokenMixer", x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether the compiled step gives what the mixer would: one token, no gradient, nobody looking inside."""
    if x.ndim != 3 or x.shape[1] != 1 or cu_seqlens is not None or not usable(x):
        return False
    return fusible(mixer, x.dtype) and not torch.is_autocast_enabled("cpu")


def fusible(mixer: "TokenMixer", dtype: torch.dtype) -> bool:
    """Whether it would for inputs of this dtype on a CPU."""
    from osdn.layers.mixers import Recurrence

    convolutions = (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d)
    parameters = [mixer.o_norm.weight, *((mixer.A_log, mixer.dt_bias) if mixer.has_decay else ())]
    return (
        mixer.fuses
        and "fuses" in vars(type(mixer))  # a subclass may compute something else
        and mixer.update is None
        and (type(mixer.recurrence), type(mixer.o_norm)) == (Recurrence, GatedRMSNorm)
        and all(type(conv) is ShortConvolution for conv in convolutions)
        and mixer.o_norm.eps is not None
        and mixer.recurrence.backend in ("auto", "cpu")
        and (mixer.preconditioner is None or isinstance(mixer.preconditioner.config, KNOWN_RULES))
        and all(conv.weight.dtype == dtype for conv in convolutions)
        and all(readable(parameter.dtype, dtype) for parameter in parameters)
        and len({parameter.dtype for parameter in parameters[1:]}) <= 1
        and not any(has_hooks(module) for module in mixer.children())
    )


def step(
    mixer: "TokenMixer", x: Tensor, state: "MixerState", overwrite: bool = False
) -> tuple[Tensor, "MixerState"]:
    """The outputs `[N, 1, D]` for `x` `[N, 1, D]`, and the state that continues.

    With `overwrite` it may take the place of the old one.
    """
    state = mixer._checked(state, x.shape[0])
    inputs, settings = step_inputs(mixer, x[:, 0], state, linears)
    outputs = decode_step(inputs, settings, overwrite)
    scale = None if state.scale is None else outputs.scale
    continued = type(state)(outputs.state, scale, outputs.q_tail, outputs.k_tail, outputs.v_tail)
    return mixer.o_proj(outputs.out)[:, None], continued


def step_inputs(
    mixer: "TokenMixer",
    x: Tensor,  # [N, D]
    state: "MixerState",
    apply: Callable[[list[tuple[nn.Module, Tensor]]], list[Tensor]],
) -> tuple[StepInputs, StepSettings]:
    """What the compiled step is called with; `apply` calls linear layers, each with its input."""
    layers = [mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.b_proj, *mixer.gate_layers()]
    learned = None if mixer.preconditioner is None else mixer.preconditioner.retention
    if learned is not None:
        layers.append(learned)
    q, k, v, beta, *gates = apply([(layer, x) for layer in layers])
    retention = None if learned is None else gates.pop()
    if inner := mixer.inner_gate_layers():
        gates = apply(list(zip(inner, gates)))
    optional: dict[str, Tensor] = {}
    if mixer.has_decay:
        decay, gate = gates
        A_log, dt_bias = (mixer.get_parameter(name).detach() for name in ("A_log", "dt_bias"))
        optional = {"decay": decay, "gate": gate, "A_log": A_log, "dt_bias": dt_bias}
    dtype = wide(x.dtype)
    # The state may come from another precision.
    q_tail, k_tail, v_tail = (y.to(x.dtype) for y in (state.q_tail, state.k_tail, state.v_tail))
    inputs = StepInputs(
        q=q,
        k=k,
        v=v,
        q_taps=mixer.q_conv1d.weight[:, 0].detach(),
        k_taps=mixer.k_conv1d.weight[:, 0].detach(),
        v_taps=mixer.v_conv1d.weight[:, 0].detach(),
        q_tail=q_tail,
        k_tail=k_tail,
        v_tail=v_tail,
        beta=beta,
        norm=mixer.o_norm.weight.detach(),
        state=state.recurrent.to(dtype),
        scale=None if state.scale is None else state.scale.to(dtype),
        retention=retention,
        **optional,
    )
    return inputs, step_settings(mixer)


def step_settings(mixer: "TokenMixer") -> StepSettings:
    assert mixer.o_norm.eps is not None  # `fused` saw to it
    settings = StepSettings(
        mixer.output_gate, write_scale=mixer.write_scale * mixer.strongest, norm_eps=mixer.o_norm.eps
    )
    if mixer.preconditioner is None:
        return settings
    config = mixer.preconditioner.config
    assert isinstance(config, KNOWN_RULES)
    settings = settings._replace(
        tied=config.retention == "tied",
        retention=config.retention if isinstance(config.retention, float) else 1.0,
    )
    if isinstance(config, NewtonConfig):
        return settings._replace(block_size=config.block_size, prior=config.prior)
    return settings._replace(eta=config.eta, bounds=config.bounds, beta_aware=config.beta_aware)
