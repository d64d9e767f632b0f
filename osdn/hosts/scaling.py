"""Online preconditioning in the delta-rule layers of a loaded model of `transformers`.

Online scaling and Newton's method have no parameters, so any checkpoint can have them.  A layer hands its
recurrence neither itself nor its cache: hooks around its forward put both, with the preconditioner, where the
recurrence finds them.  What a preconditioner carries on lives in the layer's own cache, in a state of its
own, so that whatever reorders, moves or copies the cache takes it along.
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
)

HANDLES = "_osdn_scaling"  # a layer's attribute: its hooks


@dataclass
class Scaling:
    """Of the layer that runs: its preconditioner, and where that keeps what it carries on."""

    preconditioner: Preconditioner
    cache: Any  # of the layer, or None
    used: bool = False

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, log_decay: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`delta_rule`, preconditioned; a given initial state continues the preconditioner as well."""
        self.used = True
        carried, slot = None, getattr(self.cache, "osdn_scale", None)
        if settings["initial_state"] is not None and slot is not None:
            carried = self.cache.recurrent_states[slot]
            if torch.is_grad_enabled():  # a backward reads what the next `keep` writes over
                carried = carried.clone()
        arguments = self.preconditioner(q, log_decay, carried)
        operator = OPERATORS[self.preconditioner.config.rule][1]
        out, state, carried = operator(q, k, v, beta, log_decay=log_decay, **arguments, **settings)
        self.keep(carried)
        return out, state

    def keep(self, carried: Tensor) -> None:
        """Put a scale `[N, HV, K]` or covariance `[N, HV, K / b, b, b]` into the cache, as one state more."""
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


def configure(settings: Settings | Mapping[str, Any]) -> PreconditionerConfig | NewtonConfig:
    """The settings, if a model that was trained without them can have them."""
    config = PreconditionerConfig.of(settings)
    if isinstance(config, PGDNConfig):
        raise ValueError(
            "preconditioner has the rule pgdn, whose gates are parameters that this model does not have. A "
            "loaded model can have the rules hypergradient and newton; train a model of osdn for pgdn"
        )
    learned = {name: getattr(config, name, None) for name in ("retention", "initial_scale")}
    for name, value in learned.items():
        if isinstance(value, str) and value != "tied":
            raise ValueError(
                f"preconditioner has {name}={value!r}, which needs parameters that this model does not have. "
                'A loaded model can have a retention of None, a number or "tied", and no learned scale; '
                "train a model of osdn for the others"
            )
    return config


def switch(layers: list[nn.Module], config: PreconditionerConfig | NewtonConfig | None, current: Any) -> None:
    """Preconditioning on, with these settings, or off."""
    made = [None if config is None else _preconditioner(config, layer) for layer in layers]
    for layer, preconditioner in zip(layers, made):
        for handle in layer.__dict__.pop(HANDLES, ()):
            handle.remove()
        if preconditioner is not None:
            enter = partial(_enter, preconditioner, current)
            layer.__dict__[HANDLES] = (
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                layer.register_forward_hook(partial(_leave, current), always_call=True),
            )


def _preconditioner(config: PreconditionerConfig | NewtonConfig, layer: Any) -> Preconditioner:
    """One without parameters, for a layer of any family."""
    heads = layer.num_v_heads if hasattr(layer, "num_v_heads") else layer.num_heads
    sizes = (layer.hidden_size, heads, layer.head_k_dim if hasattr(layer, "head_k_dim") else layer.head_dim)
    if isinstance(config, NewtonConfig):
        return NewtonPreconditioner(config, *sizes, has_decay=True)
    return Preconditioner(config, *sizes, has_decay=True)


def _enter(preconditioner: Preconditioner, current: Any, layer: nn.Module, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("a model of transformers with online preconditioning cannot be compiled")
    cache = kwargs.get("cache_params", args[1] if len(args) > 1 else None)
    current.scaling = Scaling(preconditioner, None if cache is None else cache.layers[layer.layer_idx])


def _leave(current: Any, layer: nn.Module, args: Any, output: Any) -> None:
    scaling, current.scaling = current.scaling, None
    if output is not None and scaling is not None and not scaling.used:
        raise RuntimeError(
            "a preconditioner is switched on in this model, but its layers call the original functions "
            "again; call osdn.accelerate(), or osdn.accelerate(model, undo=True) to switch it off"
        )
