"""The referee's page claims what the numbers support, and no more."""

import numpy as np
import pytest

from osdn.results.referee_page import (
    difference_table,
    significant,
    verdicts,
    weak_baseline_table,
    write_referee,
)
from tests.browser import CHROMIUM, DRIVER, browser
from tests.results.files import referee_content as content
from tests.results.files import referee_row as row


def test_the_first_sentence_says_so_if_nothing_was_found():
    first, *rest = verdicts(content({("text", "osdn", 1.0): (0.3, 0.06)}))
    assert first.startswith("With the full budget, nothing beats the tuned plain delta rule (6 comparisons")
    assert rest == ["Nothing is measurably worse either."]


def test_holding_more_learning_faster_and_being_worse_are_distinguished():
    effects = {
        ("capacity", "osdn-newton", 1.0): (0.2, 0.01),
        ("capacity", "osdn-newton", 0.25): (0.3, 0.01),
        ("text", "osdn", 0.25): (0.1, 0.01),
        ("text", "gdn+pgdn", 1.0): (-0.1, 0.01),
    }
    more, faster, worse = verdicts(content(effects))
    assert "OSDN-Newton on capacity (+0.200" in more
    assert "OSDN on" not in more
    assert faster.startswith("Learned faster, but holds no more")
    assert "OSDN on text (+0.100" in faster
    assert "capacity" not in faster
    assert "gdn+pgdn on text (-0.100" in worse.replace("GDN", "gdn")


@pytest.mark.parametrize(
    ("mean", "adjusted", "spread", "expected"),
    [(0.1, 0.04, 0.02, True), (0.1, 0.06, 0.02, False), (0.1, 0.04, 0.2, False), (0.1, np.nan, 0.02, False)],
)
def test_significance_needs_the_corrected_test_and_the_interval(mean, adjusted, spread, expected):
    assert significant(row("text", "osdn", 1.0, mean, adjusted, spread)) == expected


def test_the_table_marks_significance_after_and_before_the_correction():
    table = difference_table(
        content({("text", "osdn", 1.0): (0.1, 0.01), ("capacity", "osdn", 1.0): (-0.1, 0.1)}), 1.0
    )
    cells = {r.label: r.cells for r in table.rows}
    assert [r.rule for r in table.rows] == [True, False, False, True, False]
    assert cells["DeltaNet (plain)"][0].text == "0.500"
    assert (cells["OSDN"][1].text, cells["OSDN"][1].good) == ("★ +0.100", True)
    assert (cells["OSDN"][0].text, cells["OSDN"][0].good) == ("· -0.100", None)


def test_a_gain_over_a_weak_baseline_is_shown_beside_the_gain_over_a_tuned_one():
    result = content({})
    tuned = {(r["contestant"], r["trial"]): r for r in result["tuned"]}
    tuned["osdn-newton", "text"] |= {"score": 0.45, "score_without_bias": 0.45}
    cells = {r.label: r.cells for r in weak_baseline_table(result).rows}
    assert (cells["DeltaNet (plain)"][1].text, cells["DeltaNet (plain)"][1].error) == ("0.400", "(0.500)")
    assert (cells["OSDN-Newton"][1].text, cells["OSDN-Newton"][1].error) == ("+0.050", "(-0.050)")


def test_the_page_has_every_section(tmp_path):
    text = write_referee(tmp_path / "page.html", content({})).read_text()
    for words in ("nothing beats", "After a quarter of the budget", "What tuning chose", "Residual ratio"):
        assert words in text
    assert text.count("<svg") == 2  # one per backbone


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_not_wider_than_the_window(width, tmp_path):
    trials = tuple(f"a task of name {i}" for i in range(13))
    page = write_referee(tmp_path / "page.html", content({}, trials))
    with browser(tmp_path / "profile", width, 800) as seen:
        seen.open(page)
        assert seen.run("return document.documentElement.scrollWidth <= window.innerWidth")
        assert not seen.complaints()
