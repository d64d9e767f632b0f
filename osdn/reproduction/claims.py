"""Which of the paper's claims show in these results, decided from intervals by one rule.

Most claims say that one model has more of something than another, or less, as the paper's figures at 340M
have it; some, that two are equal.  `RULE` says how they are judged.
"""

import math
from dataclasses import dataclass

from osdn.reproduction.profiles import BEST, STEADY, STILL, TUNED, baseline_of
from osdn.reproduction.results import Content, difference, estimate, values
from osdn.results import paper
from osdn.results.names import title
from osdn.results.statistics import Estimate, median_interval

SHOWS, NOT, UNSEEN = "shows", "does not show", "cannot be seen"
HALF = 0.5  # of the paper's effect: an interval wholly below it shows that there is no such effect
JUDGED = (0.02, 0.98)  # recall of a baseline; beyond, a difference has no room to show
PARITY = 5.5  # per cent of speed that the paper calls lightweight
SPREAD = 0.058  # nats between the highest and the lowest of the paper's final losses
RULE = (
    "The rule: differences are paired by seed, with Student's 95 % interval. A claim shows if the whole "
    "interval is on the side that the paper claims. It does not show if the whole interval is below half of "
    "the paper's effect, as a share of the baseline's value (for drift, of its perplexity). Otherwise it "
    "cannot be seen with these intervals; nor can recall where the baseline answers less than 2 % or more "
    "than 98 % of the questions. Intervals are not corrected for the number of claims: without any effect, "
    "one in forty would be expected to show. Claims of parity show if the whole interval stays within the "
    "paper's own bounds, ±5.5 % of speed (the median over repeats) and ±0.058 nats of the final loss, and "
    "do not show if it is wholly outside."
)


@dataclass(frozen=True)
class Measure:
    """A column of ours, and the paper's column for it."""

    words: str
    key: str
    theirs: str
    table: paper.Printed
    digits: int = 3
    share_of: str = ""  # the column, here and there, that differences are a share of; this one if not given


RECALL = Measure("recall", "code_recall", "recall", paper.MAIN)
TWICE = Measure("repeated recall", "code_repeated", "recall_repeated", paper.MAIN)
SINGLE = Measure("single-pass recall", "code_single", "recall_single", paper.MAIN)
RATIO = Measure("residual ratio", "q_geo", "q_geo", paper.RESIDUALS)
PERPLEXITY = Measure("perplexity", "lm_ppl", "lm_ppl", paper.MAIN, digits=2)
LONG = Measure("long-document perplexity", "pg19_ppl", "pg19_ppl", paper.MAIN, digits=2)
DRIFT = Measure("drift", "pg19_drift", "pg19_drift", paper.PG19, digits=2, share_of="pg19_ppl")
# The ablations' own table, where a model is compared with OSDN.
ABLATED_RECALL = Measure("recall", "code_recall", "recall", paper.ABLATIONS)
ABLATED_DRIFT = Measure("drift", "pg19_drift", "pg19_drift", paper.ABLATIONS, digits=2, share_of="pg19_ppl")

# What the paper's text says of the columns that are measured here; which way, its figures say.  Models are
# compared with the plain delta rule of their block, or with the one that is named.
CLAIMS: tuple[tuple[Measure, tuple[str, ...], str | None], ...] = (
    # Main results, and the text below the tables of recall and of general checks
    (RECALL, ("osdn", "osdn-apf", "osgdn", "osgdn-apf", "oskda", "oskda-apf"), None),
    (TWICE, ("osdn", "osdn-apf", "osgdn", "osgdn-apf", "oskda", "oskda-apf"), None),
    (SINGLE, ("oskda",), None),
    (RECALL, ("osdn-apf",), "osdn"),
    (PERPLEXITY, ("osdn", "osdn-apf", "osgdn-apf", "oskda", "oskda-apf"), None),
    (PERPLEXITY, ("osdn-apf",), "osdn"),
    # Mechanism diagnostic
    (RATIO, ("osdn", "osdn-apf"), None),
    (RATIO, ("osdn-apf",), "osdn"),
    # Length extrapolation
    (LONG, ("osdn", "osdn-apf", "osgdn", "osgdn-apf", "oskda", "oskda-apf"), None),
    (LONG, ("osdn-apf",), "osdn"),
    (DRIFT, ("osdn", "osgdn-apf", "oskda-apf"), None),
    # Ablations
    (ABLATED_RECALL, ("osdn-d0-free",), "osdn-d0"),
    (ABLATED_DRIFT, ("osdn-d0",), "osdn"),
)
FALLING = ("osdn", "osdn-apf")  # their residual ratio, from the first reading to the second
SCALED = ("osdn", "osdn-apf", "osgdn", "osgdn-apf", "oskda", "oskda-apf")  # at parity in speed and loss
# Not in the paper: is it the online step, is it the write strength, and is there a better preconditioner?
QUESTIONS = (
    *((STILL, "delta_net"), ("osdn-apf", STILL)),
    *((TUNED, "delta_net"), ("osdn", TUNED), ("osdn-apf", TUNED)),
    *((BEST, "delta_net"), (BEST, TUNED), (STEADY, "delta_net"), (STEADY, BEST)),
)
ASKED = (RECALL, PERPLEXITY, LONG, RATIO)


@dataclass(frozen=True)
class Finding:
    """A claim, what was measured, and the verdict."""

    model: str  # its title
    words: str
    verdict: str
    measured: str  # the two values, here
    difference: str  # with its interval
    printed: str  # the two values of the paper; empty where it has none
    ours: Estimate  # the difference relative to the baseline, in per cent
    theirs: float | None  # the paper's, too


def judge(d: Estimate, direction: float, least: float) -> str:
    """The verdict on a difference that should have the sign of `direction` and be at least `least`."""
    low, high = sorted((direction * d.low, direction * d.high))
    if low > 0:
        return SHOWS
    return NOT if high < max(least, 0.0) else UNSEEN


def findings(content: Content) -> list[Finding]:
    """Every claim of the paper that has results."""
    claims = [
        *(
            _claim(content, measure, model, base or baseline_of(model))
            for measure, models, base in CLAIMS
            for model in models
        ),
        *(_second_reading(content, model) for model in FALLING),
        *(_loss(content, model) for model in SCALED),
        *(_speed(content, model) for model in SCALED),
    ]
    return [claim for claim in claims if claim is not None]


def _claim(content: Content, measure: Measure, model: str, base: str) -> Finding | None:
    ours, value = _compared(content, measure.key, model, base)
    whole = _mean(content, measure.share_of or measure.key, base, model)
    if ours is None:
        return None
    theirs, plain = (measure.table.rows[f"{name}-340m"] for name in (model, base))
    a, b = theirs[measure.theirs], plain[measure.theirs]
    direction, relative = math.copysign(1, a - b), abs(a - b) / plain[measure.share_of or measure.theirs]
    room = not measure.key.startswith("code_") or JUDGED[0] <= value <= JUDGED[1]
    side, digits = "higher" if direction > 0 else "lower", measure.digits
    other = "" if base == baseline_of(model) else f" than {title(base)}"
    return Finding(
        title(model),
        f"{side} {measure.words}{other}",
        judge(ours, direction, HALF * relative * whole) if room else UNSEEN,
        _two(value, value + ours.mean, digits),
        _interval(ours, digits),
        _two(b, a, digits),
        _per_cent(ours, whole),
        100 * direction * relative,
    )


def _second_reading(content: Content, model: str) -> Finding | None:
    """The paper shows this in a figure only, so there is no effect to compare with."""
    first, second = (values(content, model, f"q_{n}_reading") for n in ("first", "second"))
    ours = estimate({seed: second[seed] - first[seed] for seed in second.keys() & first.keys()})
    if ours is None:
        return None
    words, before = (
        "lower residual ratio in the second reading",
        _mean(content, "q_first_reading", model, model),
    )
    return _without_figures(model, words, judge(ours, -1, 0.0), before, ours)


def _loss(content: Content, model: str) -> Finding | None:
    ours, value = _compared(content, "final_loss", model, baseline_of(model))
    if ours is None:
        return None
    return _without_figures(model, "final loss at parity", _parity(ours, SPREAD), value, ours)


def _speed(content: Content, model: str) -> Finding | None:
    speeds, base = content["throughput"], baseline_of(model)
    changes = speeds.get(model, {}).get("changes")
    if not changes:
        return None
    change = median_interval(changes)
    theirs, plain = (paper.THROUGHPUT.rows[f"{name}-340m"] for name in (model, base))
    return Finding(
        title(model),
        "speed at parity",
        _parity(change, PARITY),
        _two(speeds[base]["tokens_per_second"], speeds[model]["tokens_per_second"], 0),
        f"{_interval(change, 1)} %",
        _two(plain["tokens_per_second"], theirs["tokens_per_second"], 1),
        change,
        theirs["throughput_change"],
    )


def _parity(d: Estimate, bound: float) -> str:
    if max(abs(d.low), abs(d.high)) <= bound:
        return SHOWS
    return NOT if d.low > bound or d.high < -bound else UNSEEN


def _compared(content: Content, key: str, model: str, base: str) -> tuple[Estimate | None, float]:
    """The paired difference, and the baseline's mean over the same seeds."""
    return difference(content, model, base, key), _mean(content, key, base, model)


def _mean(content: Content, key: str, of: str, shared_with: str) -> float:
    """A model's mean over the seeds that another has as well."""
    seeds = values(content, shared_with, key).keys()
    mean = estimate({seed: x for seed, x in values(content, of, key).items() if seed in seeds})
    return 0.0 if mean is None else mean.mean


def answers(content: Content) -> list[Finding]:
    """What the paper does not ask: APF without its step, a lower write gate, the referee's best rule."""
    results = []
    for model, base in QUESTIONS:
        for measure in ASKED:
            ours, level = _compared(content, measure.key, model, base)
            if ours is None:
                continue
            verdict = "higher" if ours.low > 0 else "lower" if ours.high < 0 else UNSEEN
            words = f"{measure.words}, against {title(base)}"
            results.append(_without_figures(model, words, verdict, level, ours, measure.digits))
    return results


def _without_figures(
    model: str, words: str, verdict: str, before: float, ours: Estimate, digits: int = 3
) -> Finding:
    """A finding for which the paper prints no figures."""
    both, interval = _two(before, before + ours.mean, digits), _interval(ours, digits)
    return Finding(title(model), words, verdict, both, interval, "", _per_cent(ours, before), None)


def _two(base: float, model: float, digits: int) -> str:
    return f"{base:,.{digits}f} → {model:,.{digits}f}"


def _interval(d: Estimate, digits: int) -> str:
    interval = f" [{d.low:+.{digits}f}, {d.high:+.{digits}f}]" if d.seeds > 1 else ", one seed"
    return f"{d.mean:+.{digits}f}{interval}"


def _per_cent(d: Estimate, level: float) -> Estimate:
    scale = 100 / level if level else math.nan
    return Estimate(d.mean * scale, d.low * scale, d.high * scale, d.seeds)
