"""Verdicts follow from intervals by the stated rule."""

import numpy as np
import pytest

from osdn.reproduction import claims
from osdn.reproduction.claims import NOT, SHOWS, UNSEEN, answers, findings, judge
from osdn.reproduction.profiles import TUNED, baseline_of
from osdn.results.statistics import Estimate


@pytest.mark.parametrize(
    ("low", "high", "direction", "least", "verdict"),
    [
        (0.01, 0.05, 1, 0.02, SHOWS),
        (-0.05, -0.01, -1, 0.02, SHOWS),
        (-0.05, -0.01, 1, 0.02, NOT),  # the opposite
        (-0.01, 0.01, 1, 0.02, NOT),  # zero, and less than half of what the paper has
        (-0.01, 0.01, -1, 0.02, NOT),
        (-0.01, 0.03, 1, 0.02, UNSEEN),
        (-0.03, 0.01, -1, 0.02, UNSEEN),
        (0.0, 0.0, 1, 0.0, UNSEEN),  # nobody recalls anything
        (-np.inf, np.inf, 1, 0.02, UNSEEN),  # one seed
    ],
)
def test_the_rule(low, high, direction, least, verdict):
    assert judge(Estimate((low + high) / 2, low, high, 3), direction, least) == verdict


def results(**scores):
    """Results in which each model has a score per seed and column: {"osdn": {"code_recall": [...]}}."""
    runs = [
        {"model": model, "seed": seed, "scores": {c: x[seed] for c, x in columns.items() if seed < len(x)}}
        for model, columns in scores.items()
        for seed in range(max(map(len, columns.values())))
    ]
    models = {model: {"baseline": baseline_of(model), "parameters": 1} for model in scores}
    return {"models": models, "runs": runs, "throughput": {}}


def verdict_of(content, words):
    [finding] = [f for f in findings(content) if words in f"{f.model}: {f.words}"]
    return finding


def test_seeds_are_paired_and_the_paper_says_which_way():
    base = np.array([0.10, 0.30, 0.50])
    content = results(
        delta_net={"code_recall": base, "q_geo": [0.5, 0.6, 0.7]},
        osdn={"code_recall": base + np.array([0.05, 0.06, 0.07]), "q_geo": [0.6, 0.7, 0.8]},
    )
    more = verdict_of(content, "OSDN: higher recall")
    assert more.verdict == SHOWS  # though the seeds of both overlap
    assert more.ours.mean == pytest.approx(100 * 0.06 / 0.30)
    assert more.theirs == pytest.approx(32)
    assert (more.measured, more.printed) == ("0.300 → 0.360", "0.150 → 0.198")
    assert more.difference.startswith("+0.060 [+0.035")
    assert verdict_of(content, "OSDN: lower residual ratio").verdict == NOT  # it is higher in every seed


def test_recall_is_not_judged_where_the_baseline_recalls_nothing():
    content = results(delta_net={"code_recall": [0.0, 0.01, 0.0]}, osdn={"code_recall": [0.1, 0.11, 0.1]})
    assert verdict_of(content, "OSDN: higher recall").verdict == UNSEEN


def test_only_shared_seeds_count():
    content = results(
        delta_net={"code_recall": [0.2, 0.2, 0.9, 0.9]},
        osdn={"code_recall": [0.3, 0.31]},
    )
    assert verdict_of(content, "OSDN: higher recall").ours.mean == pytest.approx(52.5)


def test_ablations_are_compared_with_each_other():
    content = results(**{
        "osdn-d0": {"code_recall": [0.3, 0.31, 0.3]}, "osdn-d0-free": {"code_recall": [0.2, 0.21, 0.2]}
    })  # fmt: skip
    found = verdict_of(content, "OSDN+D0*: lower recall")
    assert found.words == "lower recall than OSDN+D0"
    assert found.verdict == SHOWS


def test_drift_is_a_share_of_the_perplexity():
    """Drift can be zero or negative; the paper's is 0.01 for KDA, where OSKDA-APF has -0.11."""
    level = {"pg19_ppl": [40.0, 41.0, 39.0]}
    content = results(
        kda={**level, "pg19_drift": [0.0, 0.1, -0.1]},
        **{"oskda-apf": {**level, "pg19_drift": [-0.4, -0.3, -0.5]}},
    )
    found = verdict_of(content, "lower drift")
    assert found.verdict == SHOWS
    assert found.ours.mean == pytest.approx(-1.0)  # 0.4 of 40, in per cent
    assert found.theirs == pytest.approx(100 * -0.12 / 18.73)
    content = results(
        kda={**level, "pg19_drift": [0.0, 0.1, -0.1]},
        **{"oskda-apf": {**level, "pg19_drift": [0.01, 0.1, -0.09]}},
    )
    assert verdict_of(content, "lower drift").verdict == NOT  # within ±0.02, half of theirs would be -0.13


def test_a_second_reading_is_compared_with_the_first():
    readings = {"q_first_reading": [0.4, 0.5, 0.6], "q_second_reading": [0.3, 0.4, 0.49]}
    found = verdict_of(results(osdn=readings), "second reading")
    assert (found.verdict, found.measured, found.theirs) == (SHOWS, "0.500 → 0.397", None)
    readings["q_second_reading"] = [0.41, 0.51, 0.615]
    assert verdict_of(results(osdn=readings), "second reading").verdict == NOT


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [([2.41, 2.52, 2.6], SHOWS), ([2.5, 2.61, 2.7], NOT), ([2.45, 2.5, 2.7], UNSEEN)],
)
def test_the_final_loss_is_judged_by_the_papers_spread(losses, verdict):
    content = results(delta_net={"final_loss": [2.4, 2.5, 2.6]}, osdn={"final_loss": losses})
    assert verdict_of(content, "final loss").verdict == verdict


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [([-1, 0, 1, 0, 1], SHOWS), ([-20, -21, -20, -19, -20], NOT), ([-9, 3, -2, 8, -5], UNSEEN)],
)
def test_speed_is_judged_by_the_papers_bound(changes, verdict):
    speeds = {"delta_net": {"tokens_per_second": 100}, "osdn": {"tokens_per_second": 99, "changes": changes}}
    content = results(osdn={"q_geo": [0.5]}) | {"throughput": speeds}
    assert verdict_of(content, "speed").verdict == verdict


def test_the_tuned_gate_is_a_baseline_of_its_own():
    content = results(**{TUNED: {"code_recall": [0.3, 0.32, 0.31]}}, osdn={"code_recall": [0.2, 0.21, 0.22]})
    [finding] = [f for f in answers(content) if f.words == "recall, against DeltaNet bias=-2"]
    assert finding.verdict == "lower"
    assert finding.printed == ""


def test_every_claim_has_the_papers_figures():
    for measure, models, base in claims.CLAIMS:
        for model in models:
            for name in (model, base or baseline_of(model)):
                assert measure.theirs in measure.table.rows[f"{name}-340m"]
