"""Inference throughput by the protocol of the paper's appendix "Inference Throughput Protocol and Results".

One sequence: one forward call for the prompt, then greedy tokens one by one through the cache. Medians of
five timed repeats after two warm-ups; tokens per second are (prompt + generated) / (prefill + decoding time).
The models of a block take turns within each repeat, so that slow spells of the machine affect all of them,
and presets of a block share their weights, so that they differ only in the online scaling.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from osdn.bfloat16 import avoid_broken_amx
from osdn.models import PRESETS, OSDNConfig, OSDNForCausalLM, describe_model
from osdn.models.checkpoints import DTYPES, load_model, usable_device
from osdn.models.describe import load_config
from osdn.models.identity import Identity, identify
from osdn.models.identity import block as block_of

PREFILL, DECODE = 2048, 128
WARM_UPS, REPEATS = 2, 5
SEED = 0
Progress = Callable[[str], None]


@dataclass
class Timed:
    """A model and its measured times."""

    identity: Identity
    model: OSDNForCausalLM
    times: list[tuple[float, float]] = field(default_factory=list)  # milliseconds of prefill and decoding


def throughput(
    models: list[str],
    *,
    device: str = "cpu",
    dtype: str | None = None,
    prefill: int = PREFILL,
    decode: int = DECODE,
    warm_ups: int = WARM_UPS,
    repeats: int = REPEATS,
    progress: Progress = lambda name: None,
) -> dict[str, Any]:
    """Time models, one block after the other, and return the contents of the result file.

    A model is a preset or the folder of a saved model.  Presets have random weights, which do not affect
    speed.  The default `dtype` is bfloat16 on a GPU, as in the paper, and float32 on a CPU.
    """
    dtype = dtype or ("float32" if usable_device(device).type == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    avoid_broken_amx()
    rows: list[dict[str, Any]] = []
    for block in blocks(models):
        timed = build(block, device, DTYPES[dtype])
        vocabulary = timed[0].model.config.vocab_size
        ids = torch.randint(vocabulary, (1, prefill), generator=torch.Generator().manual_seed(SEED)).to(
            device
        )
        for turn in range(warm_ups + repeats):
            for entry in _rotated(timed, turn):
                entry.times.append(generate(entry.model, ids, decode))
                progress(entry.identity.model)
        for entry in timed:
            del entry.times[:warm_ups]
        rows += summarise(timed, prefill + decode)
    return {
        "kind": "throughput",
        "seed": SEED,
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "dtype": dtype,
        "prefill": prefill,
        "decode": decode,
        "warm_ups": warm_ups,
        "repeats": repeats,
        "rows": rows,
    }


def expand(names: list[str]) -> list[str]:
    """Replace a size such as tiny or hybrid-tiny by its presets; presets and saved models are unchanged."""
    expanded: list[str] = []
    for name in names:
        kind = name.startswith("hybrid-")
        sized = [x for x in PRESETS if x.endswith(f"-{name}") and ("-hybrid-" in x) == kind]
        if not sized and name not in PRESETS and not Path(name).is_dir():
            raise ValueError(f"there is no preset, size or folder {name}; presets are {', '.join(PRESETS)}")
        expanded += sized or [name]
    return list(dict.fromkeys(expanded))


def blocks(models: list[str]) -> list[list[str]]:
    """The models grouped by block, those without online scaling first; each appears once."""
    configs = {name: load_config(name) for name in models}
    by_block: dict[str, list[str]] = {block_of(config): [] for config in configs.values()}
    for name in sorted(configs, key=lambda name: configs[name].preconditioner is not None):
        by_block[block_of(configs[name])].append(name)
    return list(by_block.values())


def build(block: list[str], device: str, dtype: torch.dtype = torch.float32) -> list[Timed]:
    """The models of one block; presets share their common parameters, saved models keep their own."""
    torch.manual_seed(SEED)
    built: list[Timed] = []
    shared: dict[str, torch.nn.Parameter] = {}
    for name in block:
        if name in PRESETS:
            model = OSDNForCausalLM(OSDNConfig.from_preset(name)).to(device, dtype).eval()
            for path, parameter in list(model.named_parameters()):
                module, _, leaf = path.rpartition(".")
                model.get_submodule(module).register_parameter(leaf, shared.setdefault(path, parameter))
        else:
            model = load_model(name, device).to(dtype)
        built.append(Timed(identify(model, name), model))
    return built


@torch.inference_mode()
def generate(model: OSDNForCausalLM, ids: Tensor, decode: int) -> tuple[float, float]:
    """Milliseconds of one forward pass over the prompt, and of the `decode` greedy tokens after it."""
    cache = DynamicCache(config=model.config)
    marks = [_now(ids.device)]
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    marks.append(_now(ids.device))
    for _ in range(decode):
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    marks.append(_now(ids.device))
    return (marks[1] - marks[0]) * 1e3, (marks[2] - marks[1]) * 1e3


def summarise(block: list[Timed], tokens: int) -> list[dict[str, Any]]:
    """One row per model of a block; changes are in percent of the baseline's tokens per second.

    `change` compares medians, as in the paper; `paired_change` is the median of the comparisons within each
    repeat, which is robust if the machine slows down halfway.
    """
    base = block[0] if block[0].identity.baseline else None
    rows: list[dict[str, Any]] = []
    for entry in block:
        prefill, decode = (statistics.median(column) for column in zip(*entry.times))
        costs = describe_model(entry.model)
        row = {
            **entry.identity.record(),
            "tokens_per_second": tokens / (prefill + decode) * 1e3,
            "prefill_ms": prefill,
            "decode_ms": decode,
            "state_mib": costs.memory_mib(tokens),
            "compared_with": None,
            "times_ms": entry.times,
        }
        if base is not None and entry is not base:
            row["compared_with"] = base.identity.model
            row["change"] = 100 * (row["tokens_per_second"] / rows[0]["tokens_per_second"] - 1)
            ratios = [sum(theirs) / sum(ours) for theirs, ours in zip(base.times, entry.times)]
            row["paired_change"] = 100 * (statistics.median(ratios) - 1)
        rows.append(row)
    return rows


def _rotated(block: list[Timed], turn: int) -> Iterator[Timed]:
    """Rotate the order, so that each model goes first equally often."""
    yield from (block[(i + turn) % len(block)] for i in range(len(block)))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
