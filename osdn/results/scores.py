"""Scores and the scores derived from them: averages, the geometric mean, the drift, changes from a baseline.

A score is a number with its standard error.  Derived scores are computed only here, from whatever scores
there are.  If a part is missing the derived score is absent, so tables can be made at any time.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from osdn.results.paper import BUCKETS

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
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1")
RULER_LENGTHS = (1024, 2048, 4096, 8192)
RULER = tuple(f"{needle}_{length // 1024}k" for needle in NEEDLES for length in RULER_LENGTHS)
CODE = ("code_arguments", "code_variables", "code_attributes")
CODE_TWICE = tuple(f"{task}_twice" for task in CODE)
MEANS = {
    "recall_single": SINGLE,
    "recall_repeated": REPEATED,
    "recall": SINGLE + REPEATED,
    "commonsense": COMMONSENSE,
    "retrieval": RETRIEVAL,
    "longbench": LONGBENCH,
    "ruler": RULER,
    "code_single": CODE,
    "code_repeated": CODE_TWICE,
    "code_recall": CODE + CODE_TWICE,
}
# The differences from a baseline that the paper prints, and the columns they are computed from.
CHANGES = {"repeated_change": REPEATED, "nll_change": ("wikitext_ppl", "lambada_ppl")}
COMPARED = tuple(column for parts in CHANGES.values() for column in parts)


class Score(NamedTuple):
    value: float
    error: float | None = None  # its standard error, if known


Scores = Mapping[str, Score]
Documents = Mapping[str, np.ndarray]  # the scores of documents by column: [N], or [N, 2] with lengths


def derive(scores: Scores) -> dict[str, Score]:
    """The scores, together with those derived from them."""
    derived = {
        name: mean([scores[part] for part in parts])
        for name, parts in MEANS.items()
        if all(part in scores for part in parts)
    }
    if "wikitext_ppl" in scores and "lambada_ppl" in scores:
        derived["lm_ppl"] = geometric_mean(scores["wikitext_ppl"], scores["lambada_ppl"])
    if BUCKETS[1] in scores and BUCKETS[-1] in scores:
        derived["pg19_drift"] = difference(scores[BUCKETS[-1]], scores[BUCKETS[1]])
    return {**scores, **derived}


def changes(
    scores: Scores, baseline: Scores, documents: Documents | None = None, theirs: Documents | None = None
) -> dict[str, Score]:
    """The differences from a baseline that the paper prints; both sides must be derived already.

    If both models answered the same documents, the error is that of the paired differences: some documents
    are hard for every model, which independent errors would count twice.
    """
    differences = {}
    if "recall_repeated" in scores and "recall_repeated" in baseline:
        differences["repeated_change"] = difference(scores["recall_repeated"], baseline["recall_repeated"])
    if "lm_ppl" in scores and "lm_ppl" in baseline:
        differences["nll_change"] = difference(_log(scores["lm_ppl"]), _log(baseline["lm_ppl"]))
    for name, score in differences.items():
        pairs = [((documents or {}).get(part), (theirs or {}).get(part)) for part in CHANGES[name]]
        error = root_of_squares(*(paired_error(*pair) for pair in pairs), factor=1 / len(pairs))
        differences[name] = Score(score.value, score.error if error is None else error)
    return differences


def paired_error(ours: np.ndarray | None, theirs: np.ndarray | None) -> float | None:
    """The standard error of a difference of means over documents [N], or of sums over lengths [N, 2]."""
    if ours is None or theirs is None or ours.shape != theirs.shape or len(ours) < 2:
        return None
    if ours.ndim == 1:
        return float((ours - theirs).std(ddof=1) / math.sqrt(len(ours)))
    gap, lengths = ours[:, 0] - theirs[:, 0], ours[:, 1]
    residuals = gap - gap.sum() / lengths.sum() * lengths
    return float(math.sqrt((residuals**2).sum() * len(ours) / (len(ours) - 1)) / lengths.sum())


def mean(scores: list[Score]) -> Score:
    """The average of independent scores."""
    return Score(
        sum(score.value for score in scores) / len(scores),
        root_of_squares(*(score.error for score in scores), factor=1 / len(scores)),
    )


def difference(ours: Score, theirs: Score) -> Score:
    return Score(ours.value - theirs.value, root_of_squares(ours.error, theirs.error))


def geometric_mean(a: Score, b: Score) -> Score:
    middle = mean([_log(a), _log(b)])
    value = math.exp(middle.value)
    return Score(value, None if middle.error is None else value * middle.error)


def root_of_squares(*errors: float | None, factor: float = 1.0) -> float | None:
    """The error of a sum of independent terms, times `factor`; unknown if the error of any term is."""
    known = [error for error in errors if error is not None]
    return factor * math.hypot(*known) if len(known) == len(errors) else None


def _log(score: Score) -> Score:
    """The logarithm; to first order, its error is the relative error."""
    return Score(math.log(score.value), None if score.error is None else score.error / score.value)
