"""How a kernel is launched: its block sizes and warps for this GPU and these sizes, and the launch itself.

Every launch of the package goes through `run`, so that what is compiled ahead of time (`recording`) is what a
GPU would be given.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Options = dict[str, int]


def _row(warps: int, stages: int = 1, **blocks: int) -> Options:
    return {**blocks, "num_warps": warps, "num_stages": stages}


# Block sizes, warps and pipeline stages, by kernel and by the beginning of the GPU's name: sm_9x, sm_10x and
# gfx9xx have their own where they differ.  The first of a list is launched; OSDN_TRITON_AUTOTUNE=1 times
# them all, once a shape, and keeps the result on disk.  Each compiles without a spill for bfloat16 at the
# presets' sizes (`python -m osdn.ops.triton.aot`); none has been timed on a GPU yet.
TABLE: dict[str, dict[str, list[Options]]] = {
    "precondition_kernel": {"": [_row(1)]},
    "precondition_back_kernel": {"": [_row(1)]},
    "system_kernel": {"": [_row(8, BK=32)]},
    "scale_scan_kernel": {"": [_row(4), _row(8)]},
    "scale_keys_kernel": {"": [_row(4, BK=32)]},
    "sums_back_kernel": {"": [_row(4, BK=32)]},
    "scale_scan_back_kernel": {"": [_row(4), _row(8)]},
    "scale_keys_back_kernel": {"": [_row(4, BK=32)]},
    "gram_kernel": {
        "": [_row(4, BK=32), _row(8, BK=32)],
        "sm_9": [_row(8, BK=64), _row(4, BK=64)],
        "sm_10": [_row(8, BK=64), _row(4, BK=64)],
    },
    "gram_kernel of channels": {
        "": [_row(8, BK=16)],
        "sm_9": [_row(8, BK=32)],
        "sm_10": [_row(8, BK=32)],
        "gfx9": [_row(8, BK=32)],
    },
    "solve_kernel": {"": [_row(8, BK=64, BV=64), _row(4, BK=32, BV=64)]},
    "scan_kernel": {
        "": [_row(4, 2, BV=32), _row(4, 2, BV=16), _row(8, 2, BV=64)],
        "gfx9": [_row(4, 2, BV=32), _row(4, 2, BV=16)],
    },
    "read_kernel": {"": [_row(4, 2, BK=64, BV=64), _row(8, 2, BK=64, BV=128)]},
    "scan_back_kernel": {
        "": [_row(8, 2, BV=32), _row(8, 2, BV=16)],
        "gfx9": [_row(4, 1, BV=32), _row(4, 1, BV=16)],
    },
    "errors_back_kernel": {"": [_row(8, 2, BV=32)], "sm_9": [_row(8, BV=64)], "sm_10": [_row(8, BV=64)]},
    "keys_back_kernel": {
        "": [_row(8, BK=32, BV=64)],
        "sm_9": [_row(8, BK=64, BV=64)],
        "sm_10": [_row(8, BK=64, BV=64)],
    },
    "keys_back_kernel of channels": {"": [_row(8, BK=16, BV=64)], "gfx9": [_row(4, BK=32, BV=64)]},
    "recurrent_kernel": {"": [_row(4, BV=16), _row(8, BV=16)]},
}

# Arguments that are integers at run time; all others are constants of the compilation.
INTEGERS = ("tokens_in_all",)

# A multiplication and an addition may be one instruction.
COMPILER = {"enable_fp_fusion": True}


class Launch(NamedTuple):
    """A launch that was recorded rather than made."""

    kernel: Any
    arguments: dict[str, Any]
    candidates: list[Options]  # the first is what is launched


_recorder: tuple[str, list[Launch]] | None = None


@contextmanager
def recording(architecture: str) -> Iterator[list[Launch]]:
    """Within it, `run` launches nothing and writes down what it would launch on `architecture`."""
    global _recorder
    _recorder = (architecture, [])
    try:
        yield _recorder[1]
    finally:
        _recorder = None


def run(
    kernel: Any,
    grid: Callable[[Options], tuple[int, ...]],
    like: Tensor,
    sizes: dict[str, int],
    **arguments: Any,
) -> None:
    """Launch `kernel` on the device and in the dtype of `like`.

    `sizes` may hold more than the kernel takes; `grid` is called with the block sizes.
    """
    name = architecture(like.device) if _recorder is None else _recorder[0]
    constants = {**sizes, **_precision(like.dtype, name)}
    arguments |= {x: constants[x] for x in kernel.arg_names if x in constants}
    rows = _rows(kernel.__name__, sizes.get("DECAY"), name)
    options = [_fit(row, sizes, like.element_size()) for row in rows]
    if _recorder is not None:
        _recorder[1].append(Launch(kernel, arguments, options))
        return
    if not all(grid(options[0])):
        return
    with torch.cuda.device_of(like):
        if os.environ.get("OSDN_TRITON_AUTOTUNE") == "1" and len(options) > 1:
            _autotuned(kernel, tuple(tuple(row.items()) for row in options))[grid](**arguments)
        else:
            kernel[grid(options[0])](**arguments, **options[0], **COMPILER)


def over_columns(V: int, N: int, HV: int) -> Callable[[Options], tuple[int, ...]]:
    """One program a sequence, head and block of value columns; the columns of a sequence share its keys.

    A grid's first axis may have 2**31 - 1 programs, the others 65,535, which a batch or packing can exceed.
    """
    return lambda o: (triton.cdiv(V, o["BV"]) * N, HV)


@cache
def architecture(device: torch.device) -> str:
    """`sm_90`, `gfx942` and so on; `interpreter` on a CPU."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _rows(kernel: str, decay: int | None, name: str) -> list[Options]:
    """The rows for the longest beginning of the GPU's name that has some."""
    channels = f"{kernel} of channels"
    table = TABLE[channels if decay == 2 and channels in TABLE else kernel]
    return table[max((prefix for prefix in table if name.startswith(prefix)), key=len)]


def _fit(row: Options, sizes: dict[str, int], element_size: int) -> Options:
    """No block is larger than what it covers, nor smaller than a matrix unit takes.

    The table is for keys of 256 bytes, 128 channels of 16 bits; blocks shrink as keys grow.
    """
    shrink = max(1, triton.next_power_of_2(sizes["K"]) * element_size // 256)
    if shrink > 1 and row["num_warps"] > 1:
        row = {**row, "num_warps": 8, "num_stages": 1}
    limits = {"BK": sizes["K"], "BV": sizes.get("V", 1)}
    fitted = {
        x: max(16, min(row[x] // shrink, triton.next_power_of_2(limit)))
        for x, limit in limits.items()
        if x in row
    }
    return {**row, **fitted}


def _precision(dtype: torch.dtype, name: str) -> dict[str, Any]:
    """What matrix products are made of: operands of 16 bits as they come, float32 without losing its digits.

    DOT is the dtype of operands, PRECISION what is made of float32 ones, PRECISE the same where 16-bit inputs
    do not excuse it, ROUGH the fastest there is.
    """
    operands = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    if name == "interpreter" and operands is tl.bfloat16:  # its products of bfloat16 are wrong
        operands = tl.float32
    if not name.startswith("sm_"):
        return {"DOT": operands, "ROUGH": "ieee", "PRECISION": "ieee", "PRECISE": "ieee"}
    precision = "tf32x3" if operands is tl.float32 else "tf32"
    return {"DOT": operands, "ROUGH": "tf32", "PRECISION": precision, "PRECISE": "tf32x3"}


@cache
def _autotuned(kernel: Any, rows: tuple[tuple[tuple[str, int], ...], ...]) -> Any:
    def config(row: Options) -> triton.Config:
        blocks = {x: row[x] for x in row if not x.startswith("num_")}
        return triton.Config(blocks, num_warps=row["num_warps"], num_stages=row["num_stages"])

    def named(*names: str) -> list[str]:
        return [x for x in names if x in kernel.arg_names]

    return triton.autotune(
        [config(dict(row)) for row in rows],
        key=named("H", "HV", "K", "V", "DECAY"),
        # Timing runs a kernel many times: decoding writes its state over the one it read, and larger blocks
        # leave alone what smaller ones wrote of a decay's gradient.
        restore_value=named("final_state", "grad_g"),
        cache_results=True,
    )(kernel)
