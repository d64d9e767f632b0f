"""Recall on Python's sources: the questions, and that they cannot be answered without the document."""

import json
import re
import sysconfig
import zlib

import pytest
from typer.testing import CliRunner

from osdn.analysis.prompts import select
from osdn.cli import app
from osdn.evaluation import code_recall, harness
from osdn.models.checkpoints import load_tokenizer
from osdn.results.columns import BY_SUITE
from osdn.training.data import VALIDATION_SHARE, SourceFiles, load_source

COMMON = "shared_default = everything(1)\n"  # also in training files
FILE = (
    """# File {i}.
threshold_{i} = limit({i}, .{i})
"""
    + COMMON
    + """

class Reader{i}:
    def __init__(self, path{i}, code="{i}"):
        self.lines = open({i}, "zeta")
        self.path = path{i}

    def short(self):
        pass

    def transform_{i}(self, alpha_{i}, *rest):
        return alpha_{i}
"""
    + "".join(f"# A line of filler, number {n}, that says nothing.\n" for n in range(12))
)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A Python installation of two hundred files in two folders."""
    roots = {"stdlib": tmp_path / "stdlib", "purelib": tmp_path / "site-packages"}
    for i in range(200):
        path = roots["stdlib" if i % 2 else "purelib"] / f"package{i}" / "module.py"
        path.parent.mkdir(parents=True)
        path.write_text(FILE.replace("{i}", str(i)))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {k: str(v) for k, v in roots.items()})
    code_recall._questions.cache_clear()
    yield roots
    code_recall._questions.cache_clear()


def held_out(i):
    return zlib.crc32(f"package{i}/module.py".encode()) % VALIDATION_SHARE == 0


@pytest.mark.usefixtures("sources")
def test_files_are_split_by_their_path():
    for source, members in (("stdlib", range(1, 200, 2)), ("installed", range(200))):
        for split in ("train", "validation"):
            expected = {
                FILE.replace("{i}", str(i)) for i in members if held_out(i) == (split == "validation")
            }
            assert set(SourceFiles(source).texts(split)) == expected
            assert set(load_source(source, split=split)["text"]) == expected
    with pytest.raises(ValueError, match='installed has "train" and "validation"'):
        list(SourceFiles("installed").texts("test"))


def test_the_fingerprint_changes_with_the_files(sources):
    before = SourceFiles("installed").fingerprint
    assert SourceFiles("installed").fingerprint == before
    (sources["purelib"] / "package0" / "module.py").write_text("x = 1\n")
    assert SourceFiles("installed").fingerprint != before


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("window", [200, 400, 1500])
@pytest.mark.parametrize("kind", code_recall.KINDS)
def test_an_answer_occurs_once_in_its_document(osdn, kind, window):
    tokenizer = load_tokenizer(osdn)
    once, twice = (
        code_recall.code_documents(kind, readings=n, tokenizer=tokenizer, window=window)["validation"]
        for n in (1, 2)
    )
    assert len(once) == len(twice) == sum(map(held_out, range(200))) * (2 if kind == "arguments" else 1)
    for row, again in zip(once, twice):
        text, _, cue = row["prompt"].rpartition("\n\n")
        assert text.count(row["value"]) == text.count(cue) == 1
        assert text.find(cue) < text.find(row["value"]) <= text.find(cue) + len(cue) + 1
        assert again == {"prompt": f"{text}\n\n{row['prompt']}", "value": row["value"]}
        assert not cue.endswith(" ")  # the next token would start with the space
        assert (window - 50) / 2 <= len(tokenizer(text).input_ids) <= window - 50 or len(text) < window
        number = re.search(r"_(\d+)|path(\d+)|Reader(\d+)|File (\d+)", text)
        assert text in FILE.replace("{i}", next(filter(None, number.groups())))


@pytest.mark.usefixtures("sources")
def test_answers_that_occur_in_training_files_are_excluded(osdn):
    rows = code_recall.code_documents(
        *code_recall.KINDS, readings=0, tokenizer=load_tokenizer(osdn), window=800
    )["validation"]
    cues = {row["prompt"] for row in rows}
    assert not any(cue.startswith("shared_default") for cue in cues)
    assert not any(cue.startswith("self.path") for cue in cues)  # the cue would hint at the answer
    assert not any("short" in cue for cue in cues)
    train = "".join(SourceFiles("installed").texts("train"))
    assert not any(row["value"] in train for row in rows if not row["value"].startswith("open("))


@pytest.mark.usefixtures("sources")
def test_a_limit_leaves_some_questions_of_every_kind(osdn):
    rows = code_recall.code_documents(
        *code_recall.KINDS, readings=0, tokenizer=load_tokenizer(osdn), window=800
    )["validation"]
    kinds = ["def" if cue.startswith("def") else "self" if "self." in cue else "=" for cue in rows["prompt"]]
    assert kinds[:6] == ["def", "=", "self"] * 2


@pytest.mark.usefixtures("sources")
def test_the_diagnostic_reads_the_prompts_of_the_evaluation(osdn):
    tokenizer = load_tokenizer(osdn)
    asked = code_recall.code_documents("variables", readings=2, tokenizer=tokenizer, window=300)["validation"]
    _, prompts = select(tokenizer, None, ["code_variables_twice"], 2, 5000, window=300)
    assert [prompt.text for prompt in prompts] == list(asked["prompt"][:2])


@pytest.mark.usefixtures("sources")
def test_the_suite_is_evaluated_without_a_mirror(osdn, tmp_path):
    arguments = [
        "eval",
        osdn,
        "--suite",
        "code_recall",
        "--limit",
        "2",
        "--window",
        "300",
        "--output",
        tmp_path,
    ]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "code_recall.json").read_text())
    assert {column.key for column in BY_SUITE["code_recall"].columns} <= content["results"].keys()
    task = content["tasks"]["code_arguments_twice"]
    assert task["protocol"]["window"] == 300
    assert task["data"]["source"] == "installed"
    assert content["complete"]


@pytest.mark.usefixtures("sources")
def test_a_correct_continuation_scores(osdn):
    loaded = harness.load_task("code_variables", load_tokenizer(osdn), window=400)
    document = loaded.eval_docs[0]
    assert loaded.process_results(document, [f" {document['value']}"]) == {"contains": 1.0}
    assert loaded.process_results(document, [" something else"]) == {"contains": 0.0}
