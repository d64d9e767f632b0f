"""The columns of the paper's tables: what they are called, and those that follow from others.

A score is a number and its standard error.  Averages, the geometric mean, the drift and the differences to a
baseline are computed here and nowhere else, from whatever scores there are; a column that lacks a part is
absent, so that tables can be made at any time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from osdn.evaluation import paper
from osdn.evaluation.paper import BUCKETS
from osdn.models import PRESETS

SINGLE = ("fda", "swde", "squad")
REPEATED = tuple(f"{task}_twice" for task in SINGLE)
COMMONSENSE = (
    "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq", "lambada",
)  # fmt: skip
RETRIEVAL = ("drop", "nq_open", "triviaqa")
LONGBENCH = tuple(
    f"longbench_{task}"
    for task in (
        "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum",
        "multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en",
    )
)  # fmt: skip
MEANS = {
    "recall_single": SINGLE,
    "recall_repeated": REPEATED,
    "recall": SINGLE + REPEATED,
    "commonsense": COMMONSENSE,
    "retrieval": RETRIEVAL,
    "longbench": LONGBENCH,
}


COMPARED = (*REPEATED, "wikitext_ppl", "lambada_ppl")  # what the printed differences to a baseline come from


class Score(NamedTuple):
    value: float
    error: float | None = None  # its standard error, if that is known


Scores = Mapping[str, Score]


def derive(scores: Scores) -> dict[str, Score]:
    """The scores and what follows from them."""
    found = {
        name: mean([scores[part] for part in parts])
        for name, parts in MEANS.items()
        if all(part in scores for part in parts)
    }
    if "wikitext_ppl" in scores and "lambada_ppl" in scores:
        found["lm_ppl"] = geometric_mean(scores["wikitext_ppl"], scores["lambada_ppl"])
    if BUCKETS[1] in scores and BUCKETS[-1] in scores:
        found["pg19_drift"] = difference(scores[BUCKETS[-1]], scores[BUCKETS[1]])
    return {**scores, **found}


def changes(scores: Scores, baseline: Scores) -> dict[str, Score]:
    """The differences to a baseline that the paper prints; both sides are derived already."""
    found = {}
    if "recall_repeated" in scores and "recall_repeated" in baseline:
        found["repeated_change"] = difference(scores["recall_repeated"], baseline["recall_repeated"])
    if "lm_ppl" in scores and "lm_ppl" in baseline:
        found["nll_change"] = difference(_log(scores["lm_ppl"]), _log(baseline["lm_ppl"]))
    return found


def mean(scores: list[Score]) -> Score:
    """The average of independent scores."""
    return Score(
        sum(score.value for score in scores) / len(scores),
        root_of_squares(*(score.error for score in scores), scale=1 / len(scores)),
    )


def difference(ours: Score, theirs: Score) -> Score:
    return Score(ours.value - theirs.value, root_of_squares(ours.error, theirs.error))


def geometric_mean(a: Score, b: Score) -> Score:
    middle = mean([_log(a), _log(b)])
    value = math.exp(middle.value)
    return Score(value, None if middle.error is None else value * middle.error)


def _log(score: Score) -> Score:
    """To first order, the error of a logarithm is relative."""
    return Score(math.log(score.value), None if score.error is None else score.error / score.value)


def root_of_squares(*errors: float | None, scale: float = 1.0) -> float | None:
    """The error of a sum of independent terms, times `scale`; unknown if a term's is."""
    known = [error for error in errors if error is not None]
    return scale * math.hypot(*known) if len(known) == len(errors) else None


def baseline_of(model: str) -> str | None:
    """The preset without online scaling on the same backbone and of the same size."""
    if model not in PRESETS or PRESETS[model]["preconditioner"] is None:
        return None
    size = model.rpartition("-")[2]
    backbone = PRESETS[model]["backbone"]
    return next(
        name
        for name, preset in PRESETS.items()
        if name.endswith(f"-{size}") and preset["backbone"] == backbone and preset["preconditioner"] is None
    )


@dataclass(frozen=True)
class Column:
    title: str
    key: str
    digits: int = 3
    higher_is_better: bool | None = True  # None: neither
    signed: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    columns: tuple[Column, ...]
    printed: tuple[paper.Printed, ...]  # the paper's tables with these columns

    def figures(self, model: str) -> dict[str, float]:
        """What the paper prints here for one of its models."""
        return {k: v for table in self.printed for k, v in table.rows.get(model, {}).items()}


def _ppl(title: str, key: str) -> Column:
    return Column(title, key, 2, False)


_SHORT = {"hellaswag": "HSwag", "winogrande": "WinoG.", "arc_easy": "ARC-E", "arc_challenge": "ARC-C"}
_SHORT |= {"social_iqa": "SIQA", "boolq": "BoolQ", "lambada": "LAMB.", "piqa": "PIQA", "squad": "SQuAD"}
DRIFT = Column("Δ", "pg19_drift", 2, False, True)

# In the order of the paper.
MAIN = Table(
    "Main results",
    "LM is the geometric mean of WikiText and LAMBADA; recall is accuracy.",
    (
        _ppl("LM", "lm_ppl"), _ppl("PG-19", "pg19_ppl"), Column("recall, all", "recall"),
        Column("single", "recall_single"), Column("repeated", "recall_repeated"),
        Column("Δ repeated", "repeated_change", signed=True), Column("common.", "commonsense"),
        Column("LongBench", "longbench"), Column("tokens/s Δ %", "throughput_change", 1, signed=True),
    ),
    (paper.MAIN,),
)  # fmt: skip
PERPLEXITY = Table(
    "Language-model perplexity",
    "ΔNLL is the logarithm of LM against the baseline's.",
    (
        _ppl("FW-Edu", "fineweb_edu_ppl"), _ppl("WikiText", "wikitext_ppl"), _ppl("LAMBADA", "lambada_ppl"),
        _ppl("LM", "lm_ppl"), Column("ΔNLL", "nll_change", 3, False, True),
    ),
    (paper.PERPLEXITY, paper.PERPLEXITY_1_3B),
)  # fmt: skip
RECALL = Table(
    "In-context recall",
    "Contains-accuracy; twice: the context is read twice.",
    (
        *(Column(_SHORT.get(task, task.upper()), task) for task in SINGLE), Column("single", "recall_single"),
        *(Column(f"{_SHORT.get(task, task.upper())} twice", f"{task}_twice") for task in SINGLE),
        Column("repeated", "recall_repeated"), Column("overall", "recall"),
    ),
    (paper.RECALL, paper.RECALL_1_3B),
)  # fmt: skip
COMMON = Table(
    "Commonsense reasoning",
    "Normalised accuracy for PIQA, HellaSwag and ARC, accuracy for the rest.",
    (*(Column(_SHORT[task], task) for task in COMMONSENSE), Column("average", "commonsense")),
    (paper.COMMONSENSE, paper.COMMONSENSE_1_3B),
)
GENERAL = Table(
    "General checks",
    "The averages beside each other.",
    (
        Column("common.", "commonsense"), Column("recall", "recall"), Column("LongBench", "longbench"),
        _ppl("PG-19", "pg19_ppl"),
    ),
    (paper.GENERAL, paper.LONGBENCH_1_3B),
)  # fmt: skip
GENERATION = Table(
    "Retrieval",
    "F1 for DROP, exact match for the others.",
    (
        Column("DROP", "drop"), Column("NQ-Open", "nq_open"), Column("TriviaQA", "triviaqa"),
        Column("average", "retrieval"),
    ),
    (paper.RETRIEVAL,),
)  # fmt: skip
PG19 = Table(
    "PG-19 by position",
    "Perplexity by 2K-token bucket; Δ is 18–20K less 2–4K.",
    (
        *(_ppl(f"{2 * i}–{2 * i + 2}K", bucket) for i, bucket in enumerate(BUCKETS)),
        _ppl("final", "pg19_ppl"), DRIFT,
    ),
    (paper.PG19,),
)  # fmt: skip
LONG = Table(
    "LongBench",
    "Its 14 English tasks; the paper prints their average only.",
    (
        *(Column(task.removeprefix("longbench_"), task) for task in LONGBENCH),
        Column("average", "longbench"),
    ),
    (paper.MAIN,),
)  # fmt: skip
BY_SUITE = {
    "ppl": PERPLEXITY, "recall": RECALL, "commonsense": COMMON, "retrieval": GENERATION, "longbench": LONG,
    "pg19": PG19,
}  # fmt: skip
TABLES = (MAIN, PERPLEXITY, RECALL, COMMON, GENERAL, GENERATION, PG19, LONG)
