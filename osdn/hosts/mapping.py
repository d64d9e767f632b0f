"""Our recurrences in the mapping of the package `kernels`, for models that ask for kernels.

Where `kernels` is installed, the functions that layers call are modules without parameters.  A model that
asks for kernels (`use_kernels=True`) has their forward exchanged for what the mapping says, and for CPUs that
is ours.  A forward that was exchanged is respected, whoever made it; until then our replacement is called by
name.  The convolutions are not in the mapping, because other families look for them under the same names.
"""

import inspect
import sys
from functools import cache, partial, wraps
from typing import Any

from torch import nn

from osdn.hosts.functions import Function

active = False  # whether our layers compute, or leave it to the originals


class Repository:
    """Where `kernels` loads a layer from: it wants an object with `load`."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer

    def load(self) -> type[nn.Module]:
        return self.layer


def route(original: Any, make: Function, listed: bool) -> Function:
    """The replacement of `original`; if that is a module of `kernels`, `listed` puts it into the mapping."""
    ours = make(original)
    if not hasattr(original, "kernel_layer_name"):
        return ours
    if listed:
        _register(original.kernel_layer_name, _layer(original, make))

    @wraps(ours)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        exchanged = vars(original).get("forward")  # by `kernels`, which may put the same one back
        if exchanged is not None and exchanged.__func__ is not type(original).forward:
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    return replacement


def follow(owner: Any) -> None:
    """Have modules of a model that asks for kernels call the forward of their class, which we replace."""
    if not hasattr(owner, "kernel_layer_name"):
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    _register(owner.kernel_layer_name, _with_signature(forward, owner))


def _register(name: str, layer: type[nn.Module]) -> None:
    kernels = sys.modules["kernels"]  # which made what we replace
    kernels.register_kernel_mapping({name: {"cpu": Repository(layer)}})


def _layer(original: nn.Module, make: Function) -> type[nn.Module]:
    """`kernels` wants a class without a constructor or attributes, and exactly the original's parameters."""

    @cache
    def ours(module: nn.Module) -> Function:
        return make(partial(type(module).forward, module))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (ours(self) if active else partial(type(self).forward, self))(*args, **kwargs)

    return _with_signature(forward, type(original))


def _with_signature(forward: Any, of: type[nn.Module]) -> type[nn.Module]:
    forward.__signature__ = inspect.signature(of.forward)
    return type("OSDN", (nn.Module,), {"forward": forward})
