"""`osdn.accelerate()`: puts our operators under the names that delta-rule layers of `transformers` call.

Each time it runs, a layer's forward looks these names up in its module, and the forwards of its norm and its
forget gate in their classes. So models that already exist are accelerated too, and `undo` only has to restore
the originals. For families that are imported later, an import hook replaces the names when the import ends.
It knows the eight families and flash-linear-attention, which has a registry (`registry.py`). Nothing is
imported that the user does not import.
"""

import importlib
import inspect
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from torch import nn

from osdn.hosts import functions, mapping, registry
from osdn.hosts.scaling import configure, switch
from osdn.layers.preconditioner import Settings
from osdn.ops import checks

FAMILIES = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid"),  # one decay per head
    *("kimi_linear", "bailing_hybrid", "glm5_next"),  # one decay per channel
)
MODULES = {f"transformers.models.{family}.modeling_{family}": family for family in FAMILIES}
# All take (query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel) and return the outputs first.
RECURRENCES = (
    *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    *("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)
REPLACEMENTS = {
    **dict.fromkeys(RECURRENCES, functions.recurrence),
    "causal_conv1d_fn": functions.convolution,
    "causal_conv1d_update": functions.convolution_update,
    "create_recurrent_attention_mask": functions.recurrent_mask,
    "apply_mask_to_padding_states": functions.padding,
}
FORWARDS = {
    "RMSNormGated": functions.gated_norm,
    "ForgetGate": functions.forget_gate,
}  # by the end of the class's name

replacing = threading.RLock()  # held while names in modules of `transformers` are changed
_originals: dict[tuple[ModuleType | type, str], Any] = {}  # by module or class, and name


def accelerate(
    model: nn.Module | None = None,
    *,
    preconditioner: Settings | Mapping[str, Any] | None = None,
    undo: bool = False,
) -> list[str]:
    """Run the delta-rule models of `transformers` on our CPU kernels, or restore the originals.

    This covers models that already exist, models that are loaded later, and the layers of
    flash-linear-attention if it is installed.  Tensors on other devices use the original functions.  Calling
    it again changes nothing.

    Args:
        model: a loaded model in which to switch a preconditioner on or off.
        preconditioner: settings of online scaling, or of Newton's method (`{"rule": "newton"}`), for every
            delta-rule layer of `model`, on any device.
        undo: restore every replaced function; with `model`, only switch off its preconditioner.

    Returns:
        The accelerated families among those imported so far, including "fla" if it is one of them; with
        `undo`, those that were restored.

    >>> from transformers import Qwen3NextForCausalLM
    >>> "qwen3_next" in accelerate()
    True
    >>> "qwen3_next" in accelerate(undo=True)
    True
    """
    checks.flag("undo", undo)
    if preconditioner is not None and (model is None or undo):
        raise ValueError(
            "preconditioner needs a model and cannot be combined with undo: "
            "call accelerate(model, preconditioner=...)"
        )
    layers = [] if model is None else _delta_rule_layers(model)
    if model is not None and not layers:
        raise ValueError(
            f"{type(model).__name__} has no delta-rule layer of {', '.join(FAMILIES)}; models of osdn are "
            "already fast, and their preconditioner is part of the configuration"
        )
    config = None if preconditioner is None else configure(preconditioner, layers)
    for name in (*MODULES, registry.PACKAGE):
        if name in sys.modules:
            importlib.import_module(name)  # waits for an import that is in progress in another thread
    with replacing:
        if config is not None or undo:
            switch(layers, config, functions.current)
        if undo:
            return _restore() if model is None else []
        if _LaterImports not in sys.meta_path:
            sys.meta_path.insert(0, _LaterImports)
        mapping.active = True
        for name in (*MODULES, registry.PACKAGE):
            if name in sys.modules:
                _replace(sys.modules[name])
        return _families()


def _delta_rule_layers(model: nn.Module) -> list[nn.Module]:
    layers = [layer for layer in model.modules() if type(layer).__module__ in MODULES]
    return [x for x in layers if {*inspect.unwrap(type(x).forward).__code__.co_names} & {*RECURRENCES}]


def _replace(module: ModuleType) -> None:
    if module.__name__ == registry.PACKAGE:
        if registry.enable():
            forward = "fused_recurrent_gated_delta_rule_fwd"
            _put(sys.modules[registry.RECURRENT], forward, registry.fused_recurrent_forward)
        return
    for name, make in REPLACEMENTS.items():
        if hasattr(module, name):
            _put(module, name, partial(mapping.route, make=make, listed=name in RECURRENCES))
    for last, make in FORWARDS.items():
        for owner in [x for name, x in vars(module).items() if name.endswith(last)]:
            mapping.follow(owner)
            _put(owner, "forward", make)


def _put(owner: ModuleType | type, name: str, make: functions.Function) -> None:
    if (owner, name) not in _originals:
        original = _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, make(original))


def _restore() -> list[str]:
    families = _families()
    if _LaterImports in sys.meta_path:
        sys.meta_path.remove(_LaterImports)
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    registry.disable()
    mapping.active = False
    return families


def _families() -> list[str]:
    reached = {MODULES.get(owner.__name__) for owner, _ in _originals}
    return [*(x for x in FAMILIES if x in reached), *([registry.PACKAGE] if registry.enabled else [])]


class _LaterImports:
    """Finds the families like Python's own finder, and replaces their functions after the import."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = name in MODULES or name == registry.PACKAGE
        spec = PathFinder.find_spec(name, path, target) if known else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                with replacing:
                    if _LaterImports in sys.meta_path:
                        _replace(module)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec
