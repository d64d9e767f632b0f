"""What every kernel must move and multiply, and the time an H100's data sheet implies.  Nothing is measured.

`python -m osdn.ops.triton.roofline` prints the table of docs/gpu.md.  The launches are recorded on tensors
without memory; a kernel's bytes are those of its arguments, each read or written once, and its flops are
those of its matrix products.  A kernel takes at least the longer of the two, and a scan at least its depth.
"""

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

from osdn.ops.checks import Scaling
from osdn.ops.triton import launch, phase1, phase1_backward, phase2, phase2_backward
from osdn.ops.triton.chunks import chunks_of

# NVIDIA H100 SXM data sheet: memory bandwidth, dense bfloat16 and TF32 rates, boost clock.
BANDWIDTH = 3.35e12
BF16 = 989.4e12
TF32 = 494.7e12
CLOCK = 1.98e9
# A guess, for the order of magnitude alone: a sum over a warp and the arithmetic around it.
CYCLES_A_TOKEN = 200

ONLY_WHERE_THE_BOX_BINDS = {
    "scale_scan_kernel": ("beta", "w"),
    "scale_scan_back_kernel": ("beta", "checkpoints", "grad_w", "grad_k", "grad_beta", "scratch"),
}


class Cost(NamedTuple):
    kernel: str
    bytes: int
    operand_flops: int  # of products of the inputs' dtype
    float_flops: int  # of products of float32 in TF32
    depth: int  # steps that wait for one another

    @property
    def moving(self) -> float:
        return self.bytes / BANDWIDTH

    @property
    def multiplying(self) -> float:
        return self.operand_flops / BF16 + self.float_flops / TF32

    @property
    def seconds(self) -> float:
        return max(self.moving, self.multiplying)


def products(kernel: str, K: int, V: int, DECAY: int, C: int = 64, LEVELS: int = 6) -> tuple[int, int]:
    """Multiply-adds a chunk and head: of operands in the inputs' dtype, and of float32."""
    channel = DECAY == 2
    inverse = 2 * (LEVELS - 1) * C**3
    return {
        "gram_kernel": ((2 * LEVELS + 1 if channel else 2) * C * C * K, inverse),
        "solve_kernel": (C * C * (K + V), 0),
        "scan_kernel": (2 * C * K * V, 0),
        "read_kernel": (C * K * V + C * C * V, 0),
        "scan_back_kernel": (C * C * V + 3 * C * K * V, 0),
        "errors_back_kernel": (3 * C * C * V, 0),
        "keys_back_kernel": (
            3 * C * K * V + 4 * (LEVELS if channel else 1) * C * C * K,
            2 * C * C * K if channel else 0,
        ),
        "system_kernel": (0, 3 * C * C * K + inverse),  # a product of full precision is three
    }.get(kernel, (0, 0))


def cost(x: launch.Launch) -> Cost:
    idle = ONLY_WHERE_THE_BOX_BINDS.get(x.kernel.__name__, ())
    tensors = {id(t): t for name, t in x.arguments.items() if isinstance(t, Tensor) and name not in idle}
    moved = sum(t.numel() * t.element_size() for t in tensors.values())
    sizes = {name: x.arguments.get(name, 0) for name in ("K", "V", "DECAY", "C", "LEVELS")}
    tasks = x.arguments["chunks"].shape[0] * x.arguments["HV"]
    in_dtype, in_float = products(x.kernel.__name__, **sizes)
    return Cost(x.kernel.__name__, moved, 2 * tasks * in_dtype, 2 * tasks * in_float, _depth(x))


def _depth(x: launch.Launch) -> int:
    if "sequences" not in x.arguments:
        return 1
    chunks = x.arguments["chunks"].shape[0] // (x.arguments["sequences"].shape[0] - 1)
    return chunks * (x.arguments["C"] if x.kernel.__name__.startswith("precondition") else 1)


def costs(
    B: int, T: int, H: int, K: int, V: int, decay: str, retention: bool = False, backward: bool = False
) -> tuple[list[Cost], list[Cost]]:
    """Of phase 1 and of phase 2, in bfloat16; with `retention` phase 1 goes token by token."""
    meta = torch.device("meta")

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    shapes = {"head": (B, T, H), "channel": (B, T, H, K)}
    q, k, w = (empty(B, T, H, K) for _ in range(3))
    v, beta = empty(B, T, H, V), empty(B, T, H)
    at = chunks_of(k, None)
    g = None if decay == "none" else empty(*shapes[decay], dtype=torch.float32)
    inputs = phase2.Inputs(q, k, v, beta, w, g, None, at)
    settings = Scaling(0.003, (0.5, 2.0), True, 1e-6)
    scaling = phase1.Inputs(k, beta, empty(*shapes["head"]) if retention else 1.0, None, settings, at)
    with launch.recording("sm_90") as first:
        write_keys, _, steps = phase1.forward(scaling)
        if backward:
            phase1_backward.backward(scaling, steps, write_keys, None)
    with launch.recording("sm_90") as second:
        phase2.forward(inputs, K**-0.5)
        if backward:
            phase2_backward.backward(inputs, K**-0.5, v, None, plain=False)
    return [cost(x) for x in first], [cost(x) for x in second]


def table(B: int, T: int, H: int, K: int, V: int, decay: str) -> str:
    lines = ["| phase | kernel | MB | GFLOP | memory, ms | arithmetic, ms | at least, ms | depth |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    by_chunks, second = costs(B, T, H, K, V, decay)
    by_tokens, _ = costs(B, T, H, K, V, decay, retention=True)
    phases = (("1, by chunks", by_chunks), ("1, by tokens", by_tokens), ("2", second))
    for phase, rows in phases:
        for c in rows:
            flops = c.operand_flops + c.float_flops
            times = " | ".join(f"{x * 1e3:.3f}" for x in (c.moving, c.multiplying, c.seconds))
            size = f"{c.bytes / 1e6:.0f} | {flops / 1e9:.0f}"
            lines.append(f"| {phase} | `{c.kernel}` | {size} | {times} | {c.depth} |")
    return "\n".join(lines)


def shares(B: int, T: int, H: int, K: int, V: int) -> str:
    """Phase 1's part of both phases, forward, and forward and backward."""
    lines = ["| backbone | pass | phase 1, ms | phase 2, ms | phase 1's share | the same, by tokens |"]
    lines.append("|---|---|---|---|---|---|")
    for backbone, decay in (("DeltaNet", "none"), ("Gated DeltaNet", "head"), ("KDA", "channel")):
        for backward in (False, True):
            first, second = (sum(c.seconds for c in x) for x in costs(B, T, H, K, V, decay, False, backward))
            tokens = sum(c.seconds for c in costs(B, T, H, K, V, decay, True, backward)[0])
            name = "forward and backward" if backward else "forward"
            lines.append(
                f"| {backbone} | {name} | {first * 1e3:.2f} | {second * 1e3:.2f} | "
                f"{first / (first + second):.1%} | {tokens / (tokens + second):.1%} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m osdn.ops.triton.roofline", description=__doc__.split("\n")[0]
    )
    for name, value in (("B", 1), ("T", 65536), ("H", 8), ("K", 128), ("V", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--decay", choices=("none", "head", "channel"), default="none")
    a = parser.parse_args()
    print(table(a.B, a.T, a.H, a.K, a.V, a.decay), end="\n\n")
    print(shares(a.B, a.T, a.H, a.K, a.V), end="\n\n")
    waiting = a.T * CYCLES_A_TOKEN / CLOCK
    print(f"{a.T} tokens that wait for one another, at {CYCLES_A_TOKEN} cycles each: {waiting * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
