"""What online scaling costs a whole model, and the short convolution against PyTorch's, in one process.

    python benchmarks/models.py              # a training step at 340M, about three minutes on two cores
    python benchmarks/models.py decode       # a generated token at 340M
    python benchmarks/models.py convolution  # the short convolution, a few seconds

Both models hold the very same parameters, so that one optimiser serves them; each round runs both, in turning
order, and the cost is the median over rounds of the ratio within a round.  Results go to runs/bench/.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn import functional as F
from transformers import DynamicCache

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.layers.convolution import ShortConvolution
from osdn.results.store import save_json

console = Console(width=None if sys.stdout.isatty() else 110)
SEED = 0
Times = dict[str, float]  # seconds by what they were spent on


def share_parameters(source: OSDNForCausalLM, target: OSDNForCausalLM) -> None:
    """Makes `target` a model of `source`'s own parameters."""
    for name, parameter in source.named_parameters():
        module, _, leaf = name.rpartition(".")
        target.get_submodule(module).register_parameter(leaf, parameter)


def pair(baseline: str, variant: str, layers: int | None) -> dict[str, OSDNForCausalLM]:
    torch.manual_seed(SEED)
    overrides = {"num_hidden_layers": layers} if layers else {}
    models = {}
    for name in (baseline, variant):
        config = OSDNConfig.from_preset(name, **overrides)
        with torch.device("cpu" if not models else "meta"):
            models[name] = OSDNForCausalLM(config)
    share_parameters(models[baseline], models[variant])
    return models


def training_step(model: OSDNForCausalLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> Times:
    marks = [time.perf_counter()]
    loss = model(ids, labels=ids).loss
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    spans = [b - a for a, b in pairwise(marks)]
    return {"forward": spans[0], "backward": spans[1], "step": spans[2], "total": sum(spans)}


@torch.no_grad()
def decoding(model: OSDNForCausalLM, ids: torch.Tensor, cache: DynamicCache) -> Times:
    start = time.perf_counter()
    for t in range(ids.shape[1]):
        model(ids[:, t : t + 1], past_key_values=cache)
    return {"total": (time.perf_counter() - start) / ids.shape[1]}


def race(calls: dict[str, Callable[[], Times]], rounds: int, title: str) -> dict[str, list[Times]]:
    """Every call once a round, in turning order; the first round is thrown away."""
    times: dict[str, list[Times]] = {name: [] for name in calls}
    for i in track(range(rounds + 1), description=title, console=console, transient=True):
        for name in list(calls)[:: -1 if i % 2 else 1]:
            times[name].append(calls[name]())
    return {name: rows[1:] for name, rows in times.items()}


def report(title: str, times: dict[str, list[Times]]) -> dict[str, Any]:
    """Prints medians and the ratio of every contender to the first; returns them."""
    first, *_ = times
    parts = list(times[first][0])
    table = Table(title=title, title_justify="left")
    for column in ("", *(f"{part}, ms" for part in parts), "ratio (each round)"):
        table.add_column(column, justify="left" if not column else "right")
    result: dict[str, Any] = {"title": title}
    for name, rows in times.items():
        medians = {part: 1e3 * statistics.median(row[part] for row in rows) for part in parts}
        ratios = [row["total"] / base["total"] for row, base in zip(rows, times[first])]
        ratio = statistics.median(ratios)
        result[name] = {"median_ms": medians, "ratio": ratio, "ratios": ratios}
        spread = f"{ratio:.3f} ({', '.join(f'{r:.3f}' for r in ratios)})"
        table.add_row(name, *(f"{value:,.1f}" for value in medians.values()), spread)
    console.print(table)
    return result


def train(args: argparse.Namespace) -> dict[str, Any]:
    models = pair(args.baseline, args.variant, args.layers)
    ids = torch.randint(0, 32_000, (1, args.tokens))
    optimizer = torch.optim.AdamW(models[args.baseline].parameters(), lr=1e-4, fused=True)
    calls = {name: partial(training_step, model.train(), optimizer, ids) for name, model in models.items()}
    title = f"training step, {args.tokens} tokens, float32, {torch.get_num_threads()} threads"
    result = report(title, race(calls, args.rounds, title))
    result["peak_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(f"peak memory {result['peak_memory_gib']:.1f} GiB")
    return result


def decode(args: argparse.Namespace) -> dict[str, Any]:
    models = pair(args.baseline, args.variant, args.layers)
    ids = torch.randint(0, 32_000, (1, 8))
    calls = {
        name: partial(decoding, model.eval(), ids, DynamicCache(config=model.config))
        for name, model in models.items()
    }
    title = f"a decoded token, float32, {torch.get_num_threads()} threads"
    return report(title, race(calls, args.rounds, title))


def convolution(args: argparse.Namespace) -> dict[str, Any]:
    T, D, W = args.tokens, 1024, 4
    conv = ShortConvolution(D, W)
    x, grad = torch.randn(1, T, D, requires_grad=True), torch.randn(1, T, D)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.conv1d(x.transpose(1, 2), conv.weight, padding=W - 1, groups=D)[..., :T]).transpose(
            1, 2
        )

    def measure(f: Callable[[torch.Tensor], torch.Tensor]) -> Times:
        start = time.perf_counter()
        with torch.no_grad():
            f(x)
        middle = time.perf_counter()
        torch.autograd.grad(f(x), (x, conv.weight), grad)
        end = time.perf_counter()
        return {"forward": middle - start, "total": end - middle}

    calls = {"ours": lambda: measure(lambda x: conv(x)[0]), "conv1d": lambda: measure(grouped)}
    title = f"short convolution of {W}, {T} tokens of {D} channels; total: forward and backward"
    return report(title, race(calls, 3 * args.rounds, title))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="train", choices=["train", "decode", "convolution"])
    parser.add_argument("--baseline", default="delta_net-340m")
    parser.add_argument("--variant", default="osdn-340m", help="a preset with the baseline's parameters")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="fewer layers than the preset's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the results")
    args = parser.parse_args()
    result = {"train": train, "decode": decode, "convolution": convolution}[args.what](args)
    saved = save_json(
        args.output / f"models-{args.what}.json", {"seed": SEED, "rounds": args.rounds, **result}
    )
    console.print(f"saved to {saved}")


if __name__ == "__main__":
    main()
