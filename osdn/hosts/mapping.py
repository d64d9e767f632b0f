"""Our recurrences in the mapping of the package `kernels`, for models that request kernels.

If `kernels` is installed, the functions that layers call are modules without parameters.  If a model requests
kernels (`use_kernels=True`), their forward is replaced by the mapping's entry, which for CPUs is ours.  A
forward that has been replaced is respected, whoever did it; otherwise our replacement is called by name.  The
convolutions are not in the mapping, because other families look them up under the same names.
"""

import inspect
import sys
from functools import cache, partial, wraps
from typing import Any

from torch import nn

from osdn.hosts.functions import Function

active = False  # whether our layers compute or call the originals


class Repository:
    """Where `kernels` loads a layer from: it expects an object with `load`."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer

    def load(self) -> type[nn.Module]:
        return self.layer


def route(original: Any, make: Function, listed: bool) -> Function:
    """The replacement of `original`; with `listed`, a module of `kernels` is also added to the mapping."""
    ours = make(original)
    if not hasattr(original, "kernel_layer_name"):
        return ours
    if listed:
        _register(original.kernel_layer_name, _layer(original, make))

    @wraps(ours)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        exchanged = vars(original).get("forward")  # set by `kernels`, possibly to the original one
        if exchanged is not None and exchanged.__func__ is not type(original).forward:
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    return replacement


def follow(owner: Any) -> None:
    """Make modules of a model that requests kernels call the forward of their class, which we replace."""
    if not hasattr(owner, "kernel_layer_name"):
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    _register(owner.kernel_layer_name, _with_signature(forward, owner))


def _register(name: str, layer: type[nn.Module]) -> None:
    kernels = sys.modules["kernels"]  # imported, since it created the module we replace
    kernels.register_kernel_mapping({name: {"cpu": Repository(layer)}})


def _layer(original: nn.Module, make: Function) -> type[nn.Module]:
    """A layer as `kernels` requires it: no constructor, no attributes, and the original's parameters."""

    @cache
    def ours(module: nn.Module) -> Function:
        return make(partial(type(module).forward, module))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (ours(self) if active else partial(type(self).forward, self))(*args, **kwargs)

    return _with_signature(forward, type(original))


def _with_signature(forward: Any, of: type[nn.Module]) -> type[nn.Module]:
    forward.__signature__ = inspect.signature(of.forward)
    return type("OSDN", (nn.Module,), {"forward": forward})
