"""A list of kernels that run as one call, prepared once: program.h."""

import ctypes
import struct
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from osdn.ops.cpu import decode_step, row_product
from osdn.ops.cpu.binding import Kernel, bind, call, element, wide
from osdn.ops.cpu.decode_step import StepInputs, StepOutputs, StepSettings
from osdn.ops.cpu.row_product import Product

INSTRUCTION = struct.Struct("2q")
END, PRODUCTS, STEP, NORM, GLU = range(5)  # as in program.h
ELEMENTWISE_FIELDS = ("x", "other", "weight", "out", "M", "D", "element", "weight_element", "eps")
ELEMENTWISE = struct.Struct(f"{len(ELEMENTWISE_FIELDS) - 1}qd")
STATES = {  # the fields of a step that change from call to call, and where its results go
    "q_tail": "next_q_tail",
    "k_tail": "next_k_tail",
    "v_tail": "next_v_tail",
    "state": "final_state",
    "scale": "final_scale",
}


class Program:
    """Kernels over tensors that stay where they are, in the order in which they are added.

    It keeps the tensors that it was given and works on their memory.  The states of its steps are passed to
    every run and updated in place.

    >>> x, weight = torch.randn(1, 64), torch.randn(8, 64)
    >>> program = Program(x.dtype)
    >>> (y,) = program.products([Product(x, weight)])
    >>> program.run()
    >>> torch.allclose(y, x @ weight.T, atol=1e-5)
    True
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._calls: list[tuple[int, bytes]] = []
        self._tensors: list[Tensor] = []  # they must not be freed
        self._steps: list[int] = []  # places of the steps among the calls
        self._dtype = wide(dtype)
        self._memory: ctypes.Array[ctypes.c_char] | None = None
        self._places: list[list[int]] = []  # of every step's states in that memory

    def products(self, products: Sequence[Product], add: Tensor | None = None) -> list[Tensor]:
        """Outputs `[M, N]` of products of `[M, K]`; with `add` `[M, N]`, they are added to it in place."""
        outputs = [p.x.new_empty(len(p.x), len(p.weight)) if add is None else add for p in products]
        tensors = [x for product in products for x in product if x is not None]
        self._add(PRODUCTS, row_product.packed(products, outputs, add), [*tensors, *outputs])
        return outputs

    def step(self, inputs: StepInputs, settings: StepSettings) -> Tensor:
        """The outputs `[N, HV * V]` of a decoding step; its states are placeholders for those of each run."""
        decode_step.check(inputs, settings)
        out = inputs.v.new_empty(inputs.v.shape)
        outputs = StepOutputs(out, inputs.q_tail, inputs.k_tail, inputs.v_tail, inputs.state, inputs.state)
        self._steps.append(len(self._calls))
        packed = decode_step.packed(inputs, settings.numbers(inputs.state.shape[2]), outputs)
        constant = [x for name, x in inputs._asdict().items() if x is not None and name not in STATES]
        self._add(STEP, packed, [out, *constant])
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x ** 2) + eps) * weight` of rows `[M, D]`."""
        return self._elementwise(NORM, x, weight=weight, eps=eps)

    def glu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`."""
        return self._elementwise(GLU, gate, other=up)

    def _elementwise(
        self,
        kind: int,
        x: Tensor,
        other: Tensor | None = None,
        weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        out = x.new_empty(x.shape)
        tensors = (x, other, weight, out)
        pointers = [0 if y is None else y.data_ptr() for y in tensors]
        elements = [element(x.dtype), 0 if weight is None else element(weight.dtype)]
        packed = ELEMENTWISE.pack(*pointers, *x.shape, *elements, eps)
        self._add(kind, packed, [y for y in tensors if y is not None])
        return out

    def _add(self, kind: int, packed: bytes, tensors: Sequence[Tensor]) -> None:
        if not all(x.is_contiguous() for x in tensors):
            raise ValueError("a program needs contiguous tensors")
        self._calls.append((kind, packed))
        self._tensors += tensors
        self._memory = None

    def run(self, states: Sequence[Sequence[Tensor | None]] = ()) -> None:
        """Run all kernels; `states` are q_tail, k_tail, v_tail, state and scale of every step, in order."""
        memory = self._memory
        if memory is None:
            memory = self._memory = self._assemble()
        if len(states) != len(self._steps):
            raise ValueError(f"there are {len(states)} states for {len(self._steps)} steps")
        for place, tensors in zip(self._places, states):
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
            for offset, address in zip(place, addresses * 2):
                struct.pack_into("q", memory, offset, address)
        call(_kernel(self._dtype), memory)  # type: ignore[arg-type]

    def _assemble(self) -> "ctypes.Array[ctypes.c_char]":
        """Instructions, then what they point at."""
        head = INSTRUCTION.size * (len(self._calls) + 1)
        memory = ctypes.create_string_buffer(head + sum(len(packed) for _, packed in self._calls))
        base, offset = ctypes.addressof(memory), head
        offsets = []
        for i, (kind, packed) in enumerate(self._calls):
            INSTRUCTION.pack_into(memory, i * INSTRUCTION.size, kind, base + offset)
            ctypes.memmove(base + offset, packed, len(packed))
            offsets.append(offset)
            offset += len(packed)
        fields = (*decode_step.INPUTS, *decode_step.OUTPUTS)
        names = (*STATES, *STATES.values())
        self._places = [[offsets[i] + 8 * fields.index(name) for name in names] for i in self._steps]
        return memory


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    bind(dtype, "osdn_elementwise", ELEMENTWISE_FIELDS, ELEMENTWISE.size, ())
    return bind(dtype, "osdn_program", ("kind", "call"), INSTRUCTION.size, ("osdn_program",))[0]
