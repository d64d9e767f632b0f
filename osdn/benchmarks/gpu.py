"""The operators on a GPU: `osdn bench ops --device cuda`.

The comparison of `osdn.benchmarks.ops` in bfloat16, timed by events on the GPU: backend `triton` against
`chunkwise` and, if it can be imported, flash-linear-attention.  Calls are queued ten at a time, as a model
queues its layers, so a time is that of the GPU or of Python's launches, whichever is longer.  The last column
is the lower bound that an H100's data sheet implies (osdn/ops/triton/roofline.py).  Results go to
runs/bench/gpu.json.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from osdn.benchmarks.ops import (
    BACKBONES,
    RULES,
    SEED,
    VARIANTS,
    Call,
    Workload,
    console,
    forward,
    forward_backward,
    race,
    show,
    variants,
)
from osdn.ops import available_backends, delta_rule, online_scaled_delta_rule, triton
from osdn.ops.checks import Scaling
from osdn.results.store import save_json

OURS = tuple(name for name in VARIANTS if name not in RULES)  # the roofline covers no other rule
LENGTHS = (2048, 8192, 32768, 65536)
CHUNKWISE_UP_TO = 8192
DECAYS = {
    "delta_net": "none",
    "osdn": "none",
    "gdn": "head",
    "osgdn": "head",
    "kda": "channel",
    "oskda": "channel",
}
FLA = {"delta_net": "delta_rule", "gdn": "gated_delta_rule", "kda": "kda"}
ONLINE = {"delta_net": "osdn", "gdn": "osgdn", "kda": "oskda"}
Clock = Callable[[Call, int], float]


def on_gpu(call: Call, repeat: int) -> float:
    """Milliseconds per call on the current device, averaged over `repeat` calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeat


def fla(form: str) -> dict[str, Any]:
    """The functions of flash-linear-attention, if it is installed; `form` is chunk or fused_recurrent."""
    functions = {}
    for name, rule in FLA.items():
        with suppress(ImportError):
            functions[name] = getattr(import_module(f"fla.ops.{rule}"), f"{form}_{rule}")
    return functions


def gates(p: Workload) -> dict[str, dict[str, Any]]:
    """The decay of every backbone, under the names of flash-linear-attention."""
    return {"delta_net": {}, "gdn": {"g": p.decay}, "kda": {"g": p.channel_decay}}


def contenders(p: Workload) -> dict[str, Any]:
    """The variants and their peers on sequences."""
    functions = variants(p, "triton", OURS)
    if p.shape["T"] <= CHUNKWISE_UP_TO:
        functions |= variants(p, "chunkwise", BACKBONES)
    for name, f in fla("chunk").items():
        peer = partial(f, **gates(p)[name])
        functions[f"{name}, fla"] = lambda q, k, v, b, f=peer: f(q=q, k=k, v=v, beta=b)[0]
    return functions


def decoding(p: Workload) -> dict[str, Call]:
    """One token with initial and final states; `in place` overwrites the initial state."""
    q, k, v, beta = p.inputs
    states: dict[str, Any] = {"initial_state": p.state, "output_final_state": True}
    settings = Scaling(0.003, (0.5, 2.0), True, 1e-6)
    calls: dict[str, Call] = {}
    for name in BACKBONES:
        decay, own = gates(p)[name].get("g"), p.state.clone()
        common: dict[str, Any] = {**states, "log_decay": decay, "backend": "triton"}
        calls[f"{name}, triton"] = partial(delta_rule, q, k, v, beta, **common)
        calls[f"{ONLINE[name]}, triton"] = partial(
            online_scaled_delta_rule, q, k, v, beta, initial_scale=p.scale, **common
        )
        calls[f"{ONLINE[name]}, triton, in place"] = partial(
            triton.decode_, q, k, v, beta, 1.0, p.scale, settings, decay, own, k.shape[3] ** -0.5
        )
    for name, f in fla("fused_recurrent").items():
        calls[f"{name}, fla"] = partial(f, q=q, k=k, v=v, beta=beta, **gates(p)[name], **states)
    return {name: torch.no_grad()(call) for name, call in calls.items()}


def implied(name: str, shape: dict[str, int], backward: bool) -> float:
    """The milliseconds that an H100's data sheet implies for one of our variants."""
    from osdn.ops.triton import roofline

    plain = name.removesuffix("-apf")
    phases = roofline.costs(**shape, decay=DECAYS[plain], retention=plain != name, backward=backward)
    return sum(c.seconds for phase in phases[plain in BACKBONES :] for c in phase) * 1e3


def measure(p: Workload, rounds: int, clock: Clock) -> list[dict[str, Any]]:
    """Time forward, and forward and backward, of all contenders."""
    functions = contenders(p)
    dtype = str(p.inputs[0].dtype).removeprefix("torch.")
    where = " ".join(f"{name}={value}" for name, value in p.shape.items()) + f", {dtype}"
    tables = []
    for title, timed in (
        (f"forward, {where}", forward),
        (f"forward and backward, {where}", forward_backward),
    ):
        calls = {name: timed(p, f) for name, f in functions.items()}
        result = race(calls, rounds, title, repeat=10, clock=clock)
        for name in variants(p, "triton", OURS):
            backward = timed is forward_backward
            result[name]["implied"] = implied(name.removesuffix(", triton"), p.shape, backward)
        tables.append({"title": title, "ms": result, **p.shape})
        show(tables[-1])
    return tables


def run(quick: bool, rounds: int, output: Path, device: str) -> None:
    """Print and save all tables; `quick` runs only the shortest length and decoding."""
    if device.split(":")[0] != "cuda":
        raise ValueError(
            f"device is {device!r}; it must be cpu, cuda (NVIDIA or AMD), or a specific one such as cuda:1"
        )
    if "triton" not in available_backends("cuda"):
        console.print("nothing was measured: there is no CUDA or ROCm device, or triton is not installed")
        return
    with torch.cuda.device(device):
        tables = []
        for T in LENGTHS[:1] if quick else LENGTHS:
            tables += measure(Workload(1, T, 8, 128, 128, device, torch.bfloat16), rounds, on_gpu)
        token = Workload(1, 1, 8, 128, 128, device, torch.bfloat16)
        title = "decoding one token, B=1 H=8 K=V=128, bfloat16"
        result = race(decoding(token), 3 * rounds, title, repeat=100, clock=on_gpu)
        tables.append({"title": title, "ms": result, **token.shape})
        show(tables[-1])
        name = torch.cuda.get_device_name()
    record = {"kind": "operators", "gpu": name, "seed": SEED, "rounds": rounds, "tables": tables}
    console.print(f"saved to {save_json(output / 'gpu.json', record)}")
