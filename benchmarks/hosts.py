"""What `osdn.accelerate()` changes for models of `transformers` on a CPU, before and after in one process.

    python benchmarks/hosts.py      # both models, both dtypes: about 20 minutes and 17 GiB on two idle cores
    python benchmarks/hosts.py --model qwen3_5 --dtype bfloat16 --what layer prefill
    python benchmarks/hosts.py --layers 4 --vocabulary 1024   # a try

The models have real shapes and random weights: the text model of Qwen3.5-0.8B, and a Kimi Linear of its size.
Every round runs the original functions and ours, in turning order.  Rounds go on until there are enough of
them or their time is used up, and a ratio is the median over rounds of the ratio within a round.  `layer` is
one delta-rule layer alone, also without the time that the profiler counts as matrix products, which both
need.  CPU time adds up all threads; on a busy machine it says more than the time that passed.  Memory is the
peak above what the process held before the step.

Training computes its loss over 256 tokens at a time, and at 4,096 tokens with gradient checkpointing,
because neither side would fit a machine with 24 GB otherwise.  What would still need more than --memory or
take longer than --longest, judged by one layer, is left out and marked so.

Each measurement is saved as soon as it is made, to runs/bench/; a run that was stopped goes on from there.
"""

import argparse
import ctypes
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import osdn
from osdn.analysis.capture import recurrent_layers
from osdn.results.store import save_json

console = Console(width=None if sys.stdout.isatty() else 110)
SEED, GIB = 0, 2**30
PRODUCTS = ("aten::mm", "aten::addmm")
SIDES = ("original", "osdn")
GROUPS = {"layer": 3, "prefill": 1, "decode": 1, "train": 2}  # of tasks, and how many
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


# ------------------------------------------------------------------------------------------ what is measured
def measured(call: Callable[[], Any], times: int = 1) -> Numbers:
    """Milliseconds of a call that does something several times, and the most memory that it needed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before, start, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    call()
    passed = {"ms": time.perf_counter() - start, "CPU ms": time.process_time() - cpu}
    peak = max(memory("VmHWM") - before, 0.0)
    return {name: 1e3 * seconds / times for name, seconds in passed.items()} | {"peak GiB": peak}


def memory(what: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) / 2**20


@torch.no_grad()
def prefill(model: Any, tokens: int) -> Numbers:
    ids = torch.randint(3, 1000, (1, tokens))
    return measured(lambda: model(ids, use_cache=True, logits_to_keep=1))


@torch.no_grad()
def decode(model: Any, tokens: int) -> Numbers:
    """One token after a prompt."""
    cache = DynamicCache(config=model.config)
    model(torch.randint(3, 1000, (1, 64)), past_key_values=cache, logits_to_keep=1)
    ids = torch.randint(3, 1000, (tokens, 1, 1))
    return measured(lambda: [model(x, past_key_values=cache) for x in ids], tokens)


def train(model: Any, tokens: int, checkpointing: bool) -> Numbers:
    """A forward and backward."""
    ids = torch.randint(3, 1000, (1, tokens))
    for parameter in model.parameters():
        parameter.grad = None

    def step() -> None:
        hidden = model.model(ids, use_cache=False).last_hidden_state
        leaf = hidden.detach().requires_grad_()
        for x, labels in zip(leaf[0, :-1].split(256), ids[0, 1:].split(256)):
            F.cross_entropy(model.lm_head(x).float(), labels, reduction="sum").div(tokens).backward()
        hidden.backward(leaf.grad)

    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    try:
        return measured(step)
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


def layer_alone(layer: Any, tokens: int, backward: bool) -> Numbers:
    x = torch.randn(1, tokens, 1024, dtype=next(layer.parameters()).dtype)
    kept = {}

    def run() -> None:
        before = memory("VmRSS")
        with torch.set_grad_enabled(backward):
            y = layer(hidden_states=x.requires_grad_(backward))
        if backward:
            kept["kept GiB"] = memory("VmRSS") - before
            y.backward(torch.ones_like(y))

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = measured(run)
    products = sum(e.self_cpu_time_total for e in profiler.key_averages() if e.key in PRODUCTS) / 1e3
    layer.zero_grad()
    return result | {"without products, ms": result["ms"] - products, **kept}


# ------------------------------------------------------------------------------------------- what it may cost
@dataclass(frozen=True)
class Task:
    group: str
    title: str
    run: Callable[[], Numbers]
    warm: Callable[[], Numbers]  # the same, smaller
    judge: str = ""  # the title of the task of one layer that tells what this one needs
    # from what that needed at its peak and kept for its backward, in GiB, to what this one needs; and how
    # many times as long it takes
    cost: tuple[Callable[[float, float], float], float] = (lambda peak, kept: peak, 1.0)
    both: bool = False  # whether ours is left out, too, where the original is: it takes minutes

    def left_out(self, results: dict[str, Any], side: str, args: Any) -> str | None:
        """Why this side is not run; None if it is."""
        known = results.get(self.judge, {})
        if side in known.get("left out", {}):
            return known["left out"][side]
        if not known:
            return None
        kept = known.get("kept GiB", {}).get(side, 0.0)
        gib, seconds = self.cost[0](known["peak GiB"][side], kept), self.cost[1] * known["ms"][side] / 1e3
        if gib > args.memory:
            return f"needs about {gib:.0f} GiB"
        return f"takes about {seconds:.0f} s" if seconds > args.longest else None


def tasks(model: Any, what: list[str]) -> list[Task]:
    layer, config = next(iter(recurrent_layers(model).values())), model.config
    alone, training = partial(layer_alone, layer), partial(train, model)
    forward, step = "layer, 2,048 tokens", "layer, 1,024, with backward"
    long_step = "layer, 4,096, with backward"
    layers, delta = len(config.layer_types), config.layer_types.count("linear_attention")
    size = next(model.parameters()).element_size()
    gradients = sum(p.numel() for p in model.parameters()) * size / GIB
    others = 8 * config.hidden_size + 4 * config.intermediate_size  # numbers kept per token and layer

    def all_kept(peak: float, kept: float) -> float:
        return peak + delta * kept + layers * 1024 * others * size / GIB + gradients

    def inputs_kept(peak: float, kept: float) -> float:
        return peak + layers * 4096 * config.hidden_size * size / GIB + gradients

    every = [
        Task("layer", forward, partial(alone, 2048, False), partial(alone, 64, False)),
        Task("layer", step, partial(alone, 1024, True), partial(alone, 64, True)),
        Task(
            "layer", long_step, partial(alone, 4096, True), partial(alone, 64, True),
            step, (lambda peak, kept: 4 * peak, 4),
        ),
        Task(
            "prefill", "prefill, 2,048 tokens", partial(prefill, model, 2048), partial(prefill, model, 64),
            forward, (lambda peak, kept: peak, delta),
        ),
        Task("decode", "decoding, per token", partial(decode, model, 16), partial(decode, model, 1)),
        Task(
            "train", "training, 1,024 tokens", partial(training, 1024, False),
            partial(training, 64, False), step, (all_kept, delta),
        ),
        Task(
            "train", "training, 4,096, checkpointing", partial(training, 4096, True),
            partial(training, 64, True), long_step, (inputs_kept, delta * 4 / 3), both=True,
        ),
    ]  # fmt: skip
    return [task for task in every if task.group in what]


# ---------------------------------------------------------------------------------------------- the running
def race(task: Task, sides: list[str], rounds: int, budget: float) -> dict[str, list[Numbers]]:
    """Each side once per round, in turning order, until there are enough rounds or their time is used up."""
    results: dict[str, list[Numbers]] = {side: [] for side in sides}

    def each(call: Callable[[], Numbers], order: list[str]) -> list[Numbers]:
        rows = []
        for side in order:
            osdn.accelerate(undo=side == "original")
            rows.append(call())
        return rows

    each(task.warm, sides)
    start = time.perf_counter()
    for i in range(rounds):
        order = sides[:: -1 if i % 2 else 1]
        for side, numbers in zip(order, each(task.run, order)):
            results[side].append(numbers)
        if time.perf_counter() - start > budget:
            break
    osdn.accelerate(undo=True)
    return results


def summarize(results: dict[str, list[Numbers]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for part in next(iter(results.values()))[0]:
        rows = {side: [row[part] for row in measured_rows] for side, measured_rows in results.items()}
        summary[part] = {side: statistics.median(values) for side, values in rows.items()}
        if len(rows) == 2:
            ratios = [a / max(b, 1e-9) for a, b in zip(rows["original"], rows["osdn"])]
            summary[part] |= {"ratio": statistics.median(ratios), "ratios": ratios}
    return summary


def show(title: str, results: dict[str, Any]) -> None:
    table = Table("", "", *SIDES, "original / osdn (each round)", title=title)
    for task, summary in results.items():
        missing, name = summary.get("left out", {}), task
        for part, x in summary.items():
            if part == "left out":
                continue
            cells = [f"{x[side]:,.2f}" if side in x else missing.get(side, "") for side in SIDES]
            each = ", ".join(f"{ratio:.2f}" for ratio in x.get("ratios", ()))
            table.add_row(name, part, *cells, f"{x['ratio']:.2f} ({each})" if "ratio" in x else "")
            name = ""
        if set(missing) == set(SIDES):
            table.add_row(task, "", *missing.values(), "")
        table.add_section()
    console.print(table)


def earlier(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run with these settings measured."""
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    return saved["results"] if all(saved.get(name) == x for name, x in settings.items()) else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", nargs="+", default=["qwen3_5", "kimi_linear"], choices=["qwen3_5", "kimi_linear"])
    add("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    add("--what", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    add("--layers", type=int, default=24)
    add("--vocabulary", type=int, default=248_320)
    add("--rounds", type=int, default=3, help="of each measurement, at most")
    add("--budget", type=float, default=20, help="seconds after which a measurement has rounds enough")
    add("--memory", type=float, default=13, help="GiB that a step may need")
    add("--longest", type=float, default=200, help="seconds that a step may take")
    add("--output", type=Path, default=Path("runs/bench"), help="folder of the results")
    add("--again", action="store_true", help="measure again what an earlier run has saved")
    args = parser.parse_args()
    runs = list(itertools.product(args.model, args.dtype))
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(runs) * sum(GROUPS[group] for group in args.what))
        for name, dtype in runs:
            run(name, dtype, args, progress, bar)


def run(name: str, dtype: str, args: Any, progress: Progress, bar: Any) -> None:
    settings = {"seed": SEED, "layers": args.layers, "vocabulary": args.vocabulary, "dtype": dtype}
    settings |= {"threads": torch.get_num_threads(), "model": name}
    path = args.output / f"hosts-{name}-{dtype}.json"
    results = {} if args.again else earlier(path, settings)
    title = f"{name}, {args.layers} layers, {dtype}, {settings['threads']} threads"
    progress.update(bar, description=f"{title}: building")
    model: Any = build(name, args.layers, args.vocabulary, getattr(torch, dtype)).eval()
    for task in tasks(model, args.what):
        progress.update(bar, description=f"{title}: {task.title}")
        if task.title not in results:
            reasons = {side: task.left_out(results, side, args) for side in SIDES}
            missing = {side: why for side, why in reasons.items() if why is not None}
            if task.both and "original" in missing:
                missing.setdefault("osdn", "the original is left out")
            sides = [side for side in SIDES if side not in missing]
            summary = summarize(race(task, sides, args.rounds, args.budget)) if sides else {}
            results[task.title] = summary | ({"left out": missing} if missing else {})
            save_json(path, {"title": title, **settings, "results": results})
        progress.advance(bar)
    show(title, results)
    console.print(f"saved to {path}")


if __name__ == "__main__":
    main()
