"""Linear layers that read their weights at the speed of memory when a CPU decodes."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdn.ops import tracing
from osdn.ops.cpu.row_product import Product, row_product, row_products, usable

LARGE = 2**17  # smaller weights stay in a cache, and a call costs more than reading them


class Linear(nn.Linear):
    """PyTorch's; for a few rows on a CPU, without gradients, its product is `row_product`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.numel() >= LARGE and _decoding(x) and self._reads(x):
            return row_product(x, self.weight.detach(), None if self.bias is None else self.bias.detach())
        return F.linear(x, self.weight, self.bias)

    def _reads(self, x: Tensor) -> bool:
        """Whether the kernel can read the weights: quantized and sharded ones are no plain parameters."""
        return (
            type(self.weight) is nn.Parameter
            and (self.bias is None or (type(self.bias) is nn.Parameter and self.bias.dtype == x.dtype))
            and self.weight.shape[1] == x.shape[-1]
            and usable(x, self.weight)
        )


def linears(pairs: Sequence[tuple[nn.Module, Tensor]]) -> list[Tensor]:
    """The outputs of several linear layers, each with its input.

    Where a CPU decodes, all of them are one call of the kernel.

    >>> q, k = Linear(4, 6), Linear(4, 2)
    >>> x = torch.randn(1, 4)
    >>> [y.shape for y in linears([(q, x), (k, x)])]
    [torch.Size([1, 6]), torch.Size([1, 2])]
    """
    first = pairs[0][1]
    if torch.is_grad_enabled() or not _decoding(first) or tracing.is_traced([first]):
        return [layer(x) for layer, x in pairs]
    alike = all(x.shape[:-1] == first.shape[:-1] and x.dtype == first.dtype for _, x in pairs)
    products = [Product(x, layer.weight, layer.bias) for layer, x in pairs if is_plain(layer, x)]
    if alike and len(products) == len(pairs):
        return row_products(products)
    return [layer(x) for layer, x in pairs]


def is_plain(layer: nn.Module, x: Tensor) -> TypeGuard[Linear]:
    """Whether calling the layer without gradients does no more than the kernel would."""
    return (
        isinstance(layer, Linear)
        and type(layer).forward is Linear.forward
        and not has_hooks(layer)
        and layer._reads(x)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody waits for a call of the module: `accelerate` does, to fetch weights kept elsewhere."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in module.__dict__)


def _decoding(x: Tensor) -> bool:
    return (
        x.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    )
