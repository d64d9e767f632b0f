"""The suite behind `osdn theory`: every statement holds, and every deliberate violation is reported."""

import json
from dataclasses import replace

import pytest
import torch

from osdn.analysis.theory import figures
from osdn.analysis.theory.check import Check, merge
from osdn.analysis.theory.suite import Config, Report, run_suite

CONFIG = Config(seed=1, problems=6, backend="reference")


@pytest.fixture(scope="module")
def report() -> Report:
    return run_suite(CONFIG)


def test_every_statement_of_the_paper_holds(report):
    assert {c.statement: c.verdict for c in report.statements if not c.passed} == {}
    assert report.passed


def test_each_violation_is_reported_alone_and_breaks_the_relation_that_needs_it(report):
    for v in report.violations:
        assert v.check.violated == [v.hypothesis], v.check.statement
        assert not v.check.passed
        assert v.check.holds != v.needed, (v.hypothesis, v.check.statement)


def test_every_hypothesis_of_every_statement_is_broken_somewhere(report):
    broken = {(v.check.statement, v.hypothesis) for v in report.violations}
    names = {name for _, name in broken}
    declared = {name for c in report.statements for name in c.hypotheses}
    # these are findings of the decomposition and the counter-example, not assumptions
    findings = {n for n in declared if "costs nothing" in n or "solved exactly" in n}
    assert declared - findings == names


def test_the_report_is_plain_json_with_versions_and_settings(report, tmp_path):
    contents = json.loads(
        report.write(tmp_path / "new").read_text(), parse_constant=lambda x: pytest.fail(f"not JSON: {x}")
    )
    assert contents["config"] == {"seed": 1, "problems": 6, "backend": "reference"}
    assert contents["versions"]["torch"] == torch.__version__
    assert contents["passed"] is True
    assert len(contents["statements"]) == len(report.statements)
    first = contents["statements"][0]
    assert first["log_sides"]["left"]["min"] <= first["log_sides"]["left"]["max"]


def test_a_failing_statement_fails_the_report(report):
    wrong = replace(report.statements[0], error=torch.ones(1))
    assert not replace(report, statements=[wrong]).passed


def test_an_undetected_violation_fails_the_report(report):
    blind = replace(report.violations[0], hypothesis="something else")
    assert not replace(report, violations=[blind]).passed


def test_a_check_judges_relation_and_hypotheses_separately():
    zero, one = torch.zeros(2), torch.ones(2)
    assert Check("a", "<=", zero, one).verdict == "holds"
    assert Check("a", "<=", one, zero).verdict == "FAILS"
    assert not Check("a", "<", zero, zero).holds
    assert Check("a", "<=", zero, zero).holds
    assert not Check("a", "=", torch.full((1,), torch.nan), zero).holds
    assert Check("a", "<=", zero, one, {"x": False}).verdict == "holds anyway, without: x"
    assert Check("a", "<=", one, zero, {"x": False, "y": True}).verdict == "fails, without: x"
    both = merge([Check("a", "=", zero, zero, {"x": True}), Check("a", "=", one, zero, {"x": False})])
    assert both.violated == ["x"]
    assert not both.holds


def test_figures_are_reproducible_byte_by_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", {n: figures.FIGURES[n] for n in ("feedback", "decomposition")})
    first, second = (figures.draw(CONFIG, tmp_path / name) for name in ("a", "b"))
    assert [p.name for p in first] == [
        "feedback.svg",
        "feedback.png",
        "decomposition.svg",
        "decomposition.png",
    ]
    for a, b in zip(first, second):
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.slow
def test_every_figure_is_drawn(tmp_path):
    paths = figures.draw(Config(), tmp_path)
    assert len(paths) == 2 * len(figures.FIGURES)
    assert all(p.stat().st_size > 5000 for p in paths)
