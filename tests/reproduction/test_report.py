"""The report: made from one file of results, and what the docs show is what it makes of theirs."""

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osdn.cli import app
from osdn.reproduction import report
from osdn.reproduction.profiles import MINUTES as MINUTES_PROFILE
from osdn.reproduction.results import check_same_data, load, save
from osdn.results.document import filled, marks
from tests.browser import CHROMIUM, DRIVER, browser

ROOT = Path(__file__).parents[2]
MINUTES = Path(__file__).parent / "minutes"  # what `osdn reproduce --profile minutes` left
DOCS = ROOT / "docs" / "reproduction"
COMMITTED = [folder for folder in (MINUTES, DOCS) if (folder / "results.json").exists()]
runner = CliRunner()


@pytest.fixture(scope="module")
def content():
    return load(MINUTES)


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_committed_tables_are_what_the_command_makes(folder):
    content = load(folder)
    tables = report.in_markdown(content)
    assert (folder / "tables.md").read_text() == tables, f"regenerate: osdn reproduce --report {folder}"
    page = folder.with_suffix(".md")
    if page.exists():
        part = report.part_of_document(content, folder)
        assert page.read_text() == filled(page.read_text(), report.COMMAND, part)
        shown = re.findall(r"!\[.+\]\(reproduction/(.+)\)", part)
        assert sorted(shown) == sorted(path.name for path in folder.glob("*.svg"))


def test_the_docs_page_has_a_place_for_the_tables():
    text = (ROOT / "docs" / "reproduction.md").read_text()
    assert all(text.count(mark) == 1 for mark in marks(report.COMMAND))


def test_the_command_writes_the_page_the_tables_and_the_figures(tmp_path, content):
    folder = tmp_path / "shown"
    save(content, folder)
    begin, end = marks(report.COMMAND)
    (tmp_path / "shown.md").write_text(f"before\n{begin}\nstale tables\n{end}\nafter\n")
    done = runner.invoke(app, ["reproduce", "--report", str(folder)])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "shown.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "stale tables" not in text
    assert "\n### Main results\n" in text
    assert "\n## Main results\n" in (folder / "tables.md").read_text()
    assert all(f"](shown/{path.name})" in text for path in folder.glob("*.svg"))
    page = (folder / "report.html").read_text()
    for heading in ("Main results", "In-context recall", "Mechanism diagnostic", "Ablations", "Inference"):
        assert heading in page
    assert 'class="faint"' in page
    assert page.count("<svg") == len(list(folder.glob("*.svg"))) == 4


def test_the_page_names_the_command_that_measured_it(content):
    assert report.command(content) == "osdn reproduce --profile minutes"
    more = MINUTES_PROFILE.with_seeds(6)
    content = {**content, "profile": asdict(more)}
    assert report.command(content) == "osdn reproduce --profile minutes --seeds 6"


def test_results_survive_being_saved(tmp_path, content):
    save(content, tmp_path)
    assert load(tmp_path) == content
    assert json.loads((tmp_path / "results.json").read_text()) == content
    assert len((tmp_path / "results.json").read_text()) < 500_000


def test_tables_come_in_the_papers_order_with_its_figures(content):
    titles = [table.title for table in report.tables(content) if ":" not in table.title]
    assert titles[:7] == [
        "The paper's claims",
        "Main results",
        "Language-model perplexity",
        "In-context recall",
        "Mechanism diagnostic",
        "Long documents by position",
        "Ablations",
    ]
    _, main, differences, *_ = report.tables(content)
    assert [row.label for row in main.rows if not row.faint] == ["DeltaNet", "OSDN", "OSDN+D0"]
    assert [cell.text for cell in main.rows[1].cells] == ["32.00", "20.78", "0.150", "0.155", "0.145"]
    assert [cell.text for cell in differences.rows[1].cells] == [
        "-0.33",
        "-0.76",
        "+0.048",
        "+0.024",
        "+0.073",
    ]


def test_means_and_intervals_are_those_of_the_seeds(content):
    changed = copy.deepcopy(content)
    for run in changed["runs"]:
        run["scores"]["code_recall"] = {"delta_net": 0.1, "osdn": 0.3, "osdn-d0": 0.1}[run["model"]]
        run["scores"]["code_recall"] += 0.02 * run["seed"]
    _, main, differences, *_ = report.tables(changed)
    assert main.rows[0].cells[2].text == "0.110"
    assert main.rows[0].cells[2].error == "±0.127"  # 12.706 * 0.02 / sqrt(2) / sqrt(2)
    cell = differences.rows[0].cells[2]
    assert (cell.text, cell.error, cell.best, cell.good) == ("+0.200", "[+0.200, +0.200]", True, True)


def test_runs_on_other_text_are_refused():
    runs = [{"model": "osdn", "seed": seed, "data": "a" if seed < 3 else "b"} for seed in range(4)]
    check_same_data(runs[:3])
    with pytest.raises(ValueError, match="read other text than the rest: osdn, seed 3"):
        check_same_data(runs)


def test_folders_without_results_are_named(tmp_path):
    done = runner.invoke(app, ["reproduce", "--report", str(tmp_path)])
    assert done.exit_code == 1
    assert "results.json does not exist" in re.sub(r"\s+", " ", done.output)
    (tmp_path / "results.json").write_text('{"kind": "lab"}')
    done = runner.invoke(app, ["reproduce", "--report", str(tmp_path)])
    assert "is not a result of `osdn reproduce`" in re.sub(r"\s+", " ", done.output)


def test_an_unknown_profile_is_answered_with_the_known_ones():
    done = runner.invoke(app, ["reproduce", "--profile", "desktop"])
    assert done.exit_code == 1
    assert "it must be one of minutes, laptop, paper" in re.sub(r"\s+", " ", done.output)


def test_the_paper_profile_only_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["reproduce", "--profile", "paper"])
    assert done.exit_code == 0
    assert "torchrun --nproc-per-node 8 -m osdn train 340m/osdn\n" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs a browser")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_its_window(tmp_path, content, width):
    report.write_report(content, tmp_path / "shown")
    with browser(tmp_path / "profile", width, 900) as opened:
        opened.open(tmp_path / "shown" / "report.html")
        assert opened.run("return document.documentElement.scrollWidth <= window.innerWidth")
        assert opened.complaints() == []
