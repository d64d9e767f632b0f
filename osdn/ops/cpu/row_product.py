"""A linear layer on a few rows, as in decoding: a PyTorch operator around the kernel in row_product.h.

With one row a linear layer is as fast as its weights can be read.  The kernel reads them in one stream per
thread, where `F.linear` reads at less than half of the memory's speed.  It has no gradient.
"""

import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from osdn.ops import checks, tracing
from osdn.ops.cpu import compiled
from osdn.ops.cpu.binding import Kernel, bind, call, element, wide

MOST_ROWS = 4  # beyond, there is more to do than to read, and F.linear is faster

# `struct Product` in row_product.h
FIELDS = (
    *("x", "weight", "bias", "scales", "zeros", "add", "out"),
    *("M", "N", "K", "element", "bits", "threads", "more"),
)
LAYOUT = struct.Struct(f"{len(FIELDS)}q")


def usable(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can take these tensors, and nobody asks for their gradients."""
    return (
        x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in checks.FLOATS
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and weight.is_contiguous()
        and not tracing.needs_gradient((x, weight))
        and not tracing.in_transform()
        and compiled(wide(x.dtype))
    )


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for at most 4 rows, summed in float32 (float64 for float64 inputs).

    Args:
        x: inputs `[..., K]` on a CPU.
        weight: `[N, K]`, in x's dtype.
        bias: `[N]`, in x's dtype.

    Returns:
        outputs `[..., N]` in x's dtype.

    >>> row_product(torch.ones(1, 1, 3), torch.ones(2, 3), torch.ones(2))
    tensor([[[4., 4.]]])
    """
    checks.dense("x", x, "[..., K]")
    checks.dense("weight", weight, "[N, K]")
    if x.device.type != "cpu":
        raise ValueError(f"x is on {x.device}; it must be on a CPU")
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"x {list(x.shape)} and weight {list(weight.shape)} do not fit; they must be [..., K] and [N, K]"
        )
    N, K = weight.shape
    checks.tensor("weight", weight, (N, K), "[N, K]", x.device, "x")
    tensors = {"x": x, "weight": weight}
    if bias is not None:
        checks.tensor("bias", bias, (N,), "[N]", x.device, "x")
        tensors["bias"] = bias
    checks.same_dtype(**tensors)
    rows = x.numel() // K
    if rows > MOST_ROWS:
        raise ValueError(f"x has {rows} rows; use torch.nn.functional.linear for more than {MOST_ROWS}")
    if tracing.needs_gradient(tensors.values()) or tracing.is_traced(tensors.values()):
        return _operator(x, weight, bias)
    return _forward(x, weight, bias)


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    return bind(dtype, "osdn_product", FIELDS, LAYOUT.size, ("osdn_row_products",))[0]


class Product(NamedTuple):
    """The arguments of `row_product`, for quantized weights too.

    In int8 they have one scale per row: `x @ (weight * scales[:, None]).T`.  In 4 bits, 32 neighbours lie in
    16 bytes, the first 16 in the low halves, and stand for `scale * code + zero`.
    """

    x: Tensor  # [..., K]; with quantized weights not in float64
    weight: Tensor  # [N, K] in x's dtype or int8, or [N, K / 2] in uint8; K is then a multiple of 32
    bias: Tensor | None = None  # [N] in x's dtype
    scales: Tensor | None = None  # of int8 [N] in float32; of 4 bits [N, K / 32] in bfloat16
    zeros: Tensor | None = None  # of 4 bits [N, K / 32] in bfloat16

    @property
    def bits(self) -> int:
        """Of quantized weights; 0 otherwise."""
        return {torch.int8: 8, torch.uint8: 4}.get(self.weight.dtype, 0)


def row_products(products: Sequence[Product]) -> list[Tensor]:
    """Several products by one call, in which threads wait for each other only once.

    Every x has the same dtype and is on a CPU.  Sizes and dtypes are not checked: the caller must do that.
    """
    contiguous = [p._replace(x=p.x.resolve_neg().contiguous()) for p in products]
    outputs = [p.x.new_empty(*p.x.shape[:-1], len(p.weight)) for p in products]
    call(_kernel(wide(outputs[0].dtype)), packed(contiguous, outputs))
    return outputs


def packed(products: Sequence[Product], outputs: Sequence[Tensor], add: Tensor | None = None) -> bytes:
    """Products of contiguous tensors as the kernel takes them; `add` is added to each."""
    elements, threads = element(outputs[0].dtype), torch.get_num_threads()
    calls = b""
    for i, (p, out) in enumerate(zip(products, outputs)):
        pointers = [0 if y is None else y.data_ptr() for y in (*p, add, out)]
        N, K = out.shape[-1], p.x.shape[-1]
        more = len(products) - 1 - i
        calls += LAYOUT.pack(*pointers, p.x.numel() // K, N, K, elements, p.bits, threads, more)
    return calls


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.resolve_neg().contiguous()
    return row_products([Product(x, weight.resolve_neg().contiguous(), bias)])[0]


_operator = torch.library.custom_op("osdn::cpu_row_product", _forward, mutates_args=(), device_types="cpu")


@_operator.register_fake
def _(x, weight, bias):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], weight.shape[0])
