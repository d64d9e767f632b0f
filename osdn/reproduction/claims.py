"""Which of the paper's claims show in these results, decided from intervals by one rule.

A claim says that one model has more of something than another, or less, as the paper's figures at 340M have
it.  `RULE` says how it is judged.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from osdn.reproduction.profiles import BEST, STEADY, TUNED, baseline_of
from osdn.reproduction.results import Content, difference, estimate, values
from osdn.results import paper
from osdn.results.names import title
from osdn.results.statistics import Estimate, t_interval

SHOWS, NOT, UNSEEN = "shows", "does not show", "cannot be seen"
HALF = 0.5  # of the paper's effect: less does not count as showing it
JUDGED = (0.02, 0.98)  # recall of a baseline; beyond, a difference has no room to show
PARITY = 5.5  # per cent of speed that the paper calls lightweight
RULE = (
    "The rule: differences are paired by seed, with Student's 95 % interval. A claim shows if the whole "
    "interval is on the side that the paper claims. It does not show if the whole interval is below half of "
    "the paper's effect, as a share of the baseline's value. Otherwise it cannot be seen with these "
    "intervals; nor can recall where the baseline answers less than 2 % or more than 98 % of the questions. "
    "Speed is at parity if the interval over repeats stays within ±5.5 %, the paper's own bound. Intervals "
    "are not corrected for the number of claims: without any effect, one claim in forty would be expected to "
    "show."
)


@dataclass(frozen=True)
class Measure:
    """A column of ours, the paper's column for it, and what more of it is called."""

    words: str
    key: str
    theirs: str
    table: paper.Printed
    more: str = "higher"
    less: str = "lower"
    digits: int = 3


RECALL = Measure("recall", "code_recall", "recall", paper.MAIN)
TWICE = Measure("repeated recall", "code_repeated", "recall_repeated", paper.MAIN)
SINGLE = Measure("single-pass recall", "code_single", "recall_single", paper.MAIN)
RATIO = Measure("residual ratio", "q_geo", "q_geo", paper.RESIDUALS)
PERPLEXITY = Measure("perplexity", "lm_ppl", "lm_ppl", paper.MAIN, digits=2)
LONG = Measure("long-document perplexity", "pg19_ppl", "pg19_ppl", paper.MAIN, digits=2)
# The ablations' own table, where a model is compared with OSDN.
ABLATED_RECALL = Measure("recall", "code_recall", "recall", paper.ABLATIONS)
ABLATED_LONG = Measure("long-document perplexity", "pg19_ppl", "pg19_ppl", paper.ABLATIONS, digits=2)

# What the paper's text points out in its tables; which way, its figures say.
CLAIMS: tuple[tuple[Measure, tuple[str, ...], str | None], ...] = (
    (RECALL, ("osdn", "osdn-apf", "osgdn", "osgdn-apf", "oskda", "oskda-apf"), None),
    (TWICE, ("osdn", "osdn-apf", "osgdn", "osgdn-apf", "oskda-apf"), None),
    (SINGLE, ("osdn", "osgdn-apf", "oskda"), None),
    (RATIO, ("osdn", "osdn-apf"), None),
    (PERPLEXITY, ("osdn", "osdn-apf", "osgdn", "osgdn-apf", "oskda", "oskda-apf"), None),
    (LONG, ("osdn", "osdn-apf", "osgdn", "oskda"), None),
    (ABLATED_RECALL, ("osdn-d0", "osdn-d0-free", "osdn-apf"), "osdn"),
    (ABLATED_LONG, ("osdn-d0", "osdn-d0-free"), "osdn"),
)
SPEED = ("osdn", "osdn-apf", "osgdn", "osgdn-apf", "oskda", "oskda-apf")
# Not in the paper: is it the write strength, and is there a better preconditioner?
QUESTIONS = (
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
        _claim(content, measure, model, base or baseline_of(model))
        for measure, models, base in CLAIMS
        for model in models
    ]
    return [*(claim for claim in claims if claim is not None), *_speeds(content)]


def _claim(content: Content, measure: Measure, model: str, base: str) -> Finding | None:
    ours, level = _compared(content, measure, model, base)
    if ours is None:
        return None
    a, b = (measure.table.rows[f"{name}-340m"][measure.theirs] for name in (model, base))
    direction, relative = math.copysign(1, a - b), abs(a - b) / b
    room = not measure.key.startswith("code_") or JUDGED[0] <= level <= JUDGED[1]
    side, digits = measure.more if direction > 0 else measure.less, measure.digits
    other = "" if base == baseline_of(model) else f" than {title(base)}"
    return Finding(
        title(model),
        f"{side} {measure.words}{other}",
        judge(ours, direction, HALF * relative * level) if room else UNSEEN,
        _two(level, level + ours.mean, digits),
        _interval(ours, digits),
        _two(b, a, digits),
        _per_cent(ours, level),
        100 * (a - b) / b,
    )


def _compared(content: Content, measure: Measure, model: str, base: str) -> tuple[Estimate | None, float]:
    """The paired difference, and the baseline's mean over the same seeds."""
    ours, theirs = values(content, model, measure.key), values(content, base, measure.key)
    level = estimate({seed: x for seed, x in theirs.items() if seed in ours})
    return difference(content, model, base, measure.key), 0.0 if level is None else level.mean


def _speeds(content: Content) -> Iterator[Finding]:
    speeds, printed = content["throughput"], paper.THROUGHPUT.rows

    def fast(name: str) -> float:
        return printed[f"{name}-340m"]["tokens_per_second"]

    for model in SPEED:
        changes = speeds.get(model, {}).get("changes")
        if not changes:
            continue
        change, base = t_interval(changes), baseline_of(model)
        inside = change.low >= -PARITY and change.high <= PARITY
        outside = change.low > PARITY or change.high < -PARITY
        theirs = printed[f"{model}-340m"]["throughput_change"]
        yield Finding(
            title(model),
            "speed at parity",
            SHOWS if inside else NOT if outside else UNSEEN,
            _two(speeds[base]["tokens_per_second"], speeds[model]["tokens_per_second"], 0),
            f"{_interval(change, 1)} %",
            _two(fast(base), fast(model), 0),
            change,
            theirs,
        )


def answers(content: Content) -> list[Finding]:
    """What the paper does not ask: the tuned write strength and the best preconditioner of the referee."""
    results = []
    for model, base in QUESTIONS:
        for measure in ASKED:
            ours, level = _compared(content, measure, model, base)
            if ours is None:
                continue
            verdict = measure.more if ours.low > 0 else measure.less if ours.high < 0 else UNSEEN
            words = f"{measure.words}, against {title(base)}"
            both, interval = _two(level, level + ours.mean, measure.digits), _interval(ours, measure.digits)
            results.append(
                Finding(title(model), words, verdict, both, interval, "", _per_cent(ours, level), None)
            )
    return results


def _two(base: float, model: float, digits: int) -> str:
    return f"{base:,.{digits}f} → {model:,.{digits}f}"


def _interval(d: Estimate, digits: int) -> str:
    interval = f" [{d.low:+.{digits}f}, {d.high:+.{digits}f}]" if d.seeds > 1 else ", one seed"
    return f"{d.mean:+.{digits}f}{interval}"


def _per_cent(d: Estimate, level: float) -> Estimate:
    scale = 100 / level if level else math.nan
    return Estimate(d.mean * scale, d.low * scale, d.high * scale, d.seeds)
