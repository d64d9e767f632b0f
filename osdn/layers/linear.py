"""Linear layers that read their weights at the speed of memory when a CPU decodes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdn.ops.cpu.row_product import row_product, usable

LARGE = 2**17  # weights, below which they lie in a cache and calls cost more than reading


class Linear(nn.Linear):
    """PyTorch's; for a few rows on a CPU, without gradients, its product is `row_product`."""

    def forward(self, x: Tensor) -> Tensor:
        if self._decodes(x):
            return row_product(x, self.weight.detach(), None if self.bias is None else self.bias.detach())
        return F.linear(x, self.weight, self.bias)

    def _decodes(self, x: Tensor) -> bool:
        return (
            not torch.compiler.is_compiling()
            and type(self.weight) is nn.Parameter  # not quantized or sharded
            and self.weight.numel() >= LARGE
            and not torch.is_autocast_enabled("cpu")
            and usable(x, self.weight)
        )
