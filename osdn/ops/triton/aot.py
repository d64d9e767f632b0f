"""Compiles every kernel for GPUs that are not there and reads what they need off the binaries.

`python -m osdn.ops.triton.aot` prints one line a kernel, variant and GPU, and fails if one spills, needs a
stack or more shared memory than the GPU has.  Nothing is listed by hand: the operators are called on zeros
and their launches recorded, with the block sizes each GPU would be given.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from osdn.ops.checks import Newton, Scaling, Squash
from osdn.ops.triton import decode, launch, phase1, phase1_backward, phase2, phase2_backward
from osdn.ops.triton.chunks import chunks_of


class GPU(NamedTuple):
    target: GPUTarget
    shared: (
        int  # bytes a block may have, CUDA C++ Programming Guide table "Technical Specifications"; LDS on AMD
    )


GPUS = {
    "sm_80": GPU(GPUTarget("cuda", 80, 32), 163 * 1024),  # A100
    "sm_90": GPU(GPUTarget("cuda", 90, 32), 227 * 1024),  # H100
    "sm_100": GPU(GPUTarget("cuda", 100, 32), 227 * 1024),  # B200
    "gfx942": GPU(GPUTarget("hip", "gfx942", 64), 64 * 1024),  # MI300X
}
SHAPES = [(128, 128), (128, 256)]  # K and V of the presets
DECAYS = ("none", "head", "channel")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}


class Resources(NamedTuple):
    registers: int  # a thread
    spilled: int  # registers on AMD; NVIDIA's spills are in the stack
    stack: int  # bytes a thread
    shared: int  # bytes a block


class Row(NamedTuple):
    gpu: str
    kernel: str
    variant: str
    options: launch.Options
    resources: Resources

    @property
    def fits(self) -> bool:
        r = self.resources
        return r.spilled == r.stack == 0 and r.shared <= GPUS[self.gpu].shared


def launches(
    gpu: str, K: int, V: int, decay: str, dtype: torch.dtype = torch.bfloat16
) -> list[launch.Launch]:
    """What both phases, their backwards and decoding launch on `gpu`, each kernel variant once."""
    with launch.recording(gpu) as recorded:
        for T in (64, phase1.PARALLEL_FROM):
            _call_everything(T, K, V, decay, dtype)
    distinct = {(x.kernel.__name__, _variant(x)): x for x in recorded}
    return list(distinct.values())


def _call_everything(T: int, K: int, V: int, decay: str, dtype: torch.dtype) -> None:
    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    H = 2
    shapes = {"head": (1, T, H), "channel": (1, T, H, K)}
    k, v, beta = zeros(1, T, H, K), zeros(1, T, H, V), zeros(1, T, H)
    at = chunks_of(k, None)
    state, d = zeros(1, H, K, V, dtype=torch.float32), zeros(1, H, K, dtype=torch.float32)
    g = None if decay == "none" else zeros(*shapes[decay], dtype=torch.float32)
    settings = Scaling(0.003, (0.5, 2.0), True, 1e-6)
    inputs = phase2.Inputs(k, k, v, beta, zeros(1, T, H, K), g, state, at)
    phase2.forward(inputs, K**-0.5)
    phase2_backward.backward(inputs, K**-0.5, v, state, plain=False)
    for retention in (1.0, zeros(*shapes["head"]), zeros(*shapes["channel"])):
        scaling = phase1.Inputs(k, beta, retention, d, settings, at)
        w, _, steps = phase1.forward(scaling)
        phase1_backward.backward(scaling, steps, w, d)
        decode.forward(inputs, scaling, K**-0.5)
        for rule, center in ((Newton(1.0, 1), None), (Squash(1.5, 1e-6), d[0, :, 0])):
            other = phase1.Inputs(k, beta, retention, d, rule, at, center)
            w, _, steps = phase1.forward(other)
            phase1_backward.backward(other, steps, w, d)
            decode.forward(inputs, other, K**-0.5)


def _variant(x: launch.Launch) -> str:
    """The sizes and cases that this compilation is for."""
    names = [name for name in ("K", "V", "DECAY", "RULE", "RETENTION") if name in x.arguments]
    variant = [f"{name}={x.arguments[name]}" for name in names]
    if x.arguments.get("chunk_decay") is not None:
        variant.append("decay")
    return " ".join(variant)


def compile_for(gpu: str, x: launch.Launch, blocks: launch.Options) -> Resources:
    arguments = {**x.arguments, **blocks}
    signature, constants, alignment = {}, {}, {}
    for index, name in enumerate(x.kernel.arg_names):
        value = arguments[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            alignment[index,] = [["tt.divisibility", 16]]  # as PyTorch allocates
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif name in launch.INTEGERS:
            signature[name] = "i32"
        else:
            signature[name] = "constexpr"
            constants[name] = value
    options = {name: blocks[name] for name in ("num_warps", "num_stages")}
    source = ASTSource(x.kernel, signature, constants, alignment)
    compiled = triton.compile(source, target=GPUS[gpu].target, options={**options, **launch.COMPILER})
    return _nvidia(compiled) if "cubin" in compiled.asm else _amd(compiled)


def _nvidia(compiled: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(usage["REG"], usage["LOCAL"], usage["STACK"], compiled.metadata.shared)


def _amd(compiled: Any) -> Resources:
    def field(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"])[0])

    registers, stack = field("vgpr_count"), field("private_segment_fixed_size")
    return Resources(registers, field("vgpr_spill_count"), stack, compiled.metadata.shared)


def report(
    gpus: list[str], shapes: list[tuple[int, int]], decays: list[str], dtype: torch.dtype, quick: bool
) -> Iterator[Row]:
    """With `quick`, the first shape and what is launched alone, without what autotuning would try."""
    for gpu in gpus:
        seen = set()  # a kernel that knows nothing of V or of decay comes up again
        for (K, V), decay in product(shapes[:1] if quick else shapes, decays):
            for x in launches(gpu, K, V, decay, dtype):
                name = (x.kernel.__name__, _variant(x))
                if name not in seen:
                    seen.add(name)
                    for blocks in x.candidates[:1] if quick else x.candidates:
                        yield Row(gpu, *name, blocks, compile_for(gpu, x, blocks))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m osdn.ops.triton.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", choices=list(GPUS), nargs="+", default=list(GPUS))
    parser.add_argument("--decay", choices=DECAYS, nargs="+", default=list(DECAYS))
    parser.add_argument("--shape", type=int, nargs=2, metavar=("K", "V"), help="instead of the presets' two")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="the first shape, and no rows for autotuning")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("unset TRITON_INTERPRET: the interpreter compiles nothing")
    print(f"{'GPU':7} {'kernel':25} {'variant':34} {'blocks':32} registers spilled stack shared")
    rows = []
    shapes = [tuple(arguments.shape)] if arguments.shape else SHAPES
    dtype = getattr(torch, arguments.dtype)
    for row in report(arguments.gpu, shapes, arguments.decay, dtype, arguments.quick):
        blocks = " ".join(f"{name.removeprefix('num_')}={value}" for name, value in row.options.items())
        r = row.resources
        line = f"{row.gpu:7} {row.kernel:25} {row.variant:34} {blocks:32} "
        line += f"{r.registers:9} {r.spilled:7} {r.stack:5} {r.shared:6}"
        print(line if row.fits else f"{line}  does not fit", flush=True)
        rows.append(row)
    for gpu in arguments.gpu:
        needs = [row.resources for row in rows if row.gpu == gpu]
        registers, shared = max(r.registers for r in needs), max(r.shared for r in needs)
        print(f"{gpu}: {len(needs)} compilations, up to {registers} registers and {shared} bytes shared")
    failed = sum(not row.fits for row in rows)
    if failed:
        sys.exit(f"{failed} of {len(rows)} compilations spill or do not fit")


if __name__ == "__main__":
    main()
