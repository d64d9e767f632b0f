"""Replacements for the functions that delta-rule layers of `transformers` call.

Each function here takes the original and returns its replacement.  A replacement handles tensors on a CPU and
passes every other call to the original.

Layers learn about packed sequences in three ways: `cu_seqlens`, `seq_idx`, and position ids that restart.
Position ids never reach a layer's recurrence, but they reach the function that creates the layers' mask, and
every layer first passes its mask to `apply_mask_to_padding_states`.  So the boundaries travel with the mask,
and later calls by that layer, in the same thread, find them in `current`.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from osdn.hosts.scaling import Scaling
from osdn.layers.precision import l2_normalize, widen
from osdn.ops import delta_rule, tracing
from osdn.ops.cpu.convolution import convolution_step, short_convolution, usable
from osdn.ops.cpu.decay import log_decay
from osdn.ops.cpu.gated_norm import gated_rms_norm
from osdn.ops.cpu.normalization import widened

Function = Callable[..., Any]
ACTIVATIONS = (None, "silu", "swish")  # supported by the convolution kernel
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}  # supported by the norm kernel


class Current(threading.local):
    """State of the layer that is running in this thread."""

    cu_seqlens: Tensor | None = None  # where position ids restart
    scaling: Scaling | None = None  # if it has a preconditioner


current = Current()


def recurrence(original: Function) -> Function:
    """The gated delta rule and Kimi Delta Attention, over whole sequences or token by token."""

    @wraps(original)
    def replacement(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        scaling = None if torch.compiler.is_compiling() else current.scaling
        if scaling is None and (args or not on_cpu(query, key, value, *kwargs.values())):
            return original(query, key, value, *args, **kwargs)
        B, T = query.shape[:2]
        cu_seqlens, current.cu_seqlens = _boundaries(kwargs), None  # the layer does not need it again
        unit = bool(kwargs.get("use_qk_l2norm_in_kernel"))
        wide = [prepared(query, unit), prepared(key, unit), prepared(value, False)]
        tensors = [*wide, kwargs["beta"], kwargs["g"]]
        if cu_seqlens is not None and B > 1:  # rows of several sequences each: one row of them all
            tensors = [x.flatten(0, 1)[None] for x in tensors]  # [1, B * T, ...]
        q, k, v, beta, log_decay = tensors
        shared: dict[str, Any] = {
            "log_decay": log_decay,
            "initial_state": kwargs.get("initial_state"),
            "output_final_state": bool(kwargs.get("output_final_state")),
            "cu_seqlens": cu_seqlens,
        }
        rule = delta_rule if scaling is None else scaling.delta_rule
        out, state = rule(q, k, v, beta, **shared)
        return out.view(B, T, *out.shape[2:]).to(query.dtype), state

    return replacement


def convolution(original: Function) -> Function:
    """The short convolution over whole sequences, `[B, D, T]`."""

    @wraps(original)
    def replacement(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        x = hidden_states.mT  # [B, T, D]
        B, T, D = x.shape
        cu_seqlens = _boundaries(kwargs) if on_cpu(x) else None
        if cu_seqlens is not None and B > 1:  # rows of several sequences each: one row of them all
            x = x.reshape(1, B * T, D)
        if usable(x) and activation in ACTIVATIONS:
            y = short_convolution(x, weight, bias, cu_seqlens=cu_seqlens, silu=activation is not None)
        elif cu_seqlens is None:
            return original(hidden_states, weight, bias, activation, **kwargs)
        else:
            pieces = x.mT.split(cu_seqlens.diff().tolist(), 2)
            y = torch.cat([original(p, weight, bias, activation) for p in pieces if p.shape[2]], 2).mT
        return y.reshape(B, T, D).mT

    return replacement


def convolution_update(original: Function) -> Function:
    """The short convolution for one more token, `[B, D, 1]`; updates `conv_state` in place."""

    @wraps(original)
    def replacement(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        tensors = [x for x in (hidden_states, conv_state, weight, bias) if x is not None]
        if (
            activation in ACTIVATIONS
            and hidden_states.shape[2] == 1
            and conv_state.shape[2] >= weight.shape[1]
            and conv_state.is_contiguous()
            and all(x.dtype == weight.dtype and x.device == weight.device for x in tensors)
            and usable(weight)
            and not tracing.needs_gradient(tensors)
            and not tracing.is_traced(tensors)
        ):
            if not conv_state.is_inference():
                torch.autograd.graph.increment_version(conv_state)
            return convolution_step(hidden_states, conv_state, weight, bias, activation is not None)
        return original(hidden_states, conv_state, weight, bias, activation)

    return replacement


def recurrent_mask(original: Function) -> Function:
    """The mask of recurrent layers, with the boundaries of packed sequences as an attribute."""

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Tensor | None:
        mask = original(*args, **kwargs)
        position_ids, embeds = kwargs.get("position_ids"), kwargs.get("inputs_embeds")
        mask_and_cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        if mask is not None or mask_and_cache != (None, None) or position_ids is None or embeds is None:
            return mask
        if torch.compiler.is_compiling() or not on_cpu(position_ids, embeds) or position_ids.ndim != 2:
            return mask
        # attention layers look for packed sequences under the same conditions
        position_ids = position_ids.expand(embeds.shape[:2])
        starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
        if not starts.any():
            return mask
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        mask.osdn_cu_seqlens = _from_starts(starts)  # type: ignore[attr-defined]
        return mask

    return replacement


def padding(original: Function) -> Function:
    """The function that every layer calls first, with its mask."""

    @wraps(original)
    def replacement(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            return original(hidden_states, attention_mask)
        current.cu_seqlens = getattr(attention_mask, "osdn_cu_seqlens", None)
        if current.cu_seqlens is not None:
            return hidden_states  # there is no padding
        return original(hidden_states, attention_mask)

    return replacement


def gated_norm(original: Function) -> Function:
    """The forward of the module that normalises and gates the outputs of the recurrence."""

    @wraps(original)
    def replacement(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if (
            gate is not None
            and self.activation in GATES
            and usable(hidden_states)
            and gate.dtype == hidden_states.dtype
            and gate.shape == hidden_states.shape
            and on_cpu(gate, self.weight)
        ):
            activation = GATES[self.activation]
            return gated_rms_norm(
                hidden_states, self.weight, gate, activation=activation, eps=self.variance_epsilon
            )
        return original(self, hidden_states, gate)

    return replacement


def forget_gate(original: Function) -> Function:
    """The forward of the module that computes the decay of every key channel from a layer's input."""

    @wraps(original)
    def replacement(self: Any, hidden_states: Tensor) -> Tensor:
        if not usable(hidden_states) or not on_cpu(self.A_log, self.dt_bias):
            return original(self, hidden_states)
        if hasattr(self, "f_proj"):
            x, bound = self.f_proj(hidden_states), self.lower_bound if self.safe_gate else None
        else:
            x = self.f_b_proj(self.f_a_proj(hidden_states))
            bound = getattr(self, "safe_gate_lower_bound", None)
        return channel_decay(x.unflatten(-1, (-1, self.head_dim)), self.A_log, self.dt_bias, bound)

    return replacement


def channel_decay(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None) -> Tensor:
    """The logarithm of the decay of every key channel, `[B, T, HV, K]`, or of every head, `[B, T, HV]`."""
    flat = x.flatten(2)
    if A_log is None:
        rate = torch.ones(flat.shape[2], device=flat.device)
    else:
        rate = widen(A_log).exp().flatten().repeat_interleave(flat.shape[2] // A_log.numel())
    return log_decay(flat, rate, None if dt_bias is None else dt_bias.flatten(), bound).view(x.shape)


def prepared(x: Tensor, unit: bool) -> Tensor:
    """Queries, keys or values `[B, T, H, K]` in at least float32, optionally of unit length."""
    if usable(x):
        return widened(x, unit)
    return l2_normalize(widen(x)) if unit else widen(x)


def on_cpu(*arguments: Any) -> bool:
    """Whether all tensors are on a CPU and no function transform is tracing the call."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    return all(x.device.type == "cpu" for x in tensors) and not tracing.in_transform()


def _boundaries(kwargs: dict[str, Any]) -> Tensor | None:
    """The boundaries of packed sequences in the row of all tokens, `[N + 1]`; None without packing."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            return kwargs[name]
    if (seq_idx := kwargs.get("seq_idx")) is not None:
        return _from_starts(seq_idx[:, 1:] != seq_idx[:, :-1])
    return None if torch.compiler.is_compiling() else current.cu_seqlens


def _from_starts(starts: Tensor) -> Tensor:
    """Boundaries from flags `[B, T - 1]` for all tokens but the first of each row, always a start."""
    starts = torch.nn.functional.pad(starts, (1, 0), value=True).flatten()
    return torch.cat([starts.nonzero()[:, 0], torch.tensor([len(starts)], device=starts.device)])
