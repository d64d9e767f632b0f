"""The report: its derived columns by hand, what it finds, what it marks as not run, and a browser's view."""

import json
import math
import os
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from osdn.analysis.diagnose import diagnose
from osdn.analysis.prompts import Prompt
from osdn.analysis.report import SECTIONS, collect, write_report
from osdn.analysis.throughput import summarise
from osdn.cli import app
from osdn.evaluation.columns import COMMONSENSE, Score, baseline_of
from osdn.evaluation.paper import BUCKETS
from osdn.records import save_json
from tests.analysis.browser import CHROMIUM, DRIVER, browser
from tests.analysis.models import timed
from tests.models.variants import make, tokens


class Cells(HTMLParser):
    """Tables as {title: {row: [cells]}}."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.tag = self.title = self.row = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tag = tag
        if tag == "tr":
            self.row = ""

    def handle_endtag(self, tag):
        self.tag = ""

    def handle_data(self, data):
        if self.tag == "h2":
            self.title = data
        elif self.tag == "th" and not self.row:
            self.row = data
        elif self.tag == "td":
            self.tables.setdefault(self.title, {}).setdefault(self.row, []).append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Some results of every kind, scattered over folders."""
    folder = tmp_path_factory.mktemp("runs")
    result = diagnose(make("osdn-apf"), [Prompt("fda_twice", tokens(40), 20)])
    save_json(folder / "a/diagnosis.json", {**result, "model": "osdn-apf-340m"})
    rows = summarise([timed("gdn-340m", (1000.0, 3000.0)), timed("osgdn-340m", (1000.0, 3100.0))], 2176)
    save_json(folder / "b/throughput.json", {"kind": "throughput", "device": "cpu", "rows": rows})
    base = {
        "wikitext_ppl": 20.0,
        "lambada_ppl": 45.0,
        "fda_twice": 0.1,
        "swde_twice": 0.2,
        "squad_twice": 0.3,
    }
    better = {
        "wikitext_ppl": 18.0,
        "lambada_ppl": 32.0,
        "fda_twice": 0.2,
        "swde_twice": 0.3,
        "squad_twice": 0.4,
    }
    better |= dict.fromkeys(COMMONSENSE, 0.5) | {bucket: 20.0 + i for i, bucket in enumerate(BUCKETS)}
    for name, scores in (("delta_net-340m", base), ("osdn-340m", better)):
        save_json(folder / f"eval/{name}.json", {"kind": "evaluation", "model": name, "results": scores})
    estimate = {"mean": 0.5, "low": 0.4, "high": 0.6, "seeds": 3}
    row = {"variant": "osdn", "metric": "accuracy", "value": estimate, "difference": None}
    save_json(folder / "lab/recall/summary.json", {"rows": [row]})
    for file, device, row in (
        ("ops", {}, {"osdn, cpu": {"min": 10.0, "median": 11.0}}),
        ("gpu", {"gpu": "A GPU"}, {"osdn, triton": {"min": 2.0, "median": 2.1, "implied": 1.5}}),
    ):
        table = {"title": f"forward on {file}", "ms": {**row, "a peer": {"min": 3.0, "median": 4.0}}}
        save_json(folder / f"bench/{file}.json", {"kind": "operators", **device, "tables": [table]})
    train = folder / "340m/kda"
    train.mkdir(parents=True)
    (train / "config.yaml").write_text("model: {preset: kda-340m}\n")
    lines = [{"step": i, "tokens": 100 * i, "loss": 5.0 if i <= 44 else 2.0} for i in range(1, 301)]
    (train / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    begun = folder / "340m/gdn"
    begun.mkdir()
    (begun / "metrics.jsonl").write_text("")
    (folder / "other.json").write_text('{"kind": "something else"}')
    (folder / "broken.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return write_report(collect([runs]), tmp_path_factory.mktemp("page") / "report.html")


def test_columns_that_follow_from_others(page):
    tables = Cells(page.read_text()).tables
    main = tables["Main results"]
    titles = [column.title for column in SECTIONS[0].columns]
    osdn = dict(zip(titles, main["OSDN 340M"]))
    assert osdn["LM"] == f"{math.sqrt(18 * 32):.2f}"
    assert osdn["repeated"] == "0.300"
    assert osdn["Δ repeated"] == "+0.100"
    assert osdn["common."] == "0.500"
    assert dict(zip(titles, main["OSGDN 340M"]))["tokens/s Δ %"] == f"{100 * (4000 / 4100 - 1):+.1f}"
    assert tables["Language-model perplexity"]["OSDN 340M"][-1] == f"{math.log(24 / 30):+.3f}"
    assert tables["PG-19 by position"]["OSDN 340M"][-1] == "+8.00"
    assert tables["Training loss"]["KDA 340M"] == ["2.000"]  # of the last 256 of 300 steps
    assert tables["Lab: recall, means over seeds with 95 % intervals"]["osdn"][0].startswith("0.500")
    assert tables["Inference throughput"]["OSGDN 340M"][-2:] == ["865.1", "-2.0"]  # the paper's
    assert tables["Mechanism diagnostic"]["OSDN-APF 340M"][-1] == "0.425"


def test_times_of_operators_on_a_cpu_and_a_gpu(page):
    text = page.read_text()
    tables = Cells(text).tables
    assert tables["Operators: forward on ops"] == {
        "osdn, cpu": ["10.000", "11.000"],
        "a peer": ["3.000", "4.000"],
    }
    gpu = tables["Operators: forward on gpu"]
    assert gpu == {"osdn, triton": ["2.000", "2.100", "1.500"], "a peer": ["3.000", "4.000", "·"]}
    assert "On A GPU." in text


def test_what_was_not_run_is_marked(page):
    tables = Cells(page.read_text()).tables
    assert tables["Main results"]["DeltaNet 1.3B"] == ["·"] * 9
    assert (
        dict(zip((c.title for c in SECTIONS[0].columns), tables["Main results"]["DeltaNet 340M"]))["single"]
        == "·"
    )
    assert len(tables["Main results"]) == 11
    assert list(tables)[: len(SECTIONS)] == [section.title for section in SECTIONS]  # the paper's order


def test_the_baseline_is_the_same_backbone_and_size():
    assert baseline_of("osdn-apf-1.3b") == "delta_net-1.3b"
    assert baseline_of("osgdn-apf-340m") == "gdn-340m"
    assert baseline_of("kda-340m") is None
    assert baseline_of("something else") is None


def test_the_newest_of_two_results_counts_and_others_are_left_alone(runs, tmp_path):
    results = collect([runs])
    assert len(results.files) == 8
    first, second = tmp_path / "x.json", tmp_path / "y.json"
    for path, q, age in ((first, 1.0, 10), (second, 2.0, 20)):
        scores = {"kind": "evaluation", "model": "m", "results": {"piqa": q}}
        save_json(path, scores)
        os.utime(path, (age, age))
    assert collect([tmp_path]).evaluations["m"] == {"piqa": Score(2.0)}
    assert collect([second, first]).evaluations["m"] == {"piqa": Score(2.0)}


def test_the_command_reads_folders_and_says_what_is_not_there(runs, tmp_path):
    out = tmp_path / "r.html"
    done = CliRunner().invoke(app, ["report", str(runs), "--output", str(out)])
    assert done.exit_code == 0, done.output
    assert "holds 8 results" in " ".join(done.output.split())  # however the line is folded
    done = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert done.exit_code == 1
    assert "does not exist" in done.output
    assert "holds 0 results" in " ".join(
        CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(out)]).output.split()
    )


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with chromedriver")
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_a_browser_shows_it_without_a_complaint(page, tmp_path, width, height):
    with browser(tmp_path / "profile", width, height) as b:
        b.open(page)
        assert b.run("return document.querySelectorAll('svg').length") >= 5
        assert b.run("return document.documentElement.scrollWidth <= window.innerWidth")
        ids = "const s = [...document.querySelectorAll('[id]')].map(e => e.id);"
        assert b.run(f"{ids} return new Set(s).size === s.length")
        b.screenshot(tmp_path / "page.png")
        assert b.complaints() == []
