"""Online scaling in the delta-rule layers of a loaded model of `transformers`.

Plain online scaling has no parameters, so any checkpoint can have it.  A layer hands its recurrence neither
itself nor its cache: hooks around its forward put both, with the settings, where the recurrence finds them.
The scale lives in the layer's own cache, in a state of its own, so that whatever reorders, moves or copies
the cache takes it along.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from osdn.layers.preconditioner import PreconditionerConfig

SETTINGS = ("eta", "bounds", "retention", "beta_aware")  # that have no parameters
HANDLES = "_osdn_scaling"  # a layer's attribute: its hooks


@dataclass
class Scaling:
    """Of the layer that runs: its settings, and where its scale is kept."""

    config: PreconditionerConfig
    cache: Any  # of the layer, or None
    used: bool = False

    def arguments(self, log_decay: Tensor, continued: bool) -> dict[str, Any]:
        """What `online_scaled_delta_rule` wants to know."""
        self.used = True
        given: dict[str, Any] = {name: getattr(self.config, name) for name in SETTINGS}
        if given["retention"] == "tied":
            given["retention"] = log_decay.exp()
        slot = getattr(self.cache, "osdn_scale", None)
        if continued and slot is not None:
            scale = self.cache.recurrent_states[slot]
            # a backward reads what the next `keep` writes over
            given["initial_scale"] = scale.clone() if torch.is_grad_enabled() else scale
        return given

    def keep(self, scale: Tensor) -> None:
        """Put the final scale `[N, HV, K]` into the cache, as one state more."""
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
        layer.update_recurrent_state(scale.detach(), layer.osdn_scale)


def configure(settings: PreconditionerConfig | Mapping[str, Any]) -> PreconditionerConfig:
    """The settings, if a model that was trained without them can have them."""
    config = PreconditionerConfig.of(settings)
    if not isinstance(config, PreconditionerConfig):
        raise ValueError(
            f"preconditioner is {settings!r}; a loaded model can have the rule hypergradient. Train a model "
            f"of osdn for the others"
        )
    for field in fields(config):
        value = getattr(config, field.name)
        learned = field.name == "retention" and value in ("learned", "learned_per_channel")
        if learned or (field.name not in SETTINGS and value != field.default):
            raise ValueError(
                f"preconditioner has {field.name}={value!r}, which needs more than this model has: "
                f"parameters of its own, or another rule. A loaded model can have {', '.join(SETTINGS)}, and "
                'a retention of None, a number or "tied". Train a model of osdn for the others'
            )
    return config


def switch(layers: list[nn.Module], config: PreconditionerConfig | None, current: Any) -> None:
    """Online scaling on, with these settings, or off."""
    for layer in layers:
        for handle in layer.__dict__.pop(HANDLES, ()):
            handle.remove()
        if config is not None:
            enter = layer.register_forward_pre_hook(partial(_enter, config, current), with_kwargs=True)
            leave = layer.register_forward_hook(partial(_leave, current), always_call=True)
            layer.__dict__[HANDLES] = (enter, leave)


def _enter(config: PreconditionerConfig, current: Any, layer: nn.Module, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("a model of transformers with online scaling cannot be compiled")
    cache = kwargs.get("cache_params", args[1] if len(args) > 1 else None)
    current.scaling = Scaling(config, None if cache is None else cache.layers[layer.layer_idx])


def _leave(current: Any, layer: nn.Module, args: Any, output: Any) -> None:
    scaling, current.scaling = current.scaling, None
    if output is not None and scaling is not None and not scaling.used:
        raise RuntimeError(
            "online scaling is switched on in this model, but its layers call the original functions again; "
            "call osdn.accelerate(), or osdn.accelerate(model, undo=True) to switch it off"
        )
