"""The report: what it shows, what it leaves out, its headline, and how a browser renders it."""

import json
import math
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from osdn.analysis.diagnose import diagnose
from osdn.analysis.prompts import Prompt
from osdn.cli import app
from osdn.results import report
from osdn.results.columns import DIAGNOSTIC, MAIN, PG19, TABLES
from osdn.results.comparison import compare, figures, heading, tables
from osdn.results.paper import BUCKETS
from osdn.results.referee_page import verdicts
from osdn.results.report import write_report
from osdn.results.scores import COMMONSENSE
from osdn.results.store import Run, Store, read_results, save_json
from tests.browser import CHROMIUM, DRIVER, browser
from tests.models.variants import make, tokens
from tests.results.files import identity, referee_content, save_evaluation, save_throughput


class Cells(HTMLParser):
    """Tables as {title: {row: [cells]}} and {title: column titles}; cells are without their errors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.heads: dict[str, list[str]] = {}
        self.tags: list[str] = []
        self.title = self.row = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in ("link", "meta", "path", "use", "br"):
            return
        self.tags.append(tag)
        if tag == "tr":
            self.row = ""
        elif tag == "td":
            self.tables.setdefault(self.title, {}).setdefault(self.row, []).append("")

    def handle_endtag(self, tag):
        if tag in self.tags:
            while self.tags.pop() != tag:
                pass

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("h2", "h3"):
            self.title = data
        elif "thead" in self.tags:
            self.heads.setdefault(self.title, []).append(data)
        elif "th" in self.tags and not self.row:
            self.row = data
        elif "td" in self.tags and "small" not in self.tags:
            self.tables[self.title][self.row][-1] += data.strip()

    def row_of(self, title, label):
        """Cells by the head of their column."""
        return dict(zip(self.heads[title], self.tables[title][label]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of every kind, spread over several folders."""
    folder = tmp_path_factory.mktemp("runs")
    result = diagnose(make("osdn-apf"), [Prompt("fda_twice", tokens(40), 20)])
    about = {"data": {"source": "fda_twice", "documents": 1, "digest": "p"}, "protocol": {"length": 2048}}
    save_json(folder / "a/diagnosis.json", {**result, **identity("osdn-apf-340m").record(), **about})
    gdn, osgdn = (identity(name, weights=None) for name in ("gdn-340m", "osgdn-340m"))
    save_throughput(folder / "b", [(gdn, {}), (osgdn, {"change": -2.4})])
    ppl, repeated = ("wikitext_ppl", "lambada_ppl"), ("fda_twice", "swde_twice", "squad_twice")
    base = dict(zip((*ppl, *repeated), (20.0, 45.0, 0.1, 0.2, 0.3)))
    better = dict(zip((*ppl, *repeated), (18.0, 1e25, 0.2, 0.3, 0.4)))
    better |= dict.fromkeys(COMMONSENSE, 0.5) | {bucket: 20.0 + i for i, bucket in enumerate(BUCKETS)}
    for name, scores in (("delta_net-340m", base), ("osdn-340m", better)):
        data = {"source": "emozilla/pg19-test"}
        save_evaluation(folder / "eval", name, scores, dict.fromkeys(repeated, 0.01), data=data)
    first = save_evaluation(folder / "first", "osdn-340m", {"fda_twice": 0.9}, protocol={"limit": 3})
    assert first.exists()
    for place in ("recall", "other"):
        value = {"mean": 0.5, "low": 0.4, "high": 0.6, "seeds": 6}
        change = {"mean": 0.1, "low": 0.05, "high": 0.2, "seeds": 6, "p_value": 0.03}
        rows = [
            {"variant": name, "metric": "accuracy", "value": value, "baseline": "delta_net", "difference": d}
            for name, d in (("delta_net", None), ("osdn", change))
        ]
        content = {"kind": "lab", "experiment": "recall", "description": f"{place} sizes", "rows": rows}
        save_json(folder / f"lab/{place}/summary.json", content)
    for file, device, row in (
        ("ops", {}, {"osdn, cpu": {"min": 10.0, "median": 11.0}}),
        ("gpu", {"gpu": "A GPU"}, {"osdn, triton": {"min": 2.0, "median": 2.1, "implied": 1.5}}),
    ):
        table = {"title": f"forward on {file}", "ms": {**row, "a peer": {"min": 3.0, "median": 4.0}}}
        save_json(folder / f"bench/{file}.json", {"kind": "operators", **device, "tables": [table]})
    for name, final in (("kda-340m", 2.0), ("oskda-340m", 1.5)):
        train = folder / "train" / name
        train.mkdir(parents=True)
        lines = [{"step": i, "tokens": 100 * i, "loss": 5.0 if i <= 44 else final} for i in range(1, 301)]
        (train / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        data = {"source": "stdlib", "split": "train", "digest": "s"}
        record = {"kind": "training", "finished": True, **identity(name).record(), "final_loss": final}
        record |= {"tokens": 30_000, "validation_loss": final + 0.5, "data": data}
        save_json(train / "training.json", record)
    (folder / "other.json").write_text('{"kind": "something else"}')
    return folder


@pytest.fixture(scope="module")
def store(runs):
    return read_results([runs])


@pytest.fixture(scope="module")
def page(store, tmp_path_factory):
    return write_report(store, tmp_path_factory.mktemp("page") / "report.html")


def test_derived_columns(page):
    tables = Cells(page.read_text()).tables
    assert tables["Language-model perplexity"]["OSDN 340M"][:2] == ["18.00", "1.00e+25"]
    assert (
        f"{math.log(math.sqrt(18 * 1e25) / 30):+.3f}" == tables["Language-model perplexity"]["OSDN 340M"][-1]
    )
    assert "+0.100" in tables["Main results"]["OSDN 340M"]
    assert "-2.4" in tables["Main results"]["OSGDN 340M"]
    assert tables["PG-19 by position"]["OSDN 340M"][-1] == "+8.00"
    assert tables["Training loss"]["KDA 340M"] == ["2.000", "2.500", "–", "0.03"]
    assert tables["Training loss"]["OSKDA 340M"] == ["1.500", "2.000", "-0.500", "0.03"]
    assert tables["Mechanism diagnostic"]["OSDN-APF 340M"][0] != "–"
    assert tables["Mechanism diagnostic"]["the paper's"][0] == "0.425"


def test_only_models_with_results_are_shown_unless_everything_is_requested(store, page, tmp_path):
    found = Cells(page.read_text()).tables
    assert "DeltaNet 1.3B" not in found["Main results"]
    assert "LongBench" not in found
    full = Cells(write_report(store, tmp_path / "all.html", everything=True).read_text()).tables
    assert set(full["Main results"]["DeltaNet 1.3B"]) == {"–"}
    assert {spec.title for spec in TABLES if spec.printed} <= full.keys()
    nothing = write_report(read_results([]), tmp_path / "none.html", everything=True)
    assert len(Cells(nothing.read_text()).tables["Main results"]) == 12  # eleven models, and the paper's


def test_the_report_and_compare_show_the_same_numbers(store, page):
    shown = Cells(page.read_text()).tables
    for table in tables(compare(store)):
        for row in table.rows:
            if not row.faint:
                assert shown[table.title][row.label] == [cell.text for cell in row.cells]


def test_a_limited_run_does_not_replace_a_full_one(page):
    tables = Cells(page.read_text()).tables
    assert tables["In-context recall"]["OSDN 340M"][0] == "0.200"
    assert tables["In-context recall (limit 3)"] == {"OSDN 340M": ["0.900"], "the paper's": ["0.044"]}


def test_the_headline_states_the_findings(page):
    text = page.read_text()
    head = text[text.index('class="verdicts"') : text.index("</ul>")]
    assert "OSDN 340M against DeltaNet 340M: repeated recall +0.100 ± 0.008 (better)" in head
    assert "OSKDA 340M against KDA 340M: final training loss -0.500 (one run, error unknown)" in head
    assert (
        "Lab, recall (other sizes), accuracy, against DeltaNet: OSDN is higher (+0.100 [+0.050, +0.200])"
        in head
    )


def test_two_lab_experiments_have_different_titles(page):
    titles = re.findall("<h2>(Lab: .*?)</h2>", page.read_text())
    assert len(titles) == len(set(titles)) == 2
    assert {"recall sizes, 6 seeds", "other sizes, 6 seeds"} <= Cells(page.read_text()).tables.keys()


def test_the_referees_verdict_and_table_match_its_own_page(tmp_path):
    content = referee_content({("capacity", "osdn-newton", 1.0): (0.2, 0.01)})
    save_json(tmp_path / "referee" / "referee.json", content)
    store = read_results([tmp_path])
    text = write_report(store, tmp_path / "report.html").read_text()
    head = text[text.index('class="verdicts"') : text.index("</ul>")]
    assert f"The referee: {verdicts(content)[0]}" in unescape(head)
    shown = Cells(text).tables["After the full budget"]
    assert shown["OSDN-Newton"] == ["★ +0.200", "+0.000"]
    assert len(shown) == len(content["parameters"])
    assert not store.unreadable


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda c: c["rows"].pop(3), "has no result in"),
        (lambda c: c["rows"][1]["difference"].pop("low"), "low"),
        (lambda c: c["rows"][1].update(adjusted="0.1"), "expected a number, got '0.1'"),
        (lambda c: c.update(rows=[]), "no contestant has no result"),
        (lambda c: c.update(kind="write-gate"), "group"),
    ],
)
def test_an_incomplete_referee_result_is_reported_and_left_out(tmp_path, damage, why):
    content = referee_content({})
    damage(content)
    file = save_json(tmp_path / "referee.json", content)
    store = read_results([tmp_path])
    assert why in store.unreadable[file]
    write_report(store, tmp_path / "report.html")


def test_operator_times_on_a_cpu_and_a_gpu(page):
    tables = Cells(page.read_text()).tables
    gpu = {"osdn, triton": ["2.000", "2.100", "1.500"], "a peer": ["3.000", "4.000", ""]}
    assert tables["forward on gpu"] == gpu
    assert tables["forward on ops"] == {"osdn, cpu": ["10.000", "11.000"], "a peer": ["3.000", "4.000"]}
    assert "<h2>Operators: A GPU</h2>" in page.read_text()


def test_every_file_is_listed_with_its_contents_and_a_link(store, page):
    read = Cells(page.read_text()).tables["What was read"]
    assert len(read) == len(store.files) == 13
    limited = next(cells for name, cells in read.items() if name.endswith("first/osdn-340m.json"))
    assert limited == ["OSDN 340M", "data, test, 10 documents", "limit 3", "", "2026-01-02 03:04"]
    assert f'href="{next(name for name in read if name.endswith("diagnosis.json"))}"' in page.read_text()


def test_an_absurd_value_does_not_stretch_the_axis(tmp_path):
    save_evaluation(tmp_path, "osdn-340m", {"wikitext_ppl": 1e25, "lambada_ppl": 1e25, "pg19_ppl": 20.0})
    save_evaluation(tmp_path, "delta_net-340m", {"wikitext_ppl": 9.0, "lambada_ppl": 16.0})
    [found] = compare(read_results([tmp_path]))
    axes = next(
        a for a in figures(found)["summary"].axes if a.get_title(loc="left") == heading(MAIN.columns[0])
    )
    assert axes.get_xlim()[1] < 100
    assert any("1.0e+25, not drawn" in text.get_text() for text in axes.texts)


def test_a_model_that_was_trained_twice_gets_two_labels(tmp_path):
    model = identity("osdn-tiny")
    for place in ("a", "b"):
        save_evaluation(tmp_path / place, replace(model, checkpoint=place, weights=place), {"fda": 0.5})
    labels = [row.label for row in tables(compare(read_results([tmp_path])))[0].rows]
    assert sorted(labels) == ["OSDN tiny (a)", "OSDN tiny (b)"]


def test_runs_of_one_name_in_progress_have_a_loss_curve_each(tmp_path):
    for place in ("a", "b"):
        model = identity("osdn-tiny", weights=None, checkpoint=f"{place}/model")
        save_json(tmp_path / place / "training.json", {"kind": "training", **model.record()})
        (tmp_path / place / "metrics.jsonl").write_bytes(b'{"step": 1, "tokens": 9, "loss": 2.0}\n\xff')
    store = read_results([tmp_path])
    assert sorted(store.labels().values()) == ["OSDN tiny (a/model)", "OSDN tiny (b/model)"]
    assert [len(run.lines) for run in store.runs] == [1, 1]


def test_the_figure_of_a_model_shows_its_newest_diagnosis(tmp_path, monkeypatch):
    store = Store(diagnoses=[(identity("osdn-tiny"), {"date": date}) for date in ("2026-02", "2026-01")])
    store.runs = [Run(identity("osdn-tiny"), tmp_path, [])]
    shown = {}
    monkeypatch.setattr(report.plots, "diagnosis", lambda newest: shown.update(newest) or {})
    report._figures(DIAGNOSTIC, [], store)
    assert shown == {"OSDN tiny": {"date": "2026-02"}}


def test_a_contestant_that_diverged_is_named():
    content = referee_content({("capacity", "osdn-newton", 1.0): (-math.inf, math.nan)})
    assert verdicts(content)[1:] == ["Not finite in some seed, so not compared: OSDN-Newton on capacity."]


def test_the_command_reads_folders_and_reports_missing_ones(runs, tmp_path):
    out = tmp_path / "r.html"
    done = CliRunner().invoke(app, ["report", str(runs), "--output", str(out)])
    assert done.exit_code == 0, done.output
    assert "holds 13 results" in " ".join(done.output.split())
    (tmp_path / "empty").mkdir()
    for place, words in (("nowhere", "does not exist"), ("empty", "there are no results here")):
        done = CliRunner().invoke(app, ["report", str(tmp_path / place)])
        assert done.exit_code == 1
        assert words in done.output


def test_sections_are_in_the_papers_order(page):
    titles = re.findall("<h2>(.*?)</h2>", page.read_text())
    paper = [spec.title for spec in TABLES if spec.title in titles]
    assert titles[: len(paper)] == paper
    assert PG19.title in paper


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with chromedriver")
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_a_browser_shows_the_page_without_errors_or_overflow(page, tmp_path, width, height):
    with browser(tmp_path / "profile", width, height) as b:
        b.open(page)
        assert b.run("return document.querySelectorAll('svg').length") >= 5
        assert b.run("return document.documentElement.scrollWidth <= window.innerWidth")
        ids = "const s = [...document.querySelectorAll('[id]')].map(e => e.id);"
        assert b.run(f"{ids} return new Set(s).size === s.length")
        b.screenshot(tmp_path / "page.png")
        assert b.complaints() == []
