"""Whole models on a CPU: training, prompts and decoding in every precision, and what online scaling costs.

    python benchmarks/models.py                  # everything, at 340M: about 15 minutes on two idle cores
    python benchmarks/models.py decode batches   # a generated token, alone and in batches
    python benchmarks/models.py convolution      # the short convolution against PyTorch's, a few seconds

Every round runs all contenders of a table, in turning order, and a ratio is the median over rounds of the
ratio to the first contender within a round.  Weights are random.  Results go to runs/bench/.
"""

import argparse
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn import functional as F
from transformers import DynamicCache

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.layers.convolution import ShortConvolution
from osdn.models.quantization import quantize
from osdn.ops.cpu.row_product import row_product
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


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """What online scaling costs: a training step of two models with the very same parameters."""
    models = pair(args.baseline, args.variant, args.layers)
    optimizer = torch.optim.AdamW(models[args.baseline].parameters(), lr=1e-4, fused=True)
    calls = {
        name: partial(training_step, model.train(), optimizer, tokens(args)) for name, model in models.items()
    }
    title = f"online scaling: a training step of {args.tokens} tokens, float32"
    return report(title, race(calls, args.rounds, title))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """A training step in float32, and with `training.precision: bfloat16`, which is autocast."""
    model = build(args, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(enabled: bool) -> Times:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return training_step(model, optimizer, tokens(args))

    calls = {"float32": partial(step, False), "bfloat16": partial(step, True)}
    title = f"{args.variant}: a training step of {args.tokens} tokens"
    result = report(title, race(calls, args.rounds, title))
    result["peak_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(f"peak memory so far {result['peak_memory_gib']:.1f} GiB")
    return result


def prefill(args: argparse.Namespace) -> dict[str, Any]:
    """A prompt, with every kind of weights."""
    ids = tokens(args)

    @torch.no_grad()
    def run(model: OSDNForCausalLM) -> Times:
        return timed(lambda: model(ids, use_cache=True, logits_to_keep=1))

    calls = {name: partial(run, model) for name, model in every_kind(args).items()}
    title = f"{args.variant}: a prompt of {args.tokens} tokens"
    return report(title, race(calls, args.rounds, title))


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """A decoded token: PyTorch's calls alone, our kernels, small weights, and the linear layers alone."""
    title = f"{args.variant}: a decoded token"
    calls: dict[str, Callable[[], Times]] = {}
    for name, model in every_kind(args).items():
        if name in ("float32", "bfloat16"):
            calls[f"{name}, PyTorch's calls"] = partial(plainly, decoder(model, 1))
            calls[f"{name}, its linear layers by F.linear"] = linear_layers(model, F.linear)
            calls[f"{name}, its linear layers by row_product"] = linear_layers(model, row_product)
        calls[name] = decoder(model, 1)
    ordered = {"bfloat16, PyTorch's calls": calls["bfloat16, PyTorch's calls"], **calls}
    return report(title, race(ordered, args.rounds, title))


def batches(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second when several sequences are decoded together."""
    kinds = every_kind(args)
    sizes = (1, 2, 4, 8)
    title = f"{args.variant}: decoding in batches, tokens per second"
    calls = {f"{name}, {n}": decoder(model, n) for name, model in kinds.items() for n in sizes}
    times = race(calls, args.rounds, title)
    rates = {
        name: {n: n / statistics.median(row["total"] for row in times[f"{name}, {n}"]) for n in sizes}
        for name in kinds
    }
    table = Table(title=title, title_justify="left")
    for column in ("", *(f"batch of {n}" for n in sizes)):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rates.items():
        table.add_row(name, *(f"{rate:.1f}" for rate in row.values()))
    console.print(table)
    return {"title": title, "tokens_per_second": rates}


def tokens(args: argparse.Namespace) -> torch.Tensor:
    return torch.randint(0, 32_000, (1, args.tokens), generator=torch.Generator().manual_seed(SEED))


def timed(call: Callable[[], Any], count: int = 1) -> Times:
    start = time.perf_counter()
    call()
    return {"total": (time.perf_counter() - start) / count}


def build(args: argparse.Namespace, dtype: torch.dtype) -> OSDNForCausalLM:
    torch.manual_seed(SEED)
    overrides = {"num_hidden_layers": args.layers} if args.layers else {}
    return OSDNForCausalLM(OSDNConfig.from_preset(args.variant, **overrides)).to(dtype).eval()


def every_kind(args: argparse.Namespace) -> dict[str, OSDNForCausalLM]:
    """The model in both precisions, and with small weights."""
    kinds = {"float32": build(args, torch.float32), "bfloat16": build(args, torch.bfloat16)}
    for weights in ("int8", "int4"):
        kinds[weights] = quantize(build(args, torch.bfloat16), weights)
    return kinds


def decoder(model: OSDNForCausalLM, batch: int, count: int = 8) -> Callable[[], Times]:
    """Decodes `count` more tokens of every sequence at each call."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(16).expand(batch, -1), past_key_values=cache, logits_to_keep=1)
    ids = torch.ones(batch, 1, dtype=torch.int64)

    @torch.no_grad()
    def run() -> Times:
        return timed(lambda: [model(ids, past_key_values=cache) for _ in range(count)], count)

    return run


def plainly(call: Callable[[], Times]) -> Times:
    """As it would be with PyTorch's own calls only."""
    with ExitStack() as stack:
        never = ("layers.decoding.fused", "layers.linear.usable", "layers.precision.usable")
        for name in never:
            stack.enter_context(patch(f"osdn.{name}", lambda *_: False))
        stack.enter_context(patch("osdn.models.modeling_osdn.decode", lambda *_: None))
        return call()


def linear_layers(model: OSDNForCausalLM, multiply: Callable[..., torch.Tensor]) -> Callable[[], Times]:
    """The linear layers of a decoded token, one call each, and nothing else."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(1, m.in_features).to(model.dtype) for m in layers}

    @torch.no_grad()
    def run() -> Times:
        return timed(lambda: [multiply(inputs[m.in_features], m.weight.detach(), m.bias) for m in layers])

    return run


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


PARTS = {x.__name__: x for x in (scaling, train, prefill, decode, batches, convolution)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--baseline", default="delta_net-340m")
    parser.add_argument("--variant", default="osdn-340m", help="a preset with the baseline's parameters")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="fewer layers than the preset's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the results")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    console.print(f"{torch.get_num_threads()} threads; milliseconds are medians over {args.rounds} rounds")
    for name in args.parts or PARTS:
        settings = {"seed": SEED, "rounds": args.rounds, "threads": torch.get_num_threads()}
        saved = save_json(args.output / f"models-{name}.json", settings | PARTS[name](args))
        console.print(f"saved to {saved}\n")
        gc.collect()


if __name__ == "__main__":
    main()
