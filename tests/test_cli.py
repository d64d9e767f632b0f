"""The command line: what it prints, writes and returns."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osdn.analysis.theory import suite
from osdn.cli import app

runner = CliRunner()


def test_zoo_lists_every_row_with_its_state_size():
    result = runner.invoke(app, ["zoo", "--key-dim", "7", "--value-dim", "5", "--slots", "3"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line.split()[-1] for line in result.output.splitlines() if line.strip()}
    assert lines["gla"] == "35"
    assert lines["osdn"] == "42"
    assert lines["gsa"] == "36"
    assert lines["mesa_net"] == "84"


def test_the_zoo_page_is_what_the_command_prints():
    result = runner.invoke(app, ["zoo", "--markdown"])
    page = Path(__file__).parents[1] / "docs" / "zoo.md"
    assert page.read_text() == result.output, "regenerate it: osdn zoo --markdown > docs/zoo.md"


@pytest.mark.slow
def test_theory_prints_both_sides_and_writes_report_and_figures(tmp_path):
    result = runner.invoke(app, ["theory", "--output", str(tmp_path), "--problems", "4"])
    assert result.exit_code == 0, result.output
    assert "Theorem 2" in result.output
    assert json.loads((tmp_path / "theory.json").read_text())["passed"]
    assert (tmp_path / "theorem_2.svg").exists()


@pytest.mark.slow
def test_theory_fails_when_a_statement_does(tmp_path, monkeypatch):
    monkeypatch.setattr(suite.Report, "passed", False)
    assert runner.invoke(app, ["theory", "--output", str(tmp_path), "--problems", "2"]).exit_code == 1
