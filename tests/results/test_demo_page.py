"""The demo's page: its text follows the numbers, and a browser opens it without errors."""

import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from osdn.lab import summary
from osdn.lab.recall import RecallTask
from osdn.lab.variants import Variant
from osdn.results.demo_page import Demo, paragraphs, write_demo
from osdn.results.experiments import conclusion, experiment_table, verdict
from osdn.results.statistics import paired_difference

VARIANTS = [Variant(name) for name in ("delta_net", "osdn", "osdn-apf", "osdn-newton+block-8")]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TASK = RecallTask(vocab_size=64, pairs=4, length=32)


def made_up(gain):
    """Results of both parts in which scaled models gain this much accuracy."""
    rng = np.random.default_rng(0)
    recall, text = [], []
    for i, _ in enumerate(VARIANTS):
        for seed in range(6):
            accuracy = 0.5 + 0.02 * rng.standard_normal() + (gain if i else 0)
            curve = [{"step": s, "loss": 5 / s, "accuracy": accuracy * s / 9} for s in range(1, 10)]
            task = {"pairs": 4, "passes": 2, "length": 32, "vocab_size": 64}
            settings = {"seed": seed, "task": task, "steps": 9, "batch": 2, "width": 16, "layers": 2}
            shared = {"settings": settings, "curve": curve, "q_geo": 0.4 - 0.1 * i}
            shared["log_q"] = rng.normal(-1, 0.1, 32).tolist()
            grid = [{"pairs": p, "passes": n, "accuracy": accuracy} for p in (2, 4, 8) for n in (1, 2)]
            found = {"accuracy": accuracy, "accuracy_2x": accuracy / 2, "grid": grid}
            if i in (1, 2) and seed == 0:  # Newton's method has no scale
                found["scale"] = (1 + 0.1 * rng.random((32, 64))).tolist()
            recall.append(shared | found)
            text.append(shared | {"loss": 4.0 - i, "loss_by_position": [4.0] * 32, "sample": "def <f>(&):"})
    results = {"recall": summary.group(VARIANTS, recall), "text": summary.group(VARIANTS, text)}
    metrics = {"recall": ["accuracy", "accuracy_2x", "q_geo"], "text": ["loss", "q_geo"]}
    rows = {part: summary.records(summary.summarize(results[part], metrics[part])) for part in results}
    return {part: summary.by_label(found) for part, found in results.items()}, rows


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    results, rows = made_up(0.2)
    speeds = {
        "operators_ms": {"osdn": 40.0, "osgdn": 42.0, "gdn": 39.0, "gdn in transformers": 330.0},
        "training": {"auto": 50.0, "reference": 2.0},
        "machine": {"threads": 2},
    }
    demo = Demo(results["recall"], results["text"], rows, speeds, 12_345, TASK.boundaries())
    return write_demo(tmp_path_factory.mktemp("demo") / "report.html", demo)


def test_the_text_follows_the_numbers():
    paragraph = paragraphs(made_up(0.2)[1]).split("</p>")
    assert "Accuracy on recall" in paragraph[0]
    assert "OSDN is higher (+0." in paragraph[0]
    assert "OSDN is lower (-0.100" in paragraph[2]
    nothing = paragraphs(made_up(0.0)[1]).split("</p>")
    assert "OSDN shows no difference at this scale" in nothing[0]


def test_the_verdicts_on_the_first_screen_follow_the_numbers(page):
    text = page.read_text()
    first = text[text.index("<ul") : text.index("</ul>")]
    assert first.count("<li>") == 3
    assert "Recall with twice the pairs of training, against DeltaNet: OSDN is higher (+0.098" in first
    assert "Validation loss on text, against DeltaNet: OSDN is lower (-1.000 [-1.000, -1.000])" in first
    assert "42 ms with online scaling, 7.9 times as fast" in first
    assert text.index("</svg>") < text.index("<h2>")  # the figure beside them
    nothing = verdict(made_up(0.0)[1]["recall"], "accuracy", "Recall")
    assert nothing.startswith("Recall: 6 seeds show no difference from DeltaNet (OSDN ")


def test_one_seed_has_no_interval():
    value = {"mean": 0.5, "low": 0.5, "high": 0.5, "seeds": 1}
    change = {**value, "p_value": 1.0}
    row = {"variant": "osdn", "metric": "accuracy", "value": value, "baseline": "x", "difference": change}
    table = experiment_table([row], "Recall")
    assert table.title == "Recall, 1 seed"
    assert [cell.text + cell.error for cell in table.rows[1].cells] == ["0.500", "+0.500", ""]
    assert "one seed" in conclusion(paired_difference([0.5], [0.1]))


def test_a_difference_that_chance_explains_is_not_claimed():
    few = conclusion(paired_difference([0.6, 0.7, 0.8], [0.5, 0.5, 0.5]))
    assert "3 seeds cannot tell it from chance" in few
    assert conclusion(paired_difference([0.6, 0.4], [0.5, 0.5])).startswith("shows no difference")
    assert conclusion(paired_difference([0.6] * 6, [0.5] * 6)).startswith("is higher")


def test_the_page_is_self_contained_and_well_formed(page):
    class Page(HTMLParser):
        def __init__(self):
            super().__init__()
            self.ids, self.links = [], []

        def handle_starttag(self, tag, attributes):
            for name, value in attributes:
                if name == "id":
                    self.ids.append(value)
                elif name in ("src", "href", "xlink:href") and tag != "a":
                    self.links.append(value)

    text = page.read_text()
    parsed = Page()
    parsed.feed(text)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(link.startswith(("data:", "#")) for link in parsed.links)
    assert {link[1:] for link in parsed.links if link.startswith("#")} <= set(parsed.ids)
    figures = text.split("<figure>")[1:]
    assert len(figures) == 10
    for figure in figures:
        svg = figure.split("</svg>")[0] + "</svg>"
        ET.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1))
    assert "def &lt;f&gt;(&amp;):" in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_opens_the_page_without_errors_or_overflow(page, width, tmp_path):
    # The page itself reports its width and errors, so no driver is needed.
    probe = """<script>
      addEventListener('error', e => document.title = 'error ' + e.message);
      addEventListener('load', () => { document.title += ' width ' + document.documentElement.scrollWidth; });
    </script></head>"""
    frame = f"""<iframe src="probed.html" width="{width}" height="900" id="f"></iframe><script>
      document.getElementById('f').onload = e => document.title = e.target.contentDocument.title;</script>"""
    (tmp_path / "probed.html").write_text(page.read_text().replace("</head>", probe, 1))
    (tmp_path / "frame.html").write_text(frame)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
    ]
    command = [BROWSER, *flags, "--virtual-time-budget=3000", "--dump-dom", f"file://{tmp_path}/frame.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in result.stderr
    title = result.stdout.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("Online Scaled DeltaNet")
    assert int(title.rpartition(" width ")[2]) <= width
