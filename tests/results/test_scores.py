"""Averages and differences against hand calculation, and the paper's tables against each other."""

import math

import pytest

from osdn.models import PRESETS
from osdn.results import paper
from osdn.results.columns import TABLES
from osdn.results.paper import BUCKETS
from osdn.results.scores import COMMONSENSE, MEANS, Score, changes, derive


def test_recall_averages():
    scores = dict(zip(MEANS["recall"], (Score(x, 0.03) for x in (0.1, 0.2, 0.3, 0.3, 0.5, 0.7))))
    derived = derive(scores)
    assert derived["recall_single"].value == pytest.approx(0.2)
    assert derived["recall_repeated"].value == pytest.approx(0.5)
    assert derived["recall"].value == pytest.approx(0.35)
    assert derived["recall"].error == pytest.approx(0.03 / math.sqrt(6))
    assert derived["fda"] == scores["fda"]


def test_an_average_with_a_missing_part_is_absent():
    derived = derive({"fda": Score(0.1), "swde": Score(0.2), "squad": Score(0.3)})
    assert derived["recall_single"] == Score(pytest.approx(0.2), None)
    assert "recall" not in derived
    assert "recall_repeated" not in derived


def test_the_geometric_mean_and_its_error_to_first_order():
    derived = derive({"wikitext_ppl": Score(20.0, 0.4), "lambada_ppl": Score(45.0, 1.8)})["lm_ppl"]
    assert derived.value == pytest.approx(30.0)
    assert derived.error == pytest.approx(30 * math.hypot(0.4 / 20, 1.8 / 45) / 2)


def test_drift_and_differences_to_a_baseline():
    derived = derive({BUCKETS[1]: Score(20.0, 0.3), BUCKETS[-1]: Score(21.5, 0.4)})
    assert derived["pg19_drift"].value == pytest.approx(1.5)
    assert derived["pg19_drift"].error == pytest.approx(0.5)
    base = {"recall_repeated": Score(0.145, 0.006), "lm_ppl": Score(32.0, 0.64)}
    ours = {"recall_repeated": Score(0.218, 0.008), "lm_ppl": Score(30.99)}
    found = changes(ours, base)
    assert found["repeated_change"] == Score(pytest.approx(0.073), pytest.approx(0.01))
    assert found["nll_change"].value == pytest.approx(math.log(30.99 / 32.0))
    assert found["nll_change"].error is None
    assert changes(ours, {}) == {}


PRINTED = {name: table for name, table in vars(paper).items() if isinstance(table, paper.Printed)}


def test_the_papers_averages_follow_from_its_columns():
    """Up to rounding, so a figure that was copied wrongly would show."""
    for table in (paper.PERPLEXITY, paper.PERPLEXITY_1_3B):
        for model, row in table.rows.items():
            mean = math.sqrt(row["wikitext_ppl"] * row["lambada_ppl"])
            assert row["lm_ppl"] == pytest.approx(mean, abs=0.0101), model
    for table in (paper.COMMONSENSE, paper.COMMONSENSE_1_3B):
        for model, row in table.rows.items():
            if model != "osdn-340m":  # its row takes the best cell of several runs
                assert row["commonsense"] == pytest.approx(
                    sum(row[t] for t in COMMONSENSE) / 8, abs=1.1e-3
                ), model
    for model, row in paper.RECALL.rows.items():
        for key in ("recall_single", "recall_repeated", "recall"):
            parts = MEANS[key]
            assert row[key] == pytest.approx(sum(row[p] for p in parts) / len(parts), abs=1.1e-3), model
    for model, row in paper.RECALL_1_3B.rows.items():
        assert row["recall_single"] == pytest.approx((row["fda"] + row["swde"]) / 2, abs=1.1e-3), model
        assert row["recall_repeated"] == pytest.approx((row["fda_twice"] + row["swde_twice"]) / 2, abs=1.1e-3)
    for model, row in paper.PG19.rows.items():
        assert row["pg19_drift"] == pytest.approx(row[BUCKETS[-1]] - row[BUCKETS[1]], abs=0.0101), model
    for model, row in paper.RETRIEVAL.rows.items():
        mean = (row["drop"] + row["nq_open"] + row["triviaqa"]) / 3
        assert row["retrieval"] == pytest.approx(mean, abs=1.1e-3), model


def test_the_papers_tables_agree_with_each_other():
    """All shared cells but one agree: OSDN-APF's commonsense is 0.456, but 0.454 among the ablations."""
    different = {
        (model, key)
        for first in PRINTED.values()
        for second in PRINTED.values()
        for model in first.rows.keys() & second.rows.keys()
        for key in first.rows[model].keys() & second.rows[model].keys()
        if first.rows[model][key] != second.rows[model][key]
    }
    assert different == {("osdn-apf-340m", "commonsense")}


def test_the_papers_models_are_presets_and_its_columns_are_known():
    keys = {column.key for table in TABLES for column in table.columns}
    for name, table in PRINTED.items():
        for model, row in table.rows.items():
            assert model in PRESETS or name == "ABLATIONS", model
            assert row.keys() <= keys, name
    assert paper.MAIN.rows["oskda-apf-340m"]["repeated_change"] == 0.029
    assert "pg19_ppl" not in paper.MAIN.rows["osdn-apf-1.3b"]  # not printed
