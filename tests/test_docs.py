"""The Python blocks of the README and of the pages run, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

import osdn

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {
    f"{page.name} {i}": block
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
}


@pytest.mark.parametrize("name", BLOCKS)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[name], name, "exec"), {})


def test_the_readme_and_the_models_page_have_examples():
    assert sum(name.startswith("README.md") for name in BLOCKS) == 3
    assert sum(name.startswith("models.md") for name in BLOCKS) == 7


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_are_there(page):
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists() or f"def {test}" not in (ROOT / file).read_text()
    ]
    assert not missing
    assert named or page.name != "reliability.md"


def test_the_changelog_and_the_citation_have_this_version():
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    cited = re.findall(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert [newest] == cited == [osdn.__version__]


def test_every_public_name_is_in_the_api_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    described = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", pages, re.MULTILINE)}
    others = {"PRESETS", "describe", "hosts", "layers", "models", "ops"}  # data, an old name and packages
    assert set(osdn.__all__) - others <= described
