"""A mixer's decoding step on a CPU: its projections, and all that lies between them in one compiled call."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from osdn.layers.linear import has_hooks, linears
from osdn.layers.preconditioner import PreconditionerConfig
from osdn.ops.cpu.binding import wide
from osdn.ops.cpu.decode_step import StepInputs, StepSettings, decode_step, usable

if TYPE_CHECKING:
    from osdn.layers.mixers import MixerState, TokenMixer


def fused(mixer: "TokenMixer", x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether the compiled step gives what the mixer would: one token, no gradient, nobody looking inside."""
    if x.ndim != 3 or x.shape[1] != 1 or cu_seqlens is not None or not usable(x):
        return False
    convolutions = (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d)
    return (
        mixer.fuses
        and mixer.update is None
        and mixer.o_norm.eps is not None
        and mixer.recurrence.backend in ("auto", "cpu")
        and (mixer.preconditioner is None or isinstance(mixer.preconditioner.config, PreconditionerConfig))
        and all(conv.weight.dtype == x.dtype for conv in convolutions)
        and not torch.is_autocast_enabled("cpu")
        and not any(has_hooks(module) for module in (mixer.recurrence, mixer.o_norm, *convolutions))
    )


def step(
    mixer: "TokenMixer", x: Tensor, state: "MixerState", overwrite: bool = False
) -> tuple[Tensor, "MixerState"]:
    """The outputs `[N, 1, D]` for `x` `[N, 1, D]`, and the state that continues.

    With `overwrite` it may take the place of the old one.
    """
    recurrent, scale, *tails = mixer._checked(state, x.shape[0])
    rows = x[:, 0]  # [N, D]
    assert mixer.o_norm.eps is not None  # `fused` saw to it
    settings = StepSettings(
        mixer.output_gate, write_scale=mixer.write_scale * mixer.strongest, norm_eps=mixer.o_norm.eps
    )
    layers = [mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.b_proj, *mixer.gate_layers()]
    learned = None if mixer.preconditioner is None else mixer.preconditioner.retention
    if learned is not None:
        layers.append(learned)
    if mixer.preconditioner is not None:
        config = mixer.preconditioner.config
        assert isinstance(config, PreconditionerConfig)
        settings = settings._replace(
            tied=config.retention == "tied",
            eta=config.eta,
            bounds=config.bounds,
            beta_aware=config.beta_aware,
            retention=config.retention if isinstance(config.retention, float) else 1.0,
        )
    q, k, v, beta, *gates = linears([(layer, rows) for layer in layers])
    retention = None if learned is None else gates.pop()
    convolutions = (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d)
    q_taps, k_taps, v_taps = (conv.weight[:, 0].detach() for conv in convolutions)
    q_tail, k_tail, v_tail = (tail.to(x.dtype) for tail in tails)  # they may come from another precision
    dtype = wide(x.dtype)
    inputs = StepInputs(
        q=q,
        k=k,
        v=v,
        q_taps=q_taps,
        k_taps=k_taps,
        v_taps=v_taps,
        q_tail=q_tail,
        k_tail=k_tail,
        v_tail=v_tail,
        beta=beta,
        norm=mixer.o_norm.weight.detach(),
        state=recurrent.to(dtype),
        scale=None if scale is None else scale.to(dtype),
        retention=retention,
        **mixer.step_gates(gates),
    )
    outputs = decode_step(inputs, settings, overwrite)
    carried = None if scale is None else outputs.scale
    continued = type(state)(outputs.state, carried, outputs.q_tail, outputs.k_tail, outputs.v_tail)
    return mixer.o_proj(outputs.out)[:, None], continued
