"""Inference throughput by the protocol of the paper's appendix "Inference Throughput Protocol and Results".

One sequence, one forward call over the prompt, then greedy tokens one by one through the cache; two
warm-ups, five timed repeats, medians; tokens a second are (prompt + generated) / (prefill + decoding time).
Variants of one backbone hold the very same weights and take turns within each repeat, so that a slow spell of
the machine hits them alike and what is left between them is the online scaling.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from osdn.models import OSDNConfig, OSDNForCausalLM, describe
from osdn.models.checkpoints import usable_device

PREFILL, DECODE = 2048, 128
WARM_UPS, REPEATS = 2, 5
SEED = 0
Progress = Callable[[str], None]


def throughput(
    presets: list[str],
    *,
    device: str = "cpu",
    prefill: int = PREFILL,
    decode: int = DECODE,
    warm_ups: int = WARM_UPS,
    repeats: int = REPEATS,
    progress: Progress = lambda name: None,
) -> dict[str, Any]:
    """Times the presets, one backbone after the other, and returns what goes into the result file.

    Weights are random: time does not depend on them.  They are bfloat16 on a GPU, as in the paper, and
    float32 on a CPU.
    """
    usable_device(device)
    rows: list[dict[str, Any]] = []
    for family in families(presets):
        models = build(family, device)
        vocabulary = min(model.config.vocab_size for model in models.values())
        ids = torch.randint(vocabulary, (1, prefill), generator=torch.Generator().manual_seed(SEED)).to(
            device
        )
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for turn in range(warm_ups + repeats):
            for name in _rotated(list(models), turn):
                times[name].append(generate(models[name], ids, decode))
                progress(name)
        rows += summarise({name: t[warm_ups:] for name, t in times.items()}, prefill + decode)
    return {
        "kind": "throughput",
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "dtype": str(_dtype(device)).removeprefix("torch."),
        "prefill": prefill,
        "decode": decode,
        "warm_ups": warm_ups,
        "repeats": repeats,
        "rows": rows,
    }


def families(presets: list[str]) -> list[list[str]]:
    """The presets of one backbone and size together, the one without online scaling first."""

    def shape(name: str) -> tuple[str, ...]:
        config = OSDNConfig.from_preset(name)
        return (str(config.hidden_size), config.backbone)

    first = {shape(name): i for i, name in reversed(list(enumerate(presets)))}
    order = sorted(
        presets, key=lambda n: (first[shape(n)], OSDNConfig.from_preset(n).preconditioner is not None)
    )
    return [list(group) for _, group in groupby(order, shape)]


def build(family: list[str], device: str) -> dict[str, OSDNForCausalLM]:
    """Models of one backbone that share all parameters they have in common."""
    torch.manual_seed(SEED)
    models: dict[str, OSDNForCausalLM] = {}
    shared: dict[str, torch.nn.Parameter] = {}
    for name in family:
        model = OSDNForCausalLM(OSDNConfig.from_preset(name)).to(device, _dtype(device)).eval()
        for path, parameter in list(model.named_parameters()):
            module, _, leaf = path.rpartition(".")
            model.get_submodule(module).register_parameter(leaf, shared.setdefault(path, parameter))
        models[name] = model
    return models


@torch.inference_mode()
def generate(model: OSDNForCausalLM, ids: Tensor, decode: int) -> tuple[float, float]:
    """Milliseconds of one forward over the prompt, and of `decode` greedy tokens after it."""
    cache = DynamicCache(config=model.config)
    marks = [_now(ids.device)]
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    marks.append(_now(ids.device))
    for _ in range(decode):
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    marks.append(_now(ids.device))
    return (marks[1] - marks[0]) * 1e3, (marks[2] - marks[1]) * 1e3


def summarise(times: dict[str, list[tuple[float, float]]], tokens: int) -> list[dict[str, Any]]:
    """A row a model; differences are to the first, in per cent of tokens a second.

    `change` compares the medians, as the paper does; `paired_change` is the median of the comparisons within
    a repeat, which a machine that slows down in the middle does not disturb.
    """
    base = next(iter(times))
    totals = {name: [sum(pair) for pair in t] for name, t in times.items()}
    rows: list[dict[str, Any]] = []
    for name, t in times.items():
        prefill, decode = (statistics.median(column) for column in zip(*t))
        costs = describe(name)
        row = {
            "model": name,
            "tokens_per_second": tokens / (prefill + decode) * 1e3,
            "prefill_ms": prefill,
            "decode_ms": decode,
            "state_mib": costs.state_mib + costs.scale_mib,
            "baseline": None if name == base else base,
            "times_ms": t,
        }
        if name != base:
            row["change"] = 100 * (row["tokens_per_second"] / rows[0]["tokens_per_second"] - 1)
            ratios = [theirs / ours for theirs, ours in zip(totals[base], totals[name])]
            row["paired_change"] = 100 * (statistics.median(ratios) - 1)
        rows.append(row)
    return rows


def _rotated(names: list[str], turn: int) -> Iterator[str]:
    """Everyone goes first as often as the others."""
    yield from (names[(i + turn) % len(names)] for i in range(len(names)))


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
