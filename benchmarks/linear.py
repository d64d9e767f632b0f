"""Linear layers on one row or a few, as in decoding, by several kernels.

    python benchmarks/linear.py              # the matrices of a 340M model, about a minute on two cores
    python benchmarks/linear.py --rows 4

Weights do not fit the caches: every call reads other ones, as many as fill `--gigabytes`.  The table shows
the best call of each kind in ms, in gigabytes of weights per second, and as a ratio to F.linear in bfloat16;
`torch.sum` over as many bytes in float32 shows what the memory gives.  Whole models: benchmarks/models.py.
"""

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdn.models.quantization import Int4Linear, Int8Linear, QuantizedLinear
from osdn.ops.cpu.row_product import row_product

SHAPES = {"1024 x 1024": (1024, 1024), "1024 to 4096": (4096, 1024), "4096 to 1024": (1024, 4096),
          "1024 to 32000": (32000, 1024)}  # fmt: skip
GROUP = 32  # channels of an int4 weight that share a scale, as in ours
Call = Callable[[Tensor, Any], Tensor]


def clock() -> float:
    """Of one thread its CPU time, which other processes leave alone."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def aten_int4(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight[0], GROUP, weight[1])


def aten_int8(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.ops.aten._weight_int8pack_mm(x, *weight)


def packed_int4(N: int, K: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed, torch.rand(K // GROUP, N, 2).bfloat16()


def packed_int8(N: int, K: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N).bfloat16()


def float_weight(dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    return lambda N, K: torch.randn(1, K).to(dtype).expand(N, K).contiguous()


def quantized(kind: type[QuantizedLinear]) -> Callable[[int, int], QuantizedLinear]:
    return lambda N, K: kind(nn.Linear(K, N, bias=False))


# name: how to multiply, dtype of x, a weight, its bytes per element
CONTENDERS: dict[str, tuple[Call, torch.dtype, Callable[[int, int], Any], float]] = {
    "torch.sum, float32": (lambda x, w: w.sum(), torch.float32, float_weight(torch.float32), 4),
    "F.linear, float32": (F.linear, torch.float32, float_weight(torch.float32), 4),
    "row_product, float32": (row_product, torch.float32, float_weight(torch.float32), 4),
    "F.linear, bfloat16": (F.linear, torch.bfloat16, float_weight(torch.bfloat16), 2),
    "row_product, bfloat16": (row_product, torch.bfloat16, float_weight(torch.bfloat16), 2),
    "ATen, int8": (aten_int8, torch.bfloat16, packed_int8, 1),
    "row_product, int8": (lambda x, linear: linear(x), torch.bfloat16, quantized(Int8Linear), 1),
    "ATen, int4": (aten_int4, torch.bfloat16, packed_int4, 0.5),
    "row_product, int4": (lambda x, linear: linear(x), torch.bfloat16, quantized(Int4Linear), 0.5),
}


@torch.inference_mode()
def best_times(rows: int, N: int, K: int, gigabytes: float, rounds: int) -> dict[str, float]:
    """Seconds of the best call of every contender."""
    best = dict.fromkeys(CONTENDERS, float("inf"))
    for name, (call, dtype, weight, size) in CONTENDERS.items():
        copies = max(3, int(gigabytes * 1e9 / (N * K * size)))
        first = weight(N, K)
        weights = [first, *(copy.deepcopy(first) for _ in range(copies - 1))]
        x = torch.randn(rows, K).to(dtype)
        for _ in range(rounds):
            for w in weights:
                start = clock()
                call(x, w)
                best[name] = min(best[name], clock() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for title, (N, K) in SHAPES.items():
        print(f"{title}, {arguments.rows} row(s), {arguments.threads} thread(s)")
        best = best_times(arguments.rows, N, K, arguments.gigabytes, arguments.rounds)
        for name, seconds in best.items():
            rate = N * K * CONTENDERS[name][3] / seconds / 1e9
            ratio = best["F.linear, bfloat16"] / seconds
            print(f"  {name:24} {seconds * 1e3:8.3f} ms {rate:6.1f} GB/s {ratio:6.2f} x")


if __name__ == "__main__":
    main()
