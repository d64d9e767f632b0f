"""The operators against their peers, side by side in one process.

    osdn bench ops                  # everything, about six minutes on two cores
    osdn bench ops --quick          # the main table only
    osdn bench ops --device cuda    # the GPU kernels (osdn/benchmarks/gpu.py)

Every contender runs once per round, so that slow spells of the machine affect all of them; the table shows
the best and the median round.  The limit is the arithmetic that the recurrence cannot avoid, 6 K V operations
per token and head forward and 20 K V forward and backward, at the speed that `torch.mm` reaches in the same
rounds.  Results go to runs/bench/ops.json and ops.svg.
"""

import statistics
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from osdn.benchmarks import onnx_runtime, paper_form
from osdn.ops import (
    available_backends,
    delta_rule,
    newton_delta_rule,
    online_scaled_delta_rule,
    pgdn_delta_rule,
)
from osdn.results import plots
from osdn.results.report import operator_table
from osdn.results.store import save_json
from osdn.results.tables import for_terminal
from osdn.terminal import progress_bar

console = Console(width=None if sys.stdout.isatty() else 110)
Call = Callable[[], Any]
SEED = 0
BACKBONES = ("delta_net", "gdn", "kda")
RULES = ("newton", "newton, blocks of 16", "pgdn")
VARIANTS = ("delta_net", "osdn", "osdn-apf", *RULES, "gdn", "osgdn", "kda", "oskda")
ONNX_RUNTIME = "gdn, ONNX Runtime"
FORWARD_ONLY = (
    ONNX_RUNTIME,
    "osdn, chunkwise",
    "the paper's form",
)  # no backward, or a slow one
MM = 1024  # the limit assumes the speed of a float32 product of two MM x MM matrices


class Workload:
    """Inputs of the operators, with and without gradients; gates and states are float32 for every `dtype`."""

    def __init__(
        self,
        B: int,
        T: int,
        H: int,
        K: int,
        V: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        generator = torch.Generator().manual_seed(SEED)
        self.shape = {"B": B, "T": T, "H": H, "K": K, "V": V}

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        q, k = (F.normalize(randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
        self.inputs = (q, k, randn(B, T, H, V).to(dtype), randn(B, T, H).sigmoid())
        self.decay = -randn(B, T, H).exp() / 10
        self.channel_decay = -randn(B, T, H, K).exp() / 10
        self.retention, self.gain = (randn(B, T, H) + 5).sigmoid(), randn(B, T, H).sigmoid()
        self.state, self.scale = randn(B, H, K, V), torch.ones(B, H, K, device=device)
        self.grad = randn(B, T, H, V).to(dtype)
        self.leaves = [x.clone().requires_grad_() for x in self.inputs]

    def macs(self) -> int:
        s = self.shape
        return s["B"] * s["T"] * s["H"] * s["K"] * s["V"]


def variants(p: Workload, backend: str, names: Collection[str] = VARIANTS) -> dict[str, Any]:
    """Functions of (q, k, v, beta) that return the outputs for sequences, by name and backend."""
    calls: dict[str, Any] = {
        "delta_net": lambda b, *x: delta_rule(*x, backend=b)[0],
        "osdn": lambda b, *x: online_scaled_delta_rule(*x, backend=b)[0],
        "osdn-apf": lambda b, *x: online_scaled_delta_rule(*x, retention=p.retention, backend=b)[0],
        "newton": lambda b, *x: newton_delta_rule(*x, backend=b)[0],
        "newton, blocks of 16": lambda b, *x: newton_delta_rule(*x, block_size=16, backend=b)[0],
        "pgdn": lambda b, q, k, v, beta: pgdn_delta_rule(
            q, k, v, beta, p.gain, retention=p.retention, backend=b
        )[0],
        "gdn": lambda b, *x: delta_rule(*x, log_decay=p.decay, backend=b)[0],
        "osgdn": lambda b, *x: online_scaled_delta_rule(*x, log_decay=p.decay, backend=b)[0],
        "kda": lambda b, *x: delta_rule(*x, log_decay=p.channel_decay, backend=b)[0],
        "oskda": lambda b, *x: online_scaled_delta_rule(*x, log_decay=p.channel_decay, backend=b)[0],
    }
    return {f"{name}, {backend}": partial(calls[name], backend) for name in names}


def contenders(
    p: Workload, compiled: bool = False, chunkwise: bool = True, slow: bool = True
) -> dict[str, Any]:
    """The variants and their peers on a CPU."""
    functions: dict[str, Any] = {}
    if "cpu" in available_backends():
        functions |= variants(p, "cpu")
    if chunkwise:
        functions |= variants(p, "chunkwise", BACKBONES)
    functions["gdn, transformers eager"] = lambda q, k, v, b: torch_chunk_gated_delta_rule(
        q, k, v, p.decay, b
    )[0]
    if compiled:
        graph = torch.compile(torch_chunk_gated_delta_rule, dynamic=False)
        functions["gdn, transformers compiled"] = lambda q, k, v, b: graph(q, k, v, p.decay, b)[0]
    if onnx_runtime.installed():
        run = onnx_runtime.gated_delta_rule(p.shape, p.decay, torch.zeros_like(p.state))
        functions[ONNX_RUNTIME] = run
    if slow:
        functions |= variants(p, "chunkwise", ["osdn"])
        functions["osdn, the paper's form"] = paper_form.osdn
    return functions


def forward(p: Workload, f: Any) -> Call:
    def run() -> Any:
        with torch.no_grad():
            return f(*p.inputs)

    return run


def forward_backward(p: Workload, f: Any) -> Call:
    return lambda: torch.autograd.grad(f(*p.leaves), p.leaves, p.grad)


def decoding(p: Workload) -> dict[str, Call]:
    """One token with initial and final states."""
    q, k, v, beta = p.inputs
    state: dict[str, Any] = {"initial_state": p.state, "output_final_state": True}
    calls: dict[str, Call] = {}
    if "cpu" in available_backends():
        calls["delta_net, cpu"] = lambda: delta_rule(q, k, v, beta, **state, backend="cpu")
        calls["osdn, cpu"] = lambda: online_scaled_delta_rule(
            q, k, v, beta, **state, initial_scale=p.scale, backend="cpu"
        )
        calls["osgdn, cpu"] = lambda: online_scaled_delta_rule(
            q, k, v, beta, **state, initial_scale=p.scale, log_decay=p.decay, backend="cpu"
        )
    calls["gdn, transformers recurrent"] = lambda: torch_recurrent_gated_delta_rule(
        q, k, v, p.decay, beta, **state
    )
    if onnx_runtime.installed():
        run = onnx_runtime.gated_delta_rule(p.shape, p.decay, p.state)
        calls[ONNX_RUNTIME] = lambda: run(q, k, v, beta)
    return {name: torch.no_grad()(call) for name, call in calls.items()}


def on_cpu(call: Call, repeat: int) -> float:
    """Milliseconds per call, averaged over `repeat` calls."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e3


def race(
    calls: dict[str, Call],
    rounds: int,
    title: str,
    repeat: int = 1,
    clock: Callable[[Call, int], float] = on_cpu,
) -> dict[str, dict[str, float]]:
    """Milliseconds of every call, each run once per round; the first round is discarded."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    if not console.is_terminal:
        console.print(f"timing {len(calls)} contenders: {title}", highlight=False)
    with progress_bar(console) as progress:
        bar = progress.add_task(title, total=(rounds + 1) * len(calls))
        for _ in range(rounds + 1):
            for name, call in calls.items():
                times[name].append(clock(call, repeat))
                progress.advance(bar)
    return {name: {"min": min(t[1:]), "median": statistics.median(t[1:])} for name, t in times.items()}


def add_limit(result: dict[str, dict[str, float]], macs: int, operations: int) -> float:
    """Return the limit in ms at the best speed of torch.mm, and add every contender's ratio to it."""
    limit = operations * macs / (2 * MM**3) * result.pop("torch.mm")["min"]
    for row in result.values():
        row["ratio"] = row["min"] / limit
    return limit


def show(content: dict[str, Any]) -> None:
    for table in for_terminal(operator_table(content), console.width):
        console.print(table)


def run(quick: bool, rounds: int, output: Path, device: str = "cpu") -> None:
    """Print and save all tables; `quick` runs only the main one and decoding."""
    if device != "cpu":
        from osdn.benchmarks import gpu

        gpu.run(quick, rounds, output, device)
        return
    torch.manual_seed(SEED)
    a, b = torch.randn(MM, MM), torch.randn(MM, MM)
    threads = torch.get_num_threads()
    tables: list[dict[str, Any]] = []

    def table(
        title: str, p: Workload, calls: dict[str, Call], operations: int, rounds: int
    ) -> dict[str, Any]:
        result = race({"torch.mm": lambda: torch.mm(a, b), **calls}, rounds, title)
        limit = add_limit(result, p.macs(), operations)
        entry = {
            "title": title,
            "threads": torch.get_num_threads(),
            "limit_ms": limit,
            "ms": result,
            **p.shape,
        }
        show(entry)
        tables.append(entry)
        return entry

    for n in [threads] if quick or threads == 1 else [threads, 1]:
        torch.set_num_threads(n)
        p = Workload(1, 2048, 8, 128, 128)
        where = f"B=1 T=2048 H=8 K=V=128, {n} thread{'s' * (n > 1)}"
        functions = contenders(p, compiled=not quick and n == threads, slow=not quick and n == threads)
        table(f"forward, {where}", p, {k: forward(p, f) for k, f in functions.items()}, 6, rounds)
        calls = {k: forward_backward(p, f) for k, f in functions.items() if not k.endswith(FORWARD_ONLY)}
        table(f"forward and backward, {where}", p, calls, 20, rounds)

        token = Workload(1, 1, 8, 128, 128)
        title = f"decoding one token, B=1 H=8 K=V=128, {n} thread{'s' * (n > 1)}"
        result = race(decoding(token), 3 * rounds, title, repeat=100)
        tables.append({"title": title, "threads": n, "ms": result, **token.shape})
        show(tables[-1])
    torch.set_num_threads(threads)

    if not quick:
        p = Workload(8, 512, 8, 64, 64)
        functions = contenders(p, chunkwise=False, slow=False)
        calls = {k: forward_backward(p, f) for k, f in functions.items() if not k.endswith(FORWARD_ONLY)}
        table("training, B=8 T=512 H=8 K=V=64: forward and backward", p, calls, 20, rounds)
        series: dict[str, dict[int, float]] = {}
        names = ("osdn, cpu", "delta_net, cpu", "gdn, chunkwise", "gdn, transformers eager", ONNX_RUNTIME)
        for T in (512, 1024, 2048, 4096, 8192, 16384):
            p = Workload(1, T, 8, 128, 128)
            calls = {k: forward(p, f) for k, f in contenders(p, slow=False).items() if k in names}
            entry = table(f"prefill, T={T}", p, calls, 6, max(3, rounds * 2048 // max(T, 2048)))
            for name, row in entry["ms"].items():
                series.setdefault(name, {})[T] = row["min"]
            series.setdefault("limit", {})[T] = entry["limit_ms"]
        plots.save({"ops": plots.operator_times(series, "B=1, H=8, K=V=128, float32")}, output)
    saved = save_json(
        output / "ops.json", {"kind": "operators", "seed": SEED, "rounds": rounds, "tables": tables}
    )
    console.print(f"saved to {saved}" + ("" if quick else f" and {output / 'ops.svg'}"))
