"""`osdn eval` from end to end on a small mirror: results, resuming, what is missing, what is refused."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osdn.analysis.report import collect
from osdn.cli import app
from osdn.evaluation import harness
from osdn.evaluation.columns import BY_SUITE, MEANS
from osdn.evaluation.data import load_data
from osdn.evaluation.paper import BUCKETS
from osdn.evaluation.runner import Evaluation, Settings
from osdn.evaluation.suites import SUITES
from osdn.models.checkpoints import load_model, load_tokenizer
from tests.analysis.models import byte_tokenizer
from tests.evaluation.mirror import save_osdn

TASKS = {task.name: task for tasks in SUITES.values() for task in tasks}


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def said(done) -> str:
    return " ".join(done.output.split())  # however lines are folded


@pytest.fixture(scope="module")
def evaluated(osdn, mirror, tmp_path_factory):
    """Every suite on one of our models."""
    output = tmp_path_factory.mktemp("eval")
    done = run(osdn, "--suite", "all", "--data-dir", mirror, "--output", output)
    assert done.exit_code == 0, done.output
    return output, done


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_fills_its_columns(evaluated, suite):
    output, done = evaluated
    content = json.loads((output / f"{suite}.json").read_text())
    columns = {column.key for column in BY_SUITE[suite].columns} - {"nll_change"}  # which needs a baseline
    assert columns <= content["results"].keys()
    assert content["kind"] == "evaluation"
    assert content["suite"] == suite
    assert content["complete"]
    assert content["missing"] == {}
    assert content["versions"].keys() >= {"osdn", "torch", "transformers", "lm_eval", "datasets"}
    assert content["command"]
    assert "seed" in content
    assert content["block"] == "delta_net, 2 layers of width 64"
    assert not content["baseline"]
    for name, task in content["tasks"].items():
        assert task["documents"] == (1 if name == "pg19" else 3)
        assert task["seconds"] >= 0
    assert f"{suite}: osdn" in done.output


def test_standard_errors_are_there_where_there_is_more_than_one_document(evaluated):
    output, _ = evaluated
    for suite in SUITES:
        content = json.loads((output / f"{suite}.json").read_text())
        if suite != "pg19":  # one block
            assert content["errors"].keys() == content["results"].keys(), suite


def test_averages_in_the_files_are_those_of_their_parts(evaluated):
    output, _ = evaluated
    results = {}
    for suite in SUITES:
        results |= json.loads((output / f"{suite}.json").read_text())["results"]
    for name, parts in MEANS.items():
        assert results[name] == pytest.approx(sum(results[p] for p in parts) / len(parts)), name
    assert results["lm_ppl"] == pytest.approx((results["wikitext_ppl"] * results["lambada_ppl"]) ** 0.5)
    assert results["pg19_drift"] == pytest.approx(results[BUCKETS[-1]] - results[BUCKETS[1]])


def test_documents_behind_the_printed_differences_are_kept(evaluated):
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


def test_the_report_reads_the_files(evaluated):
    output, _ = evaluated
    scores = collect([output]).evaluations["osdn"]
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


def test_a_run_that_was_interrupted_continues(osdn, mirror, tmp_path, monkeypatch):
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
    assert "commonsense" not in partial["results"]  # no average of a part
    stop = False
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert ran == [task.name for task in SUITES["commonsense"]]  # each once
    assert json.loads((tmp_path / "commonsense.json").read_text())["complete"]
    done = run(osdn, "--suite", "ppl", "--data-dir", mirror, "--output", tmp_path)
    assert ran.count("lambada_openai") == 1  # one run serves two suites
    assert run(*arguments, "--overwrite").exit_code == 0
    assert ran.count("piqa") == 2


def test_what_is_done_stays_on_disk_while_an_earlier_task_runs(osdn, mirror, tmp_path, monkeypatch):
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


def test_results_are_not_replaced_by_others(osdn, mirror, tmp_path):
    other = shutil.copytree(osdn, tmp_path / "other")
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
    save_osdn(other, seed=5)  # trained on, as it were
    done = run(other, *arguments, "--limit", 2)
    assert done.exit_code == 1
    assert "weights" in said(done)
    assert run(other, *arguments, "--limit", 2, "--overwrite").exit_code == 0


def test_a_missing_set_is_one_line_and_the_rest_runs(osdn, mirror, tmp_path):
    for name in ("baber", "Rowan", "hazyresearch"):
        shutil.copytree(mirror / name, tmp_path / "part" / name)
    done = run(
        osdn, "--suite", "commonsense", "pg19", "--data-dir", tmp_path / "part", "--output", tmp_path / "o"
    )
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("not run:")]
    assert [line.split(":")[1].strip() for line in lines] == [
        "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq", "lambada_openai", "pg19",
    ]  # fmt: skip
    assert "allenai/winogrande winogrande_xl, validation" in lines[0]
    content = json.loads((tmp_path / "o/commonsense.json").read_text())
    assert content["results"].keys() == {"piqa", "hellaswag"}
    assert set(content["missing"]) == {line.split(":")[1].strip() for line in lines} - {"pg19"}
    assert not (tmp_path / "o/pg19.json").exists()
    done = run(osdn, "--suite", "longbench", "--data-dir", tmp_path / "part", "--output", tmp_path / "n")
    assert done.exit_code == 1  # nothing ran


def test_any_text_serves_for_pg19(osdn, tmp_path):
    from tests.evaluation.mirror import prose

    books = tmp_path / "books"
    books.mkdir()
    (books / "one.txt").write_text(prose(0, 20_500))
    (books / "two.txt").write_text(prose(9, 41_000))
    (books / "short.txt").write_text("too short for a block")
    done = run(osdn, "--suite", "pg19", "--books", books, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out/pg19.json").read_text())
    assert content["tasks"]["pg19"]["documents"] == 2
    assert content["errors"]["pg19_ppl"] > 0  # three blocks
    done = run(osdn, "--suite", "pg19", "--books", tmp_path / "no.txt", "--output", tmp_path / "out2")
    assert done.exit_code == 1
    assert "no such file or directory" in said(done)


def test_the_list_says_what_is_there(mirror, tmp_path):
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
    (("CHECKPOINT", "--suite", "recal"), "there is no suite recal; there are ppl, recall"),
    (("CHECKPOINT", "--suite", "ppl", "recal"), "there is no suite recal"),
    (("/nowhere/at/all",), "/nowhere/at/all"),
    (("CHECKPOINT", "--window", "50"), "the window is 50 tokens"),
    (("CHECKPOINT", "--data-dir", "/nowhere"), "/nowhere is not a directory"),
])  # fmt: skip
def test_bad_input_is_told_in_a_sentence(osdn, arguments, message, tmp_path):
    arguments = [osdn if a == "CHECKPOINT" else a for a in arguments]
    done = run(*arguments, "--output", tmp_path)
    assert done.exit_code == 1
    assert message in said(done)
    assert "Traceback" not in done.output


def test_data_in_another_format_are_told(osdn, tmp_path):
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
        ('{"question": "a"}', "piqa: the data is not in the format"), ('{"goal": ', "baber/piqa in"),
    ):  # fmt: skip
        (folder / "validation.jsonl").write_text(text)
        done = run(*arguments)
        assert done.exit_code == 1
        assert message in said(done)


def changed_mirror(task, mirror, folder, **fields):
    """The data of a task with other values in the second row."""
    rows = load_data(task.data, task.config, mirror)[task.split].to_list()
    rows[min(1, len(rows) - 1)] |= fields
    file = folder / task.data / (task.config or "") / f"{task.split}.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def evaluation(osdn, tmp_path_factory):
    """Measures single tasks, on the data that its settings name."""
    return Evaluation(Settings(osdn), tmp_path_factory.mktemp("none"))


@pytest.mark.parametrize("value", [None, 7])
@pytest.mark.parametrize(("name", "field"), [
    ("wikitext", "page"), ("lambada_openai", "text"), ("fineweb_edu", "text"), ("fda", "text"),
    ("fda_twice", "text"), ("swde_twice", "key"), ("squad_twice", "question"), ("squad_completion", "value"),
    ("piqa", "sol1"), ("hellaswag", "ctx_b"), ("winogrande", "sentence"), ("arc_easy", "choices"),
    ("drop", "answer"), ("triviaqa", "answer"), ("longbench_trec", "answers"), ("pg19", "text"),
])  # fmt: skip
def test_something_else_for_text_is_told(evaluation, mirror, tmp_path, name, field, value):
    task = TASKS[name]
    evaluation.settings = Settings(
        evaluation.settings.checkpoint, changed_mirror(task, mirror, tmp_path, **{field: value})
    )
    with pytest.raises(ValueError, match=r"mend|not in the format of the task"):
        evaluation._entry(task, lambda *_: None)


@pytest.mark.parametrize(("name", "field"), [("piqa", "goal"), ("boolq", "passage"), ("drop", "question")])
def test_a_missing_text_is_not_taken_for_the_word_none(evaluation, mirror, tmp_path, name, field):
    task = TASKS[name]
    settings = Settings(
        evaluation.settings.checkpoint, changed_mirror(task, mirror, tmp_path, **{field: None})
    )
    evaluation.settings = settings
    with pytest.raises(ValueError, match=rf"{name}: document 1 of 3 .*{field} is missing"):
        evaluation._entry(task, lambda *_: None)
    evaluation.settings = replace(settings, limit=1)  # which leaves it out
    assert evaluation._entry(task, lambda *_: None)["documents"] == 1


@pytest.mark.parametrize("name", ["fda", "fda_twice", "squad_completion", "squad_twice"])
def test_a_document_without_an_answer_is_left_out_and_counted(evaluation, mirror, tmp_path, name):
    task = TASKS[name]
    folder = changed_mirror(task, mirror, tmp_path, value=" ")
    evaluation.settings = Settings(evaluation.settings.checkpoint, folder)
    entry = evaluation._entry(task, lambda *_: None)
    assert entry["documents"] == 2
    assert entry["unanswered"] == 1
    assert sum(entry["results"].values()) == 0  # an empty answer would be in every text


@pytest.mark.parametrize("content", [
    b"", b"\xff", b'{"kind": "eval', {}, {"tasks": []}, {"tasks": {"piqa": 3}}, {"tasks": {"piqa": {}}},
    {"tasks": {"piqa": {"results": {"piqa": None}, "errors": {}}}},
])  # fmt: skip
def test_a_damaged_result_file_is_named_and_left_alone(osdn, mirror, tmp_path, content):
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


def test_a_model_that_may_see_too_little_is_told(osdn, mirror, tmp_path):
    done = run(osdn, "--suite", "longbench", "--data-dir", mirror, "--output", tmp_path, "--max-length", 128)
    assert done.exit_code == 1
    assert "generates 128 tokens, and the model may see 128: raise --max-length" in said(done)


def test_a_checkpoint_without_a_tokenizer_and_one_without_lm_eval(osdn, tmp_path, monkeypatch):
    bare = shutil.copytree(osdn, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    done = run(bare, "--suite", "pg19", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "has no tokenizer" in said(done)
    byte_tokenizer().save_pretrained(bare)
    done = run(bare, "--suite", "pg19", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "has no end-of-text token" in said(done)
    monkeypatch.setattr("osdn.evaluation.commands.find_spec", lambda name: None)
    done = run(osdn, "--suite", "ppl")
    assert done.exit_code == 1
    assert 'pip install "osdn[eval]"' in said(done)


def test_the_window_and_the_number_that_it_cut_are_reported(osdn, mirror, tmp_path):
    done = run(osdn, "--suite", "recall", "--data-dir", mirror, "--output", tmp_path, "--window", 250)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "recall.json").read_text())
    tasks = content["tasks"]
    assert tasks["fda_twice"]["cut"] == 3  # documents of some 350 bytes
    assert tasks["fda_twice"]["settings"]["window"] == 250
    assert "cut" not in tasks["fda"]
    assert "fda_twice 3 of 3" in said(done)


def test_the_tables_name_the_same_model_as_the_preset(tmp_path):
    from osdn import OSDNConfig, OSDNForCausalLM
    from osdn.models.describe import model_name

    OSDNForCausalLM(OSDNConfig.from_preset("gdn-tiny")).save_pretrained(tmp_path)
    assert model_name(load_model(str(tmp_path)), str(tmp_path)) == "gdn-tiny"
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_own_tasks_are_packaged():
    assert {path.name for path in Path(harness.OWN_TASKS).glob("*.yaml")} == {
        "_twice.yaml", "fda_twice.yaml", "swde_twice.yaml", "squad_twice.yaml",
    }  # fmt: skip
