"""Decoding on a CPU: linear layers on one row, or a few, with several kernels, and whole models.

    python benchmarks/decoding.py              # the matrices of a 340M model, about a minute on two cores
    python benchmarks/decoding.py --rows 4
    python benchmarks/decoding.py --model osdn-340m --dtype bfloat16   # a whole decoding step, and its parts

Weights do not fit the caches: every call reads other ones, as many as fill `--gigabytes`.  The table
shows the best call of each kind, in ms, in gigabytes of weights per second, and as a ratio to F.linear in
bfloat16; `torch.sum` over as many bytes in float32 shows what the memory gives.  Of a model, with random
weights: a step by the layers' own calls, one with the compiled step in each mixer, and its linear layers.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.layers import decoding
from osdn.ops.cpu.row_product import row_product

SHAPES = {"1024 x 1024": (1024, 1024), "1024 to 4096": (4096, 1024), "4096 to 1024": (1024, 4096),
          "1024 to 32000": (32000, 1024)}  # fmt: skip
GROUP = 128  # channels of an int4 weight that share a scale
Call = Callable[[Tensor, Any], Tensor]


def clock() -> float:
    """Of one thread its CPU time, which other processes leave alone."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def int4(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight[0], GROUP, weight[1])


def int8(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.ops.aten._weight_int8pack_mm(x, *weight)


def packed_int4(N: int, K: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed, torch.rand(K // GROUP, N, 2).bfloat16()


def packed_int8(N: int, K: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N).bfloat16()


def float_weight(dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    return lambda N, K: torch.randn(1, K).to(dtype).expand(N, K).contiguous()


# name: how to multiply, dtype of x, a weight, its bytes per element
CONTENDERS: dict[str, tuple[Call, torch.dtype, Callable[[int, int], Any], float]] = {
    "torch.sum, float32": (lambda x, w: w.sum(), torch.float32, float_weight(torch.float32), 4),
    "F.linear, float32": (F.linear, torch.float32, float_weight(torch.float32), 4),
    "row_product, float32": (row_product, torch.float32, float_weight(torch.float32), 4),
    "F.linear, bfloat16": (F.linear, torch.bfloat16, float_weight(torch.bfloat16), 2),
    "row_product, bfloat16": (row_product, torch.bfloat16, float_weight(torch.bfloat16), 2),
    "int8 per channel": (int8, torch.bfloat16, packed_int8, 1),
    f"int4 in groups of {GROUP}": (int4, torch.bfloat16, packed_int4, 0.5),
}


@torch.inference_mode()
def best_times(rows: int, N: int, K: int, gigabytes: float, rounds: int) -> dict[str, float]:
    """Seconds of the best call of every contender."""
    best = dict.fromkeys(CONTENDERS, float("inf"))
    for name, (call, dtype, weight, size) in CONTENDERS.items():
        copies = max(3, int(gigabytes * 1e9 / (N * K * size)))
        first = weight(N, K)
        weights = [first, *(_clone(first) for _ in range(copies - 1))]
        x = torch.randn(rows, K).to(dtype)
        for _ in range(rounds):
            for w in weights:
                start = clock()
                call(x, w)
                best[name] = min(best[name], clock() - start)
    return best


def _clone(weight: Any) -> Any:
    return weight.clone() if isinstance(weight, Tensor) else tuple(part.clone() for part in weight)


@torch.no_grad()
def decode(name: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of the best decoding step of a model, and of its linear layers alone."""
    torch.manual_seed(0)
    model = OSDNForCausalLM(OSDNConfig.from_preset(name)).to(dtype).eval()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(1, m.in_features).to(dtype) for m in layers}
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(torch.arange(16)[None], past_key_values=cache)
    fused = decoding.fused

    def step(cache: DynamicCache, choose: Any) -> None:
        decoding.fused = choose
        model(torch.tensor([[1]]), past_key_values=cache)
        decoding.fused = fused

    def linears(multiply: Any) -> None:
        for m in layers:
            bias = None if m.bias is None else m.bias.detach()
            multiply(inputs[m.in_features], m.weight.detach(), bias)

    calls = {
        "the layers' own calls": lambda: step(caches[0], lambda *_: False),
        "the compiled step": lambda: step(caches[1], fused),
        "linear layers, F.linear": lambda: linears(F.linear),
        "linear layers, row_product": lambda: linears(row_product),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for key, call in calls.items():
            start = clock()
            call()
            best[key] = min(best[key], clock() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="a preset, such as osdn-340m")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.model:
        best = decode(arguments.model, getattr(torch, arguments.dtype), 5 * arguments.rounds)
        print(f"{arguments.model}, {arguments.dtype}, one token, {arguments.threads} thread(s)")
        for name, seconds in best.items():
            ratio = seconds / best["linear layers, F.linear"]
            print(f"  {name:28} {seconds * 1e3:8.1f} ms {ratio:6.2f} x")
        return
    for title, (N, K) in SHAPES.items():
        print(f"{title}, {arguments.rows} row(s), {arguments.threads} thread(s)")
        best = best_times(arguments.rows, N, K, arguments.gigabytes, arguments.rounds)
        for name, seconds in best.items():
            rate = N * K * CONTENDERS[name][3] / seconds / 1e9
            ratio = best["F.linear, bfloat16"] / seconds
            print(f"  {name:24} {seconds * 1e3:8.3f} ms {rate:6.1f} GB/s {ratio:6.2f} x")


if __name__ == "__main__":
    main()
