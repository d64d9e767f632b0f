"""The operators in 16 bits against float32, in one process.

    python benchmarks/half.py            # one thread, CPU time: about a minute
    python benchmarks/half.py --threads 2

Every call is run once per round, round after round; the table shows the best round's milliseconds and their
ratio to float32.  A kernel alone writes into tensors that are there already; a whole call allocates them too.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from osdn.benchmarks.ops import Workload
from osdn.ops import cpu, delta_rule, online_scaled_delta_rule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Calls = dict[tuple[str, torch.dtype], Callable[[], Any]]


def kernels(name: str, p: Workload, dtype: torch.dtype, decay: Any, online: bool) -> Calls:
    """Forward and backward without their surroundings."""
    q, k, v, beta = p.inputs
    settings = {"rule": 1, "beta_aware": 1, "eta": 0.003, "low": 0.5, "high": 2.0, "eps": 1e-6}
    numbers = list(cpu.Numbers(scale=k.shape[3] ** -0.5, **settings if online else {}))
    outputs = cpu._forward_outputs(k, v, None, numbers, True)
    inputs = (q, k, v, beta, None, decay, *[None] * 6)
    grads = cpu._gradients(k, v, beta, None, decay, *[None] * 5)
    forth = dict(zip(cpu.POINTERS, (*inputs, *outputs)))
    back = dict(zip(cpu.POINTERS, (*inputs, None, None, None, *outputs[3:], p.grad, None, None, *grads)))
    N, HV = k.shape[0], v.shape[2]
    return {
        (f"{name}, kernel, forward", dtype): lambda: cpu._run("forward", forth, N, HV, numbers),
        (f"{name}, kernel, backward", dtype): lambda: cpu._run("backward", back, N, HV, numbers),
    }


def operator_calls(name: str, p: Workload, dtype: torch.dtype, decay: Any, online: bool) -> Calls:
    def run(*inputs: torch.Tensor) -> torch.Tensor:
        operator = online_scaled_delta_rule if online else delta_rule
        return operator(*inputs, log_decay=decay, backend="cpu")[0]

    def both() -> Any:
        return torch.autograd.grad(run(*p.leaves), p.leaves, p.grad)

    return {
        (f"{name}, call, forward", dtype): lambda: run(*p.inputs),
        (f"{name}, call, with backward", dtype): both,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    calls: Calls = {}
    for dtype in DTYPES:
        p = Workload(1, arguments.tokens, 8, 128, 128, dtype=dtype)
        for name, decay in {"delta_net": None, "gdn": p.decay, "kda": p.channel_decay}.items():
            calls |= kernels(name, p, dtype, decay, False) | operator_calls(name, p, dtype, decay, False)
        calls |= kernels("osdn", p, dtype, None, True) | operator_calls("osdn", p, dtype, None, True)
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(arguments.rounds):
        for key, call in calls.items():
            start = clock()
            call()
            best[key] = min(best[key], clock() - start)
    for name in dict.fromkeys(name for name, _ in calls):
        row = [f"{str(d)[6:]} {best[name, d] * 1e3:.2f} ms" for d in DTYPES]
        ratios = [f"{best[name, d] / best[name, torch.float32]:.2f}" for d in DTYPES[1:]]
        print(f"{name:32}", *row, "ratios", *ratios)


if __name__ == "__main__":
    main()
