"""The needle tasks of RULER, created by `lm_eval` from the mirror's essays."""

import json
import random
import shutil

import pytest
from typer.testing import CliRunner

from osdn.cli import app
from osdn.evaluation import harness
from osdn.evaluation.data import MissingDataError
from osdn.evaluation.runner import Evaluation, EvaluationSettings
from osdn.evaluation.suites import EXTRA, SUITES, select
from osdn.models.checkpoints import load_tokenizer
from osdn.results.columns import BY_SUITE
from tests.evaluation.mirror import TEXT

TASKS = {task.name: task for task in SUITES["ruler"]}


# Importing the tasks takes half a minute: lm_eval generates and sorts millions of words.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["niah_single_1_1k", "niah_single_3_4k", "niah_multikey_1_8k"])
def test_a_prompt_contains_its_needle_and_has_the_right_length(osdn, mirror, name):
    tokenizer, task = load_tokenizer(osdn), TASKS[name]
    loaded = harness.load_task(name, tokenizer, data_dir=mirror)
    document = loaded.dataset["test"][0]
    tokens = len(tokenizer(document["input"]).input_ids)
    assert tokens < task.length  # with a byte-level tokenizer, lengths grow in steps of 500 words
    if task.length == 8192:
        assert tokens > task.length / 2
    assert all(answer in document["input"] for answer in document["outputs"])
    needles = document["input"].count("One of the special magic")
    assert needles == (4 if "multikey" in name else 1)
    if "single_1" not in name:
        words = document["input"].split("\n")[1].split()
        assert " ".join(words[:20]) in TEXT or "special magic" in " ".join(words[:20])
    right, wrong = (
        loaded.process_results(document, [answer]) for answer in (document["outputs"][0], "not this")
    )
    assert (right[str(task.length)], wrong[str(task.length)]) == (1, 0)


@pytest.mark.slow
def test_documents_are_reproducible(osdn, mirror):
    tokenizer, found = load_tokenizer(osdn), []
    for seed in range(2):
        random.seed(seed)
        found.append(harness.load_task("niah_single_2_1k", tokenizer, data_dir=mirror).dataset["test"][:5])
    assert found[0] == found[1]


@pytest.mark.slow
def test_missing_data_is_reported_by_name(osdn, mirror, tmp_path):
    shutil.copytree(mirror / "baber", tmp_path / "baber")
    with pytest.raises(MissingDataError, match=r"punkt_tab is not in .*nltk.downloader punkt_tab"):
        harness.load_task("niah_single_2_1k", load_tokenizer(osdn), data_dir=tmp_path)
    shutil.copytree(mirror / "nltk_data", tmp_path / "nltk_data")
    shutil.rmtree(tmp_path / "baber")
    with pytest.raises(MissingDataError, match="hub cannot be reached"):
        harness.load_task("niah_single_2_1k", load_tokenizer(osdn), data_dir=tmp_path)


@pytest.mark.slow
def test_a_task_is_measured_like_any_other(osdn, mirror, tmp_path):
    evaluation = Evaluation(EvaluationSettings(osdn, mirror, limit=2), tmp_path)
    entry = evaluation._entry(TASKS["niah_single_1_1k"], lambda done, total: None)
    assert 0 <= entry["results"]["niah_single_1_1k"] <= 1
    assert entry["protocol"]["length"] == 1024
    assert entry["data"]["documents"] == entry["documents"] == 2


def test_ruler_is_not_part_of_the_papers_suites():
    assert set(select(["all"])) == set(SUITES) - set(EXTRA)
    assert select(["all", *EXTRA]) == list(SUITES)


@pytest.mark.slow
def test_the_suite_fills_its_columns(osdn, mirror, tmp_path):
    arguments = ["eval", osdn, "--suite", "ruler", "--limit", "2", "--data-dir", mirror, "--output", tmp_path]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "ruler.json").read_text())
    assert {column.key for column in BY_SUITE["ruler"].columns} <= content["results"].keys()
