"""Documents show what the commands make of committed results."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from osdn.results.contests import CONTESTS, fill_document, in_markdown
from osdn.results.document import filled, marks
from tests.results.files import referee_content

DOCS = Path(__file__).parents[2] / "docs"
FINISHED = [kind for kind in CONTESTS if (DOCS / kind / f"{kind}.json").exists()]


@pytest.mark.parametrize("kind", FINISHED)
def test_the_docs_show_the_committed_result(kind):
    content = json.loads((DOCS / kind / f"{kind}.json").read_text())
    page = (DOCS / f"{kind}.md").read_text()
    command = CONTESTS[kind].command
    assert page == filled(page, command, in_markdown(content, kind)), f"{command} --output docs/{kind}"


@pytest.mark.parametrize("kind", CONTESTS)
def test_the_docs_have_a_place_for_each_result(kind):
    page = (DOCS / f"{kind}.md").read_text()
    assert all(page.count(mark) == 1 for mark in marks(CONTESTS[kind].command))


def test_a_result_is_put_between_the_marks_and_nothing_else_changes(tmp_path):
    content = referee_content({})
    folder = tmp_path / "referee"
    folder.mkdir()
    assert not fill_document(content, folder)
    begin, end = marks("osdn lab referee")
    folder.with_suffix(".md").write_text(f"before\n{begin}\nstale\n{end}\nafter\n")
    assert fill_document(content, folder)
    text = folder.with_suffix(".md").read_text()
    assert text.startswith(f"before\n{begin}\n\n")
    assert text.endswith(f"{end}\nafter\n")
    assert "nothing beats the tuned plain delta rule" in text
    assert "After a quarter of the budget" in text
    assert "stale" not in text
    assert "![Differences: GDN](referee/gdn.svg)" in text
    assert {path.name for path in folder.iterdir()} == {"delta_net.svg", "gdn.svg"}
    for path in folder.iterdir():
        assert ElementTree.parse(path).getroot().tag.endswith("svg")  # a document, not a part of a page


def test_a_document_with_one_mark_is_reported(tmp_path):
    (tmp_path / "referee.md").write_text(marks("osdn lab referee")[0])
    with pytest.raises(ValueError, match="add it where the results end"):
        fill_document(referee_content({}), tmp_path / "referee")
