"""Online preconditioning in the delta-rule layers of a loaded model of `transformers`.

Online scaling and Newton's method have no parameters, so they work with any checkpoint.  A layer passes
neither itself nor its cache to its recurrence, so hooks around its forward put the preconditioner and the
cache where the recurrence finds them.  The preconditioner's state lives in the layer's own cache as an
additional state, so that it is reordered, moved or copied with the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from osdn.layers.preconditioner import (
    OPERATORS,
    NewtonConfig,
    NewtonPreconditioner,
    PGDNConfig,
    Preconditioner,
    PreconditionerConfig,
    Settings,
    for_strength,
)

HANDLES = "_osdn_scaling"  # the attribute of a layer that holds its hooks


@dataclass
class Scaling:
    """The preconditioner of the running layer, and the cache that holds its state."""

    preconditioner: Preconditioner
    cache: Any  # the layer's cache, or None
    used: bool = False

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, log_decay: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The preconditioned `delta_rule`; with an initial state, the preconditioner continues as well."""
        self.used = True
        carried, slot = None, getattr(self.cache, "osdn_scale", None)
        if settings["initial_state"] is not None and slot is not None:
            carried = self.cache.recurrent_states[slot]
            if torch.is_grad_enabled():  # the backward pass reads what the next `store` overwrites
                carried = carried.clone()
        arguments = self.preconditioner(q, log_decay, carried)
        operator = OPERATORS[self.preconditioner.config.rule][1]
        out, state, carried = operator(q, k, v, beta, log_decay=log_decay, **arguments, **settings)
        self.store(carried)
        return out, state

    def store(self, carried: Tensor) -> None:
        """Store a scale `[N, HV, K]` or covariance `[N, HV, K / b, b, b]` in the cache as an extra state."""
        layer = self.cache
        if layer is None:
            return
        if not hasattr(layer, "osdn_scale"):
            layer.osdn_scale = slot = layer.number_of_states
            layer.number_of_states += 1
            for states in (layer.conv_states, layer.recurrent_states, layer.conv_kernel_size):
                states[slot] = None
            for flags in (
                "is_conv_states_initialized",
                "is_recurrent_states_initialized",
                "has_previous_state",
            ):
                getattr(layer, flags)[slot] = False
        layer.update_recurrent_state(carried.detach(), layer.osdn_scale)


def configure(
    settings: Settings | Mapping[str, Any], layers: list[nn.Module]
) -> PreconditionerConfig | NewtonConfig:
    """Check that the settings work for a model that was trained without them."""
    doubled = any(getattr(layer, "allow_neg_eigval", False) for layer in layers)
    config = for_strength(settings, 2.0 if doubled else 1.0)
    if isinstance(config, PGDNConfig):
        raise ValueError(
            "preconditioner has the rule pgdn, whose gates are parameters that this model does not have. "
            "A loaded model can use the rules hypergradient and newton; for pgdn, train a model of osdn"
        )
    learned = {name: getattr(config, name, None) for name in ("retention", "initial_scale")}
    for name, value in learned.items():
        if isinstance(value, str) and value != "tied":
            raise ValueError(
                f"preconditioner has {name}={value!r}, which needs parameters that this model does not have. "
                'A loaded model can use a retention of None, a number or "tied", and no learned scale; '
                "for anything else, train a model of osdn"
            )
    return config


def switch(layers: list[nn.Module], config: PreconditionerConfig | NewtonConfig | None, current: Any) -> None:
    """Switch preconditioning on with these settings, or off with None."""
    preconditioners = [None if config is None else _preconditioner(config, layer) for layer in layers]
    for layer, preconditioner in zip(layers, preconditioners):
        for handle in layer.__dict__.pop(HANDLES, ()):
            handle.remove()
        if preconditioner is not None:
            enter = partial(_enter, preconditioner, current)
            layer.__dict__[HANDLES] = (
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                layer.register_forward_hook(partial(_leave, current), always_call=True),
            )


def _preconditioner(config: PreconditionerConfig | NewtonConfig, layer: Any) -> Preconditioner:
    """A preconditioner without parameters, for a layer of any family."""
    heads = layer.num_v_heads if hasattr(layer, "num_v_heads") else layer.num_heads
    sizes = (layer.hidden_size, heads, layer.head_k_dim if hasattr(layer, "head_k_dim") else layer.head_dim)
    if isinstance(config, NewtonConfig):
        return NewtonPreconditioner(config, *sizes, has_decay=True)
    return Preconditioner(config, *sizes, has_decay=True)


def _enter(preconditioner: Preconditioner, current: Any, layer: nn.Module, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a model of transformers with online preconditioning cannot be compiled; run it without "
            "torch.compile, or call osdn.accelerate(model, undo=True) first"
        )
    cache = kwargs.get("cache_params", args[1] if len(args) > 1 else None)
    current.scaling = Scaling(preconditioner, None if cache is None else cache.layers[layer.layer_idx])


def _leave(current: Any, layer: nn.Module, args: Any, output: Any) -> None:
    scaling, current.scaling = current.scaling, None
    if output is not None and scaling is not None and not scaling.used:
        raise RuntimeError(
            "this model has a preconditioner, but its layers call the original functions again; call "
            "osdn.accelerate(), or osdn.accelerate(model, undo=True) to switch the preconditioner off"
        )
