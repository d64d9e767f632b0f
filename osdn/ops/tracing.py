"""Whether a kernel may be called directly, or PyTorch must see the operator around it."""

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


def needs_gradient(arguments: Iterable[Any]) -> bool:
    """Whether autograd must record the operator."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def is_traced(arguments: Iterable[Any]) -> bool:
    """Whether a compiler, a tracer, a dispatch mode or a tensor subclass must see the operator.

    Some of these tensors have no memory that a kernel could read.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode():
        return True
    return any(isinstance(x, Tensor) and type(x) is not Tensor for x in arguments)


def in_transform() -> bool:
    """Whether `torch.func` (vmap, jvp, ...) or forward-mode differentiation is on, which kernels lack."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def reject_batched_gradients(backend: str, grads: Iterable[Any]) -> None:
    """Raise for gradients stacked by `is_grads_batched` or `vectorize`: they have no memory of their own."""
    if any(isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x) for x in grads):
        raise RuntimeError(f'backend="{backend}" has no batched gradients; use backend="chunkwise" for them')
