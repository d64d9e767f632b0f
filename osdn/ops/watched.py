"""Who must see the operators of a compiled backend; where nobody does, kernels are called directly."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def constant_in_graphs(function: Decorated) -> Decorated:
    """Have `torch.compile` call a function instead of tracing it, and keep what it returns.

    This is torch.compiler.assume_constant_result without its import of torch._dynamo, which loads twenty
    times as many modules as our operators and layers.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def by_autograd(arguments: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def by_others(arguments: Iterable[Any]) -> bool:
    """A compiler, a tracer, a dispatch mode or a tensor subclass: some have no memory a kernel could read."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode():
        return True
    return any(isinstance(x, Tensor) and type(x) is not Tensor for x in arguments)


def by_transforms() -> bool:
    """`torch.func` (vmap, jvp, ...) or forward-mode differentiation, of which kernels know nothing."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_batched(backend: str, grads: Iterable[Any]) -> None:
    """Gradients stacked by `is_grads_batched` or `vectorize` have no memory that a kernel could read."""
    if any(isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x) for x in grads):
        raise RuntimeError(f'backend="{backend}" has no batched gradients; use backend="chunkwise" for them')
