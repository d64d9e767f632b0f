"""What `osdn.accelerate()` changes for models of `transformers` on a CPU, before and after in one process.

    python benchmarks/hosts.py                                # both models, both dtypes; hours on two cores
    python benchmarks/hosts.py --model qwen3_5 --dtype bfloat16 --what layer prefill
    python benchmarks/hosts.py --layers 4 --rounds 1          # a try

The models have real shapes and random weights: the text model of Qwen3.5-0.8B, and a Kimi Linear of its size.
Every round runs the original functions and ours, in turning order, and a ratio is the median over rounds of
the ratio within a round.  `layer` is one delta-rule layer alone, with the time that the profiler does not
count as matrix products of the projections, which both need.  Memory is the peak above what the process held
before the step.  Results go to runs/bench/.
"""

import argparse
import ctypes
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import osdn
from osdn.analysis.capture import recurrent_layers
from osdn.results.store import save_json

console = Console(width=None if sys.stdout.isatty() else 110)
SEED = 0
PRODUCTS = ("aten::mm", "aten::addmm")
Numbers = dict[str, float]


def build(name: str, layers: int, vocabulary: int, dtype: torch.dtype) -> torch.nn.Module:
    """Three delta-rule layers to one of attention."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    shared: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": layers,
        "num_attention_heads": 8, "layer_types": kinds, "tie_word_embeddings": True,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(SEED)
    torch.set_default_dtype(dtype)
    try:
        if name == "qwen3_5":
            heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "head_dim": 256}
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shared, **heads, num_key_value_heads=2))
        heads = {"linear_num_heads": 16, "linear_head_dim": 128, "num_key_value_heads": 8}
        return KimiLinearForCausalLM(KimiLinearConfig(**shared, **heads, mlp_layer_types=["dense"] * layers))
    finally:
        torch.set_default_dtype(torch.float32)


def timed(call: Callable[[], Any]) -> Numbers:
    start = time.perf_counter()
    call()
    return {"ms": 1e3 * (time.perf_counter() - start)}


@torch.no_grad()
def prefill(model: torch.nn.Module, tokens: int) -> Numbers:
    ids = torch.randint(3, 1000, (1, tokens))
    return timed(lambda: model(ids, use_cache=True, logits_to_keep=1))


@torch.no_grad()
def decode(model: torch.nn.Module, tokens: int) -> Numbers:
    """One token after a prompt."""
    cache = DynamicCache(config=model.config)
    model(torch.randint(3, 1000, (1, 64)), past_key_values=cache, logits_to_keep=1)
    ids = torch.randint(3, 1000, (tokens, 1, 1))
    return {"ms": timed(lambda: [model(x, past_key_values=cache) for x in ids])["ms"] / tokens}


def train(model: torch.nn.Module, tokens: int) -> Numbers:
    """A forward and backward, and the most memory it needed."""
    ids = torch.randint(3, 1000, (1, tokens))
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = memory("VmRSS")
    result = timed(lambda: model(ids, labels=ids, use_cache=False).loss.backward())
    return result | {"peak GiB": memory("VmHWM") - before}


def memory(what: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) / 2**20


def layer_alone(layer: torch.nn.Module, tokens: int, backward: bool) -> Numbers:
    x = torch.randn(1, tokens, 1024, dtype=next(layer.parameters()).dtype)

    def run() -> None:
        if backward:
            layer(hidden_states=x.requires_grad_()).sum().backward()
        else:
            with torch.no_grad():
                layer(hidden_states=x)

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = timed(run)
    products = sum(e.self_cpu_time_total for e in profiler.key_averages() if e.key in PRODUCTS) / 1e3
    return result | {"without products, ms": result["ms"] - products}


def race(call: Callable[[], Numbers], rounds: int, title: str) -> dict[str, list[Numbers]]:
    """Original and ours once a round, in turning order; the first round is thrown away."""
    results: dict[str, list[Numbers]] = {"original": [], "osdn": []}
    for i in track(range(rounds + 1), description=title, console=console, transient=True):
        for name in list(results)[:: -1 if i % 2 else 1]:
            osdn.accelerate(undo=name == "original")
            results[name].append(call())
    osdn.accelerate(undo=True)
    return {name: rows[1:] for name, rows in results.items()}


def summarize(results: dict[str, list[Numbers]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for part in results["original"][0]:
        rows = {name: [row[part] for row in given] for name, given in results.items()}
        ratios = [a / b for a, b in zip(rows["original"], rows["osdn"])]
        medians = {name: statistics.median(values) for name, values in rows.items()}
        summary[part] = {**medians, "ratio": statistics.median(ratios), "ratios": ratios}
    return summary


def tasks(model: torch.nn.Module, what: list[str]) -> dict[str, Callable[[], Numbers]]:
    layer = next(iter(recurrent_layers(model).values()))
    every = {
        "layer": {
            "a layer, 2,048 tokens": partial(layer_alone, layer, 2048, False),
            "a layer, 1,024 tokens, forward and backward": partial(layer_alone, layer, 1024, True),
        },
        "prefill": {"prefill of 2,048 tokens": partial(prefill, model, 2048)},
        "decode": {"a token, decoding": partial(decode, model, 16)},
        "train": {
            f"forward and backward, {tokens:,} tokens": partial(train, model, tokens)
            for tokens in (1024, 4096)
        },
    }
    return {title: call for name in what for title, call in every[name].items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["qwen3_5", "kimi_linear"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--what", nargs="+", default=["layer", "prefill", "decode", "train"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=248_320)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the results")
    args = parser.parse_args()
    for name, dtype in itertools.product(args.model, args.dtype):
        model = build(name, args.layers, args.vocabulary, getattr(torch, dtype)).eval()
        title = f"{name}, {args.layers} layers, {dtype}, {torch.get_num_threads()} threads"
        table = Table("", "", "original", "osdn", "original / osdn (each round)", title=title)
        results = {}
        for task, call in tasks(model, args.what).items():
            results[task] = summarize(race(call, args.rounds, task))
            for part, x in results[task].items():
                each = ", ".join(f"{ratio:.2f}" for ratio in x["ratios"])
                ratio = f"{x['ratio']:.2f} ({each})"
                table.add_row(task, part, f"{x['original']:,.2f}", f"{x['osdn']:,.2f}", ratio)
        console.print(table)
        settings = {"seed": SEED, "layers": args.layers, "vocabulary": args.vocabulary, "rounds": args.rounds}
        path = args.output / f"hosts-{name}-{dtype}.json"
        console.print(f"saved to {save_json(path, {'title': title, **settings, 'results': results})}")
        del model


if __name__ == "__main__":
    main()
