"""`osdn eval` from end to end on a small mirror: results, resuming, missing data and errors."""

import json
import math
import shutil
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from datasets import Dataset
from typer.testing import CliRunner

from osdn.cli import app
from osdn.evaluation import harness
from osdn.evaluation.data import load_data
from osdn.evaluation.runner import Evaluation, EvaluationSettings
from osdn.evaluation.suites import SUITES, select
from osdn.models.checkpoints import load_tokenizer
from osdn.results.columns import BY_SUITE
from osdn.results.comparison import compare
from osdn.results.paper import BUCKETS
from osdn.results.scores import MEANS
from osdn.results.store import digest, read_results
from osdn.training.data import stdlib_documents, train_tokenizer
from tests.analysis.models import byte_tokenizer
from tests.evaluation.mirror import save_osdn

PAPER_SUITES = select(["all"])
TASKS = {task.name: task for tasks in SUITES.values() for task in tasks}


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def said(done) -> str:
    return " ".join(done.output.split())  # regardless of line wrapping


@pytest.fixture(scope="module")
def evaluated(osdn, mirror, tmp_path_factory):
    """The results of every suite on one of our models."""
    output = tmp_path_factory.mktemp("eval")
    done = run(osdn, "--suite", "all", "--data-dir", mirror, "--output", output)
    assert done.exit_code == 0, done.output
    return output, done


@pytest.mark.parametrize("suite", PAPER_SUITES)
def test_every_suite_fills_its_columns(evaluated, suite):
    output, done = evaluated
    content = json.loads((output / f"{suite}.json").read_text())
    columns = {column.key for column in BY_SUITE[suite].columns} - {"nll_change"}  # needs a baseline
    assert columns <= content["results"].keys()
    assert content["kind"] == "evaluation"
    assert content["suite"] == suite
    assert content["complete"]
    assert content["missing"] == {}
    assert content["versions"].keys() >= {"osdn", "torch", "transformers", "lm_eval", "datasets"}
    assert content["command"]
    assert "seed" in content
    assert datetime.fromisoformat(content["date"]).utcoffset() == timedelta(0)
    assert content["block"] == "delta_net, 2 layers of width 64, 2 heads of 32 × 32, vocabulary 260"
    assert not content["baseline"]
    for name, task in content["tasks"].items():
        assert task["documents"] == task["data"]["documents"] == (1 if name == "pg19" else 3)
        assert task["protocol"]["limit"] is None
        assert task["protocol"].get("max_length") is None  # a recurrent model has none
        assert task["protocol"]["dtype"] == "float32"
        assert task["seconds"] >= 0
    assert f"{suite}: OSDN" in done.output


def test_scores_over_several_documents_have_standard_errors(evaluated):
    output, _ = evaluated
    for suite in PAPER_SUITES:
        content = json.loads((output / f"{suite}.json").read_text())
        if suite != "pg19":  # one block
            assert content["errors"].keys() == content["results"].keys(), suite


def test_averages_in_the_files_match_their_parts(evaluated):
    output, _ = evaluated
    results = {}
    for suite in PAPER_SUITES:
        results |= json.loads((output / f"{suite}.json").read_text())["results"]
    for name, parts in MEANS.items():
        if name not in results:  # belongs to another suite
            assert name.startswith(("ruler", "code"))
            continue
        assert results[name] == pytest.approx(sum(results[p] for p in parts) / len(parts)), name
    assert results["lm_ppl"] == pytest.approx((results["wikitext_ppl"] * results["lambada_ppl"]) ** 0.5)
    assert results["pg19_drift"] == pytest.approx(results[BUCKETS[-1]] - results[BUCKETS[1]])


def test_scores_by_document_are_saved_for_paired_differences(evaluated):
    output, _ = evaluated
    recall, ppl = (json.loads((output / f"{suite}.json").read_text()) for suite in ("recall", "ppl"))
    for task in ("fda_twice", "swde_twice", "squad_twice"):
        values = recall["tasks"][task]["by_document"][task]
        assert sum(values) / 3 == pytest.approx(recall["results"][task])
    wiki = ppl["tasks"]["wikitext"]["by_document"]["wikitext_ppl"]
    loss, words = (sum(column) for column in zip(*wiki))
    assert math.exp(-loss / words) == pytest.approx(ppl["results"]["wikitext_ppl"])
    last = ppl["tasks"]["lambada_openai"]["by_document"]["lambada_ppl"]
    assert math.exp(-sum(last) / 3) == pytest.approx(ppl["results"]["lambada_ppl"])
    assert "by_document" not in recall["tasks"]["fda"]


def test_scores_are_in_the_order_of_the_documents(osdn, mirror, tmp_path, monkeypatch, evaluated):
    """Several processes return their documents one process after another."""
    original = harness.lm_eval.evaluate

    def one_after_another(*args, **kwargs):
        output = original(*args, **kwargs)
        for samples in output["samples"].values():
            samples.sort(key=lambda sample: (sample["doc_id"] % 2, sample["doc_id"]))
        return output

    monkeypatch.setattr(harness.lm_eval, "evaluate", one_after_another)
    done = run(osdn, "--suite", "ppl", "--data-dir", mirror, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    before, after = (
        json.loads((folder / "ppl.json").read_text())["tasks"] for folder in (evaluated[0], tmp_path)
    )
    for task in ("wikitext", "lambada_openai"):
        assert after[task]["by_document"] == before[task]["by_document"]
        (values,) = after[task]["by_document"].values()
        assert len({str(value) for value in values}) == 3  # so that their order shows


def test_the_report_reads_the_files(evaluated):
    output, _ = evaluated
    scores = compare(read_results([output]))[0].models[0].scores
    assert scores["commonsense"].error > 0
    assert {"lm_ppl", "recall", "longbench", "retrieval", "pg19_drift"} <= scores.keys()


def test_a_model_of_another_architecture_is_evaluated(llama, mirror, tmp_path):
    suites = ("ppl", "recall", "pg19", "retrieval")
    done = run(llama, "--suite", *suites, "--data-dir", mirror, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    for suite in suites:
        content = json.loads((tmp_path / f"{suite}.json").read_text())
        assert content["complete"]
        assert content["model"] == "llama"
        assert (content["block"], content["baseline"]) == ("llama", True)


def test_an_interrupted_run_continues(osdn, mirror, tmp_path, monkeypatch):
    ran, stop = [], True
    original = harness.run_task

    def run_task(lm, task, *rest):
        if stop and len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(task.name)
        return original(lm, task, *rest)

    monkeypatch.setattr(harness, "run_task", run_task)
    arguments = (osdn, "--suite", "commonsense", "--data-dir", mirror, "--output", tmp_path)
    done = run(*arguments)
    assert done.exit_code == 130
    assert "the same command continues" in said(done)
    partial = json.loads((tmp_path / "commonsense.json").read_text())
    assert list(partial["tasks"]) == ["piqa", "hellaswag", "winogrande"]
    assert not partial["complete"]
    assert "commonsense" not in partial["results"]  # no average of an incomplete suite
    stop = False
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert ran == [task.name for task in SUITES["commonsense"]]  # each once
    assert json.loads((tmp_path / "commonsense.json").read_text())["complete"]
    done = run(osdn, "--suite", "ppl", "--data-dir", mirror, "--output", tmp_path)
    assert ran.count("lambada_openai") == 1  # one run serves two suites
    assert run(*arguments, "--overwrite").exit_code == 0
    assert ran.count("piqa") == 2


def test_finished_tasks_stay_on_disk_while_an_earlier_task_runs(osdn, mirror, tmp_path, monkeypatch):
    part = tmp_path / "part"
    for name in ("EleutherAI", "mandarjoshi"):
        shutil.copytree(mirror / name, part / name)
    arguments = (osdn, "--suite", "retrieval", "--data-dir", part, "--output", tmp_path / "out")
    assert run(*arguments).exit_code == 0
    shutil.copytree(mirror / "google-research-datasets", part / "google-research-datasets")

    def killed(*_):
        content = json.loads((tmp_path / "out/retrieval.json").read_text())
        assert list(content["tasks"]) == ["drop", "triviaqa"]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(harness, "run_task", killed)
        assert run(*arguments).exit_code == 130
    assert run(*arguments).exit_code == 0
    content = json.loads((tmp_path / "out/retrieval.json").read_text())
    assert list(content["tasks"]) == ["drop", "nq_open", "triviaqa"]
    assert content["missing"] == {}


def test_results_are_not_overwritten_by_other_settings_or_weights(osdn, mirror, tmp_path):
    other = save_osdn(tmp_path / "other", seed=3)
    output = tmp_path / "out"
    arguments = ("--suite", "retrieval", "--data-dir", mirror, "--output", output)
    assert run(other, *arguments, "--limit", 2).exit_code == 0
    done = run(other, *arguments)
    assert done.exit_code == 1
    assert "other settings (limit 2, now None)" in said(done)
    assert "--overwrite" in said(done)
    done = run(osdn, *arguments)
    assert done.exit_code == 1
    assert f"holds results of {other}" in done.output.replace("\n", " ")
    save_osdn(other, seed=5)  # as if training had continued
    done = run(other, *arguments, "--limit", 2)
    assert done.exit_code == 1
    assert "weights" in said(done)
    assert run(other, *arguments, "--limit", 2, "--overwrite").exit_code == 0


def test_the_same_weights_and_documents_in_another_place_count_as_done(osdn, mirror, tmp_path, monkeypatch):
    output, ran = tmp_path / "out", []
    original = harness.run_task

    def run_task(lm, task, *rest):
        ran.append(task.name)
        return original(lm, task, *rest)

    monkeypatch.setattr(harness, "run_task", run_task)
    copied, elsewhere = shutil.copytree(osdn, tmp_path / "copied"), tmp_path / "elsewhere"
    questions = shutil.copytree(mirror / "google-research-datasets", elsewhere / "google-research-datasets")
    for name in ("EleutherAI", "mandarjoshi"):
        shutil.copytree(mirror / name, elsewhere / name)
    arguments = ("--suite", "retrieval", "--output", output)
    assert run(osdn, *arguments, "--data-dir", mirror).exit_code == 0
    assert ran == ["drop", "nq_open", "triviaqa"]
    assert run(copied, *arguments, "--data-dir", elsewhere).exit_code == 0
    assert len(ran) == 3  # nothing was left to do
    file = questions / "nq_open/validation.jsonl"
    rows = file.read_text()
    file.write_text(rows.replace("answer 2", "answer two"))
    done = run(copied, *arguments, "--data-dir", elsewhere)
    assert done.exit_code == 1
    assert "nq_open with other settings (data 3 documents of google-research-datasets/nq_open" in said(done)
    shutil.rmtree(questions)
    assert (
        run(copied, *arguments, "--data-dir", elsewhere).exit_code == 0
    )  # finished results do not need their data


def entry(checkpoint, task, mirror, **options):
    """The data of a task as a result file records it."""
    evaluation = Evaluation(EvaluationSettings(str(checkpoint), mirror, **options), None)
    task = next(found for tasks in SUITES.values() for found in tasks if found.name == task)
    return evaluation._data(task, evaluation._documents(task))


def test_the_digest_depends_only_on_the_documents(osdn, mirror, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place, twin = "hazyresearch/based-fda", tmp_path / "twin/hazyresearch/based-fda/validation.jsonl"
    rows = Dataset.from_parquet(str(next((mirror / place).rglob("*.parquet"))), cache_dir=str(tmp_path))
    twin.parent.mkdir(parents=True)
    twin.write_text("\n".join(json.dumps(dict(reversed(row.items()))) for row in rows))
    once = entry(osdn, "fda", mirror)
    assert once == {"source": place, "split": "validation", "documents": 3, "digest": once["digest"]}
    assert entry(osdn, "fda_twice", mirror, window=60) == once  # the whole document, before truncation
    assert entry(osdn, "fda", tmp_path / "twin") == once  # in another place, format and order of fields
    other = save_osdn(tmp_path / "other")
    train_tokenizer([row["text"] for row in rows], 300).save_pretrained(other)
    assert entry(other, "fda_twice", mirror) == once  # with another tokenizer
    limited = entry(osdn, "fda", mirror, limit=2)
    assert limited["documents"] == 2
    assert limited["digest"] != once["digest"]
    assert entry(osdn, "swde", mirror)["digest"] != once["digest"]
    assert entry(osdn, "fineweb_edu", mirror, limit=2)["source"] == "HuggingFaceFW/fineweb-edu sample-10BT"


def test_an_explicit_name_is_used_for_the_model_and_its_folder(osdn, mirror, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = Evaluation(EvaluationSettings(str(osdn)), None)
    assert own.folder == Path("runs/eval/osdn")
    named = Evaluation(EvaluationSettings(str(osdn), name="mine"), None)
    assert named.folder == Path("runs/eval/mine")
    assert named.identity.record() == own.identity.record() | {"model": "mine"}


def test_truncation_is_recorded(osdn, mirror, tmp_path):
    arguments = (osdn, "--suite", "recall", "--data-dir", mirror, "--output", tmp_path)
    assert run(*arguments, "--max-length", 300, "--limit", 1).exit_code == 0
    tasks = json.loads((tmp_path / "recall.json").read_text())["tasks"]
    for task in tasks.values():
        assert task["protocol"]["max_length"] == 300
    prompt = harness.prompt_texts(harness.load_task("fda", load_tokenizer(osdn), data_dir=mirror))[0]
    assert tasks["fda"]["truncated"] == {"prompts": 1, "tokens": len(prompt.encode()) - (300 - 48)}
    assert tasks["fda_twice"]["truncated"]["tokens"] > tasks["fda"]["truncated"]["tokens"]


def test_a_missing_data_set_is_reported_in_one_line_and_the_rest_runs(osdn, mirror, tmp_path):
    for name in ("baber", "Rowan", "hazyresearch"):
        shutil.copytree(mirror / name, tmp_path / "part" / name)
    done = run(
        osdn, "--suite", "commonsense", "pg19", "--data-dir", tmp_path / "part", "--output", tmp_path / "o"
    )
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("not run:")]
    assert [line.split(":")[1].strip() for line in lines] == [
        "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq", "lambada_openai", "sciq",
        "openbookqa", "pg19",
    ]  # fmt: skip
    assert "allenai/winogrande winogrande_xl, validation" in lines[0]
    content = json.loads((tmp_path / "o/commonsense.json").read_text())
    assert content["results"].keys() == {"piqa", "hellaswag"}
    assert set(content["missing"]) == {line.split(":")[1].strip() for line in lines} - {"pg19"}
    assert not (tmp_path / "o/pg19.json").exists()
    done = run(osdn, "--suite", "longbench", "--data-dir", tmp_path / "part", "--output", tmp_path / "n")
    assert done.exit_code == 1  # nothing ran


def test_any_text_can_replace_pg19(osdn, tmp_path):
    from tests.evaluation.mirror import prose

    books = tmp_path / "books"
    books.mkdir()
    (books / "one.txt").write_text(prose(0, 20_500))
    (books / "two.txt").write_text(prose(9, 41_000))
    (books / "short.txt").write_text("too short for a block")
    done = run(osdn, "--suite", "pg19", "--books", books, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out/pg19.json").read_text())
    data = content["tasks"]["pg19"]["data"]
    assert data == {"source": str(books), "split": "train", "documents": 2, "digest": data["digest"]}
    texts = [(books / name).read_text() for name in ("one.txt", "two.txt")]
    assert data["digest"] == digest({"text": text} for text in texts)  # texts without a block are not read
    assert content["errors"]["pg19_ppl"] > 0  # three blocks
    done = run(osdn, "--suite", "pg19", "--books", tmp_path / "no.txt", "--output", tmp_path / "out2")
    assert done.exit_code == 1
    assert "no such file or directory" in said(done)


def test_pythons_own_sources_as_books_are_held_out_files(osdn, tmp_path):
    evaluation = Evaluation(EvaluationSettings(osdn, books="stdlib", limit=1), tmp_path)
    rows = evaluation._documents(SUITES["pg19"][0])
    assert rows["text"][0] in set(stdlib_documents("validation"))
    assert rows["text"][0] not in set(stdlib_documents("train"))


def test_blocks_of_pg19_are_not_read_with_a_shorter_maximum_length(osdn, mirror, tmp_path):
    options = ("--suite", "pg19", "--data-dir", mirror, "--output", tmp_path, "--max-length", 2048)
    done = run(osdn, *options)
    assert done.exit_code == 1
    assert "--max-length is 2,048, and a block has 20,480 tokens" in said(done)
    assert not (tmp_path / "pg19.json").exists()


def test_the_list_shows_which_data_is_available(mirror, tmp_path):
    shutil.copytree(mirror / "baber", tmp_path / "baber")
    done = run("--list", "--suite", "commonsense", "--data-dir", tmp_path)
    assert done.exit_code == 0
    lines = {line.split()[0]: line for line in done.output.splitlines() if line.strip()}
    assert "mirror" in lines["piqa"]
    assert "missing" in lines["hellaswag"]
    assert "fda" not in lines
    everything = run("--list").output
    assert all(task.name in everything for tasks in SUITES.values() for task in tasks)


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "name a checkpoint"),
    (("CHECKPOINT", "--suite", "recal"), "there is no suite recal; choose from ppl, recall"),
    (("CHECKPOINT", "--suite", "ppl", "recal"), "there is no suite recal"),
    (("/nowhere/at/all",), "/nowhere/at/all"),
    (("CHECKPOINT", "--window", "50"), "the window is 50 tokens"),
    (("CHECKPOINT", "--data-dir", "/nowhere"), "/nowhere is not a directory"),
])  # fmt: skip
def test_bad_input_is_reported_without_a_traceback(osdn, arguments, message, tmp_path):
    arguments = [osdn if a == "CHECKPOINT" else a for a in arguments]
    done = run(*arguments, "--output", tmp_path)
    assert done.exit_code == 1
    assert message in said(done)
    assert "Traceback" not in done.output


def test_data_in_an_unexpected_format_is_reported(osdn, tmp_path):
    folder = tmp_path / "mirror/baber/piqa"
    folder.mkdir(parents=True)
    arguments = (
        osdn,
        "--suite",
        "commonsense",
        "--data-dir",
        tmp_path / "mirror",
        "--output",
        tmp_path / "out",
    )
    for text, message in (
        ('{"question": "a"}', "piqa: the data does not fit the task"), ('{"goal": ', "baber/piqa in"),
    ):  # fmt: skip
        (folder / "validation.jsonl").write_text(text)
        done = run(*arguments)
        assert done.exit_code == 1
        assert message in said(done)


def changed_mirror(task, mirror, folder, **fields):
    """The data of a task with some fields of the second row replaced."""
    rows = load_data(task.data, task.config, mirror)[task.split].to_list()
    rows[min(1, len(rows) - 1)] |= fields
    file = folder / task.data / (task.config or "") / f"{task.split}.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def evaluation(osdn, tmp_path_factory):
    """An evaluation to measure single tasks on the data in its settings."""
    return Evaluation(EvaluationSettings(osdn), tmp_path_factory.mktemp("none"))


@pytest.mark.parametrize("value", [None, 7])
@pytest.mark.parametrize(("name", "field"), [
    ("wikitext", "page"), ("lambada_openai", "text"), ("fineweb_edu", "text"), ("fda", "text"),
    ("fda_twice", "text"), ("swde_twice", "key"), ("squad_twice", "question"), ("squad_completion", "value"),
    ("piqa", "sol1"), ("hellaswag", "ctx_b"), ("winogrande", "sentence"), ("arc_easy", "choices"),
    ("drop", "answer"), ("triviaqa", "answer"), ("longbench_trec", "answers"), ("pg19", "text"),
])  # fmt: skip
def test_fields_that_are_not_text_are_reported(evaluation, mirror, tmp_path, name, field, value):
    task = TASKS[name]
    evaluation.settings = EvaluationSettings(
        evaluation.settings.checkpoint, changed_mirror(task, mirror, tmp_path, **{field: value})
    )
    with pytest.raises(ValueError, match=r"fix or remove|the data does not fit the task"):
        evaluation._entry(task, lambda *_: None)


@pytest.mark.parametrize(("name", "field"), [("piqa", "goal"), ("boolq", "passage"), ("drop", "question")])
def test_a_missing_text_is_not_read_as_the_word_none(evaluation, mirror, tmp_path, name, field):
    task = TASKS[name]
    settings = EvaluationSettings(
        evaluation.settings.checkpoint, changed_mirror(task, mirror, tmp_path, **{field: None})
    )
    evaluation.settings = settings
    with pytest.raises(ValueError, match=rf"{name}: document 1 of 3 .*{field} is missing"):
        evaluation._entry(task, lambda *_: None)
    evaluation.settings = replace(settings, limit=1)  # without that document
    assert evaluation._entry(task, lambda *_: None)["documents"] == 1


@pytest.mark.parametrize("name", ["fda", "fda_twice", "squad_completion", "squad_twice"])
def test_a_document_without_an_answer_is_left_out_and_counted(evaluation, mirror, tmp_path, name):
    task = TASKS[name]
    folder = changed_mirror(task, mirror, tmp_path, value=" ")
    evaluation.settings = EvaluationSettings(evaluation.settings.checkpoint, folder)
    entry = evaluation._entry(task, lambda *_: None)
    assert entry["documents"] == 2
    assert entry["unanswered"] == 1
    assert sum(entry["results"].values()) == 0  # an empty answer would be found in every text


@pytest.mark.parametrize("content", [
    b"", b"\xff", b'{"kind": "eval', {}, {"tasks": []}, {"tasks": {"piqa": 3}}, {"tasks": {"piqa": {}}},
    {"tasks": {"piqa": {"results": {"piqa": None}, "errors": {}}}},
    {"tasks": {"piqa": {"results": {"piqa": 1}, "errors": {}, "data": {"digest": "1"}, "protocol": []}}},
    {"tasks": {"piqa": {"results": {}, "errors": {}, "data": {"digest": "1"}, "protocol": {}}}},
])  # fmt: skip
def test_a_damaged_result_file_is_reported_and_left_alone(osdn, mirror, tmp_path, content):
    file = tmp_path / "commonsense.json"
    if isinstance(content, dict):
        content = json.dumps({"kind": "evaluation", "checkpoint": osdn, **content}).encode()
    file.write_bytes(content)
    before = file.read_bytes()
    done = run(osdn, "--suite", "retrieval", "--data-dir", mirror, "--output", tmp_path)
    assert done.exit_code == 1
    assert "commonsense.json cannot be read" in said(done)
    assert "remove it or choose another folder" in said(done)
    assert file.read_bytes() == before


def test_a_maximum_length_that_is_too_small_is_reported(osdn, mirror, tmp_path):
    done = run(osdn, "--suite", "longbench", "--data-dir", mirror, "--output", tmp_path, "--max-length", 128)
    assert done.exit_code == 1
    assert "generates 128 tokens, but --max-length is 128: raise it" in said(done)


def test_a_missing_tokenizer_and_a_missing_lm_eval_are_reported(osdn, tmp_path, monkeypatch):
    bare = shutil.copytree(osdn, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    done = run(bare, "--suite", "pg19", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "has no tokenizer" in said(done)
    byte_tokenizer().save_pretrained(bare)
    done = run(bare, "--suite", "pg19", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "has no end-of-text token" in said(done)
    monkeypatch.setattr("osdn.extras.find_spec", lambda name: None)
    done = run(osdn, "--suite", "ppl")
    assert done.exit_code == 1
    assert 'pip install "osdn[eval]"' in said(done)


def test_the_window_and_how_many_documents_it_truncated_are_reported(osdn, mirror, tmp_path):
    done = run(osdn, "--suite", "recall", "--data-dir", mirror, "--output", tmp_path, "--window", 250)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "recall.json").read_text())
    tasks = content["tasks"]
    assert tasks["fda_twice"]["cut"] == 3  # documents of some 350 bytes
    assert tasks["fda_twice"]["protocol"]["window"] == 250
    assert "cut" not in tasks["fda"]
    assert "fda_twice: 3 of 3 documents were truncated to the window" in said(done)


def test_own_tasks_are_packaged():
    own = {"fda_twice", "swde_twice", "squad_twice", *(task.name for task in SUITES["code_recall"])}
    names = {path.stem for path in Path(harness.OWN_TASKS).glob("*.yaml")}
    assert names == own | {"_twice", "_code"}
