"""How Python calls a compiled kernel: one packed struct of native 8-byte fields."""

import ctypes
import re
import struct
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from osdn.ops.cpu.build import library

Kernel = Callable[[bytes], int]
HALVES = {torch.bfloat16: 1, torch.float16: 2}  # as in half.h


def element(dtype: torch.dtype) -> int:
    """The code of a tensor's dtype in a kernel call; 0 is the dtype that the library computes in."""
    return HALVES.get(dtype, 0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def readable(dtype: torch.dtype, inputs: torch.dtype) -> bool:
    """Whether a kernel for such inputs reads parameters of `dtype`: as it computes, or 16 bits as float32."""
    return dtype == wide(inputs) or (dtype in HALVES and wide(inputs) == torch.float32)


def bind(
    dtype: torch.dtype, prefix: str, fields: Iterable[str], size: int, names: Iterable[str]
) -> list[Kernel]:
    """The functions of the library for a dtype, once its struct is found to have these fields.

    The library says what its struct looks like in `{prefix}_call` and `{prefix}_size`; a field out of place
    would be a wild pointer.
    """
    compiled = library("double" if dtype == torch.float64 else "float")
    symbol = ctypes.c_char.in_dll(compiled, f"{prefix}_call")
    declaration = ctypes.c_char_p(ctypes.addressof(symbol)).value or b""
    declared = re.findall(r"(\w+)\s*[,;]", declaration.decode())
    if (ctypes.c_int64.in_dll(compiled, f"{prefix}_size").value, declared) != (size, list(fields)):
        raise RuntimeError(f"the struct behind {prefix}_call and its fields in osdn/ops/cpu differ")
    functions = [getattr(compiled, name) for name in names]
    for function in functions:
        function.argtypes = [ctypes.c_char_p]
    return functions


def run(kernel: Kernel, layout: struct.Struct, fields: Iterable[Tensor | float | None]) -> None:
    """Packs a call and makes it.  A tensor is its address, an absent one is null."""
    call(kernel, layout.pack(*[x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in fields]))


def call(kernel: Kernel, packed: bytes) -> None:
    if kernel(packed):
        raise MemoryError("out of memory in osdn's CPU kernels")
