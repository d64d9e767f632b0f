"""The operators on a GPU: forward, forward and backward, and decoding, next to what the data sheet implies.

    python benchmarks/gpu.py            # every variant, four lengths
    python benchmarks/gpu.py --quick    # T = 2048 alone

The problems are those of benchmarks/ops.py, in bfloat16.  Every call is timed by `triton.testing.do_bench`,
which empties the cache before each run; the table shows the median.  Results go to runs/bench/gpu.json.
Without a CUDA or ROCm device it says so and ends.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from osdn.analysis.bench_ops import SEED, Problem, forward, forward_backward
from osdn.ops import available_backends, delta_rule, online_scaled_delta_rule
from osdn.records import save_json

DECAYS = {"delta_net": None, "gdn": "decay", "kda": "channel_decay"}
console = Console()


def problem(T: int) -> Problem:
    """B=1, H=8, K=V=128 on the GPU: queries, keys and values in bfloat16, gates in float32."""
    p = Problem(1, T, 8, 128, 128)
    dtypes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32)
    p.inputs = tuple(x.to("cuda", dtype) for x, dtype in zip(p.inputs, dtypes))
    p.leaves = [x.clone().requires_grad_() for x in p.inputs]
    p.grad = p.grad.to("cuda", torch.bfloat16)
    for name in ("decay", "channel_decay", "retention", "state", "scale"):
        setattr(p, name, getattr(p, name).to("cuda"))
    return p


def variants(p: Problem, backend: str) -> dict[str, Any]:
    """name -> function of (q, k, v, beta) that returns the outputs."""
    found: dict[str, Any] = {}
    for name, decay in DECAYS.items():
        common = {"log_decay": getattr(p, decay) if decay else None, "backend": backend}
        apf = {"retention": p.retention}
        online = name.replace("delta_net", "dn")
        found[name] = lambda *x, c=common: delta_rule(*x, **c)[0]
        found[f"os{online}"] = lambda *x, c=common: online_scaled_delta_rule(*x, **c)[0]
        found[f"os{online}-apf"] = lambda *x, c=common | apf: online_scaled_delta_rule(*x, **c)[0]
    return found


def decoding(p: Problem) -> dict[str, Any]:
    """One token, states in and out."""
    q, k, v, beta = p.inputs
    state = {"initial_state": p.state, "output_final_state": True}
    calls: dict[str, Any] = {}
    for name, decay in DECAYS.items():
        common = {**state, "log_decay": getattr(p, decay) if decay else None}
        online = name.replace("delta_net", "dn")
        calls[name] = lambda c=common: delta_rule(q, k, v, beta, **c)
        calls[f"os{online}"] = lambda c=common: online_scaled_delta_rule(
            q, k, v, beta, initial_scale=p.scale, **c
        )
    return {name: torch.no_grad()(call) for name, call in calls.items()}


def measure(title: str, calls: dict[str, Any]) -> dict[str, Any]:
    from triton.testing import do_bench

    table = Table("variant", "median ms", title=title, title_justify="left")
    times = {}
    for name, call in calls.items():
        times[name] = do_bench(call, return_mode="median")
        table.add_row(name, f"{times[name]:.3f}")
    console.print(table)
    return {"title": title, "ms": times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="T = 2048 alone")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the results")
    arguments = parser.parse_args()
    if "triton" not in available_backends("cuda"):
        print("no CUDA or ROCm device, or no triton: nothing was measured")
        return

    from osdn.ops.triton import roofline

    tables = []
    for T in (2048,) if arguments.quick else (2048, 8192, 32768, 65536):
        p = problem(T)
        for name, timed in (("forward", forward), ("forward and backward", forward_backward)):
            calls = {k: timed(p, f) for k, f in variants(p, "triton").items()}
            if T <= 8192:
                calls |= {
                    f"{k}, chunkwise": timed(p, f) for k, f in variants(p, "chunkwise").items() if k in DECAYS
                }
            tables.append(measure(f"{name}, B=1 T={T} H=8 K=V=128, bfloat16", calls))
        console.print(
            f"implied by an H100's data sheet:\n{roofline.shares(1, T, 8, 128, 128)}\n", markup=False
        )
    tables.append(measure("decoding one token, B=1 H=8 K=V=128, bfloat16", decoding(problem(1))))
    gpu = torch.cuda.get_device_name()
    saved = save_json(
        arguments.output / "gpu.json", {"kind": "gpu", "gpu": gpu, "seed": SEED, "tables": tables}
    )
    console.print(f"saved to {saved}")


if __name__ == "__main__":
    main()
