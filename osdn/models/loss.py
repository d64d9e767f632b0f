"""The summed cross-entropy of a linear head, a few rows of logits at a time.

`torch.nn.functional.linear_cross_entropy` does this, but on a CPU it passes over the logits several times
and widens bfloat16 to float32 before every product.  There we use our own kernel.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from osdn.ops import tracing
from osdn.ops.cpu.convolution import usable
from osdn.ops.cpu.cross_entropy import cross_entropies

IGNORED_LABEL = -100
LOGITS_AT_ONCE = 2**25  # 128 MiB in float32: enough rows for a fast matrix product


def summed_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross-entropies of `x @ weight.T`, in float32 or wider.

    `x` is `[N, D]`, `weight` `[V, D]`, and `labels` `[N]`; rows labelled `IGNORED_LABEL` count nothing.
    """
    rows = max(1, LOGITS_AT_ONCE // weight.shape[0])
    if usable(x) and not tracing.is_traced([x, labels]):
        needs_grad = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
        return _CrossEntropy.apply(x, weight, labels, rows, needs_grad)
    options = nn.LinearCrossEntropyOptions(
        batch_chunk_size=rows, allow_retain_graph=torch.compiler.is_compiling()
    )
    # A single loss fits into half precision, but the sum of many does not.
    reduction = "none" if x.dtype.itemsize < 4 else "sum"
    loss = F.linear_cross_entropy(
        x, weight, labels, reduction=reduction, ignore_index=IGNORED_LABEL, options=options
    )
    return loss.sum(dtype=torch.promote_types(loss.dtype, torch.float32))


class _CrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass on a CPU, so that no logits are kept; the backward scales the gradients.

    Products of 16-bit inputs are taken in their precision, the softmax and all sums in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, rows: int, needs_grad: list[bool]
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = x.new_zeros((), dtype=wide)
        x_grad = torch.empty_like(x) if needs_grad[0] else None
        weight_grad = weight.new_zeros(weight.shape, dtype=wide) if needs_grad[1] else None
        for start in range(0, len(x), rows):
            chunk = slice(start, start + rows)
            logits = F.linear(x[chunk], weight)
            loss += cross_entropies(logits, labels[chunk], IGNORED_LABEL, overwrite=any(needs_grad)).sum()
            if x_grad is not None:
                torch.mm(logits, weight, out=x_grad[chunk])
            if weight_grad is not None and x.dtype == wide:
                weight_grad.addmm_(logits.T, x[chunk])
            elif weight_grad is not None:
                weight_grad += logits.T @ x[chunk]
        ctx.dtype = x.dtype
        ctx.save_for_backward(x_grad, weight_grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else (grad * scale).to(ctx.dtype) for grad in ctx.saved_tensors)
        return *grads, None, None, None
