"""The mechanism diagnostic: residual ratios of every token, layer and head while a model reads prompts.

Prompts are replayed and layers measured one at a time, and only sums by task, layer, head and position are
kept.  Per prompt, memory grows only by one row of sums, which the bootstrap intervals need, and a digest of
its text.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from osdn.analysis.capture import LayerCapture, attention_layers, capturing
from osdn.analysis.prompts import Prompt
from osdn.analysis.residuals import FLOOR, residuals, scale_trajectory
from osdn.models.identity import Identity
from osdn.results.store import digest

BINS = 20  # of relative position, as in the paper's figure
RESAMPLES = 2000
SEED = 0
ALL = "all"

# Columns of the sums over tokens: measured and closed-form ratios.
COUNT, LOG_Q, Q, TOKENS, LOG_CLOSED = range(5)
# Columns of the sums over tokens and channels of the scale.
SCALE, SCALE_SQUARED, AT_LOW, AT_HIGH = range(4)


@dataclass
class Sums:
    """Sums over the prompts of one task; the rows are the position bins, then the two readings."""

    ratios: Tensor  # [L, BINS + 2, H, 5], float64
    scales: Tensor  # [L, BINS + 2, H, 4]
    prompts: list[Tensor] = field(default_factory=list)  # [BINS + 2, 5] each
    boundaries: list[float] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    digests: list[str] = field(default_factory=list)  # of the prompts' texts
    cuts: list[int] = field(default_factory=list)  # how many tokens each truncated prompt lost


class Diagnosis:
    """Collects the measurements of a model's layers while it reads prompts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = getattr(model, getattr(model, "base_model_prefix", ""), model)  # the head is not needed
        self.tasks: dict[str, Sums] = {}
        self.largest_disagreement = 0.0
        self.rule: str | None = None
        self.scale_range: list[tuple[float, float]] = []
        self.channels = 0
        self.bounds: tuple[float, float] | None = None
        self.seconds = 0.0
        self.tokens = 0

    @torch.no_grad()
    def read(self, prompt: Prompt) -> None:
        """Replays one prompt."""
        start = time.perf_counter()
        ratios: list[Tensor] = []
        scales: list[Tensor] = []

        def measure(layer: LayerCapture) -> None:
            rows = _rows(layer.problem.length, prompt.second_reading, layer.problem.k.device)
            ratios.append(self._ratios(layer, rows))
            self.rule = layer.rule
            if layer.scaled:
                scales.append(self._scales(layer, rows))

        device = next(self.model.parameters()).device
        with capturing(self.model, measure):
            self.model(input_ids=prompt.ids[None].to(device), use_cache=False)
        table = torch.stack(ratios).cpu()
        if prompt.task not in self.tasks:
            shape = (*table.shape[:3], 4)
            self.tasks[prompt.task] = Sums(torch.zeros_like(table), torch.zeros(shape, dtype=table.dtype))
        task = self.tasks[prompt.task]
        task.ratios += table
        if scales:
            task.scales += torch.stack(scales).cpu()
        task.prompts.append(table.sum((0, 2)))
        if prompt.second_reading is not None:
            task.boundaries.append(prompt.second_reading / len(prompt.ids))
        task.sources.add(prompt.source)
        task.digests.append(digest([prompt.text]))
        task.cuts += [prompt.cut] if prompt.cut else []
        self.tokens += len(prompt.ids)
        self.seconds += time.perf_counter() - start

    def _ratios(self, layer: LayerCapture, rows: Tensor) -> Tensor:
        r = residuals(layer)
        if not r.closed.isfinite().all():
            raise ValueError(f"{layer.name}: its residual ratios are not finite; the model has diverged")
        known = (~r.negligible).double()
        q, closed = r.q.double(), r.closed.double()
        stats = torch.stack(
            [
                known,
                q.clamp_min(FLOOR).log() * known,
                q * known,
                torch.ones_like(q),
                closed.clamp_min(FLOOR).log(),
            ],
            -1,
        )[0]  # [T, H, 5]
        self.largest_disagreement = max(self.largest_disagreement, float(r.disagreement.max()))
        return torch.einsum("rt,thc->rhc", rows, stats)

    def _scales(self, layer: LayerCapture, rows: Tensor) -> Tensor:
        d = scale_trajectory(layer)[0]  # [T, H, K]
        self.channels = d.shape[-1]
        self.bounds = layer.problem.bounds
        low, high = self.bounds or (-torch.inf, torch.inf)
        while len(self.scale_range) <= layer.layer:
            self.scale_range.append((torch.inf, -torch.inf))
        least, most = self.scale_range[layer.layer]
        self.scale_range[layer.layer] = (min(least, float(d.min())), max(most, float(d.max())))
        stats = torch.stack([d.sum(-1), d.square().sum(-1), (d <= low).sum(-1), (d >= high).sum(-1)], -1)
        return torch.einsum("rt,thc->rhc", rows, stats.double())

    def result(self) -> dict[str, Any]:
        """Everything measured so far, as it goes into the result file."""
        if not self.tasks:
            raise ValueError("no prompt was read")
        tasks = list(self.tasks.values())
        by_task = {name: _summary([task]) | _prompts([task]) for name, task in self.tasks.items()}
        overall = _summary(tasks)
        ratios = self._total("ratios")
        tokens, known = float(ratios[:, :BINS, :, TOKENS].sum()), float(ratios[:, :BINS, :, COUNT].sum())
        return {
            "kind": "diagnosis",
            "seed": SEED,
            "rule": self.rule,
            **_prompts(tasks),
            "attention_layers_left_out": attention_layers(self.model),
            ALL: overall,
            "tasks": by_task,
            "agreement": {
                "largest_difference": self.largest_disagreement,
                "negligible_share": 1 - known / tokens,
            },
            "scale": self._scale_summary() if self.scale_range else None,
            "speed": {
                "tokens": self.tokens,
                "seconds": self.seconds,
                "tokens_per_second": self.tokens / self.seconds,
            },
        }

    def _total(self, which: str) -> Tensor:
        return torch.stack([getattr(task, which) for task in self.tasks.values()]).sum(0)

    def _scale_summary(self) -> dict[str, Any]:
        scales, tokens = self._total("scales")[:, :BINS], self._total("ratios")[:, :BINS, :, TOKENS]
        by_layer = scales.sum(2) / (tokens.sum(2) * self.channels)[..., None]  # [L, BINS, 4]
        by_head = scales.sum(1) / (tokens.sum(1) * self.channels)[..., None]  # [L, H, 4]
        spread = (by_layer[..., SCALE_SQUARED] - by_layer[..., SCALE].square()).clamp_min(0).sqrt()
        return {
            "bounds": self.bounds,
            "mean": by_layer[..., SCALE].tolist(),
            "spread": spread.tolist(),
            "share_at_low": by_layer[..., AT_LOW].tolist(),
            "share_at_high": by_layer[..., AT_HIGH].tolist(),
            "share_bound_by_head": (by_head[..., AT_LOW] + by_head[..., AT_HIGH]).tolist(),
            "range": self.scale_range,
        }


def diagnose(
    model: nn.Module,
    prompts: Iterable[Prompt],
    progress: Callable[[Prompt], None] | None = None,
    *,
    identity: Identity | None = None,
    protocol: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The mechanism diagnostic of a model on prompts, as a dictionary for a result file.

    Args:
        model: any model whose recurrent layers `osdn.analysis.capture` can read; attention layers are
            skipped, and the result counts them.
        prompts: read one at a time, so a generator is fine.
        progress: called after each prompt.
        identity: the model's identity, recorded in the result.
        protocol: how the prompts were chosen, recorded in the result: {"count": ..., "length": ...}.
    """
    diagnosis = Diagnosis(model)
    for prompt in prompts:
        diagnosis.read(prompt)
        if progress is not None:
            progress(prompt)
    model_record = {} if identity is None else identity.record()
    return {**model_record, "protocol": protocol or {}, **diagnosis.result()}


def _prompts(tasks: list[Sums]) -> dict[str, Any]:
    """What was read, and how much of it was truncated."""
    digests = [x for task in tasks for x in task.digests]
    cuts = [x for task in tasks for x in task.cuts]
    return {
        "data": {
            "source": ", ".join(sorted({source for task in tasks for source in task.sources})),
            "documents": len(digests),
            "digest": digest(digests),
        },
        "truncated": {"prompts": len(cuts), "tokens": sum(cuts)},
    }


def _rows(T: int, second_reading: int | None, device: torch.device) -> Tensor:
    """Which tokens belong to which row of sums, [BINS + 2, T]: bins of position, first and second reading."""
    t = torch.arange(T, device=device)
    bins = (t * BINS // T) == torch.arange(BINS, device=device)[:, None]
    if second_reading is None:
        readings = torch.zeros(2, T, dtype=torch.bool, device=device)
    else:
        readings = torch.stack([t < second_reading, t >= second_reading])
    return torch.cat([bins, readings]).double()


def _summary(tasks: list[Sums]) -> dict[str, Any]:
    """Averages with intervals, for one task or for several together."""
    ratios = torch.stack([task.ratios for task in tasks]).sum(0)  # [L, BINS + 2, H, 5]
    rows = [torch.stack(task.prompts) for task in tasks]  # [P, BINS + 2, 5] per task
    total, resampled = ratios.sum((0, 2)), _resample(rows)  # [BINS + 2, 5], [RESAMPLES, BINS + 2, 5]
    overall, resampled_overall = total[:BINS].sum(0), resampled[:, :BINS].sum(1)
    boundaries = [b for task in tasks for b in task.boundaries]
    return {
        "prompts": sum(len(task.prompts) for task in tasks),
        "measurements": int(overall[TOKENS]),
        "boundary": sum(boundaries) / len(boundaries) if boundaries else None,
        "q_geo": _interval(_geometric, overall, resampled_overall),
        "q_arith": _interval(_arithmetic, overall, resampled_overall),
        "q_geo_closed_form": float((overall[LOG_CLOSED] / overall[TOKENS]).exp()),
        "first_reading": _interval(_geometric, total[BINS], resampled[:, BINS]),
        "second_reading": _interval(_geometric, total[BINS + 1], resampled[:, BINS + 1]),
        "by_position": [_interval(_geometric, total[b], resampled[:, b]) for b in range(BINS)],
        "by_layer": _numbers(_geometric(ratios[:, :BINS].sum((1, 2)))),
        "by_layer_and_head": [_numbers(row) for row in _geometric(ratios[:, :BINS].sum(1))],
        "by_prompt": _numbers(_geometric(torch.cat(rows)[:, :BINS].sum(1))),
    }


def _resample(tasks: list[Tensor]) -> Tensor:
    """Sums over prompts resampled with replacement within each task, [RESAMPLES, BINS + 2, 5]."""
    generator = torch.Generator().manual_seed(SEED)
    result = torch.zeros(RESAMPLES, *tasks[0].shape[1:], dtype=torch.float64)
    for rows in tasks:
        P = len(rows)
        drawn = torch.randint(P, (RESAMPLES, P), generator=generator)
        times = torch.zeros(RESAMPLES, P, dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones(RESAMPLES, P, dtype=torch.float64)
        )
        result += torch.einsum("rp,pbc->rbc", times, rows)
    return result


def _interval(mean: Callable[[Tensor], Tensor], sums: Tensor, resampled: Tensor) -> dict[str, Any] | None:
    """The mean and its 95 % bootstrap interval over prompts; None where nothing was measured."""
    if sums[COUNT] == 0:
        return None
    drawn = mean(resampled)
    low, high = drawn[~drawn.isnan()].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"value": float(mean(sums)), "low": low, "high": high}


def _geometric(sums: Tensor) -> Tensor:
    return (sums[..., LOG_Q] / sums[..., COUNT]).exp()


def _arithmetic(sums: Tensor) -> Tensor:
    return sums[..., Q] / sums[..., COUNT]


def _numbers(x: Tensor) -> list[float | None]:
    """A list for JSON, which has no NaN."""
    return [None if value != value else value for value in x.tolist()]
