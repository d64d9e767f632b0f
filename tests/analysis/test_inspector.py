"""The inspector: it shows the measurements, and its page works in a real browser with mouse and keyboard."""

import base64
import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from osdn.analysis.capture import capture
from osdn.analysis.inspector import COLUMNS, inspect_prompt
from osdn.analysis.prompts import Prompt
from osdn.analysis.residuals import residuals, scale_trajectory
from osdn.cli import app
from osdn.results.inspector import write_inspector
from tests.analysis.models import byte_tokenizer
from tests.browser import CHROMIUM, DRIVER, browser
from tests.models.variants import make, tokens

needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with chromedriver")
T = 300  # more than the columns of the heat map


@pytest.fixture(scope="module")
def shown():
    model = make("osdn-apf")
    ids = tokens(T, seed=5)
    texts = [f"w{i} " for i in range(T)]
    texts[1], texts[7] = "</script><b>", "line\n"
    return model, ids, inspect_prompt(model, Prompt("p", ids, 150), texts, "a <model> & its name")


def decode(text: str, dtype: type, *shape: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


def test_the_page_holds_the_measurements(shown):
    model, ids, data = shown
    q, beta = (decode(data[name], np.float32, 2, 3, T) for name in ("q", "beta"))
    codes = decode(data["scale"]["codes"], np.uint8, 2, 3, COLUMNS, 10)
    for i, layer in enumerate(capture(model, input_ids=ids[None])):
        r = residuals(layer)
        known = ~r.negligible[0].T.numpy()
        assert np.allclose(q[i][known], r.q[0].T.numpy()[known], atol=1e-6)
        assert np.allclose(beta[i], layer.problem.beta[0].T.numpy(), atol=1e-6)
        d = scale_trajectory(layer)[0]  # [T, H, K]
        for h in range(3):
            low, high = data["scale"]["ranges"][3 * i + h]
            column = low + (high - low) * codes[i, h, 40] / 255
            token = int(40.5 * T / COLUMNS)
            assert np.allclose(column, d[token, h].numpy(), atol=(high - low) / 500)
    assert data["second"] == 150


@pytest.mark.parametrize("variant", ["kda", "osdn-newton", "pkda"])
def test_a_model_without_scale_has_none(variant):
    data = inspect_prompt(make(variant), Prompt("p", tokens(5)), list("abcde"), variant)
    assert data["scale"] is None
    assert data["heads"] == 3


def test_the_page_is_self_contained_and_no_token_can_break_it(shown, tmp_path):
    text = write_inspector(tmp_path / "page.html", shown[2]).read_text()
    assert not re.search(r"(?:src|href)=.(?!data:)|https?://|@import|url\(", text)
    held = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert json.loads(held[1])["tokens"][1] == "</script><b>"


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_page_works_in_a_browser(shown, tmp_path, width, height):
    data = shown[2]
    q = decode(data["q"], np.float32, 2, 3, T)
    page = write_inspector(tmp_path / "page.html", data)
    with browser(tmp_path / "profile", width, height) as b:
        b.open(page)
        facts = "return document.getElementById('facts').textContent"
        assert b.run("return document.getElementById('title').textContent") == "a <model> & its name"
        assert b.run("return document.querySelectorAll('#tokens span').length") == T
        assert b.run("return document.documentElement.scrollWidth <= window.innerWidth")  # nothing sticks out
        moved = [max(high - 1, 1 - low) for low, high in data["scale"]["ranges"]]
        layer, head = divmod(int(np.argmax(moved)), 3)  # it opens where the scale moved most
        b.wait_for(facts, f"token 1 of {T}: q {q[layer, head, 0]:.4f}")
        reach = max(moved)
        low, high = (b.run(f"return document.getElementById('{end}').textContent") for end in ("low", "high"))
        assert (low, high) == (f"{1 - reach:.3f}", f"{1 + reach:.3f}")  # the ends of the colours

        choose = "const s = document.getElementById('{}'); s.value = {}; s.dispatchEvent(new Event('change'))"
        b.run(choose.format("layer", -1))
        b.run(choose.format("head", -1))
        everything = np.exp(np.log(q[:, :, 0]).mean())
        b.wait_for(facts, f"token 1 of {T}: q {everything:.4f}")
        b.press("page down", "down", "down", "right", "right", "right")  # layer 0, head 1, token 4
        b.wait_for(facts, f"token 4 of {T}: q {q[0, 1, 3]:.4f}")
        assert b.run("return document.getElementById('heat').hidden") is False
        assert b.run("return document.querySelector('[aria-selected=true]').id") == "t3"
        b.press("end")
        b.wait_for(facts, f"token {T} of {T}")

        b.run(choose.format("layer", 1))
        b.point("#t2", 0.5, 0.5)
        b.wait_for(facts, f"token 3 of {T}: q {q[1, 1, 2]:.4f}")
        b.point("#heat", 0.98, 0.95)
        b.wait_for(facts, "d of channel 9")
        b.wait_for(facts, ", token 29")
        b.point("#plot", 0.025, 0.5)
        b.wait_for(facts, r", token [5-9] of")  # a pixel is about a token

        pixels = """const c = document.getElementById('heat'), d = c.getContext('2d')
            .getImageData(0, 0, c.width, c.height).data; return new Set(d).size"""
        assert b.run(pixels) > 20  # a map, not a blank
        b.screenshot(tmp_path / "page.png")
        assert b.complaints() == []


def test_the_page_of_a_hybrid_counts_the_layers_it_leaves_out():
    data = inspect_prompt(
        make("oskda, hybrid without positions"), Prompt("x", tokens(9), None), ["a"] * 9, "mine"
    )
    assert data["title"] == "mine (1 attention layers left out)"
    assert data["layers"] == 1


def test_the_command_writes_the_page(tmp_path):
    make("osgdn", vocab_size=300).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "page.html"
    options = ["--prompt", "a few words", "--output", str(out)]
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "model"), *options])
    assert done.exit_code == 0, done.output
    held = re.search(r'type="application/json">(.*?)</script>', out.read_text(), re.S)
    assert json.loads(held[1])["tokens"] == list("a few words")
