"""Tables of several models: differences, bold, the paper's lines, and the files that are written."""

import csv
import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from osdn.cli import app
from osdn.evaluation.columns import MAIN, RECALL, Score, derive
from osdn.evaluation.compare import compare, comparisons, latex, markdown, number, read, write
from osdn.results.paper import BUCKETS
from osdn.results.store import save_json


def save(folder, model, results, errors=None, **more):
    content = {"kind": "evaluation", "model": model, "results": results, "errors": errors or {}, **more}
    return save_json(folder / f"{model}.json", content)


@pytest.fixture
def results(tmp_path):
    repeated = ("fda_twice", "swde_twice", "squad_twice")
    ppl = ("wikitext_ppl", "lambada_ppl")
    save(
        tmp_path, "osdn-340m", dict(zip((*ppl, *repeated), (18.0, 32.0, 0.2, 0.3, 0.4))), {"fda_twice": 0.03}
    )
    base = dict(zip((*ppl, *repeated), (20.0, 45.0, 0.1, 0.2, 0.4))) | {
        b: 20.0 + i for i, b in enumerate(BUCKETS)
    }
    save(tmp_path, "delta_net-340m", base, dict.fromkeys(repeated, 0.04))
    save(tmp_path, "mine", {"fda_twice": 0.9, "pg19_ppl": 12.3456})
    rows = [{"model": "osdn-340m", "change": -1.5, "baseline": "delta_net-340m"}, {"model": "delta_net-340m"}]
    save_json(tmp_path / "throughput.json", {"kind": "throughput", "rows": rows})
    (tmp_path / "other.json").write_text("[]")
    return tmp_path


def cells(table, label):
    row = next(row for row in table.rows if row.label == label)
    return {column.key: cell for column, cell in zip(table.columns, row.cells)}


def test_a_block_is_its_baseline_and_what_is_built_on_it(results):
    models = read([results])
    assert [model.label for model in models] == ["DeltaNet 340M", "OSDN 340M", "mine"]
    osdn = cells(compare(models, MAIN), "OSDN 340M")
    assert osdn["lm_ppl"].score.value == pytest.approx(24.0)
    assert osdn["repeated_change"].score.value == pytest.approx(0.3 - 0.7 / 3)
    assert osdn["throughput_change"].score.value == -1.5
    assert models[1].scores["nll_change"].value == pytest.approx(math.log(24 / 30))
    assert "repeated_change" not in models[2].scores  # it has no baseline
    assert "repeated_change" not in models[0].scores  # it is one


def test_differences_have_the_errors_of_paired_documents(tmp_path):
    """Against a bootstrap of documents, drawn for both models at once."""
    generator = np.random.default_rng(0)
    n, repeated = 400, ("fda_twice", "swde_twice", "squad_twice")
    words = generator.integers(50, 500, n)
    hard = generator.normal(4.0, 1.0, n)  # a document's own difficulty, which both models meet
    documents = {}
    for model, gain in (("delta_net-340m", 0.0), ("osdn-340m", 0.1)):
        losses = (hard - gain + generator.normal(0, 0.1, n)) * words
        last = -hard + gain + generator.normal(0, 0.1, n)
        right = {t: (generator.normal(-hard + 4 + gain, 0.3) > 0).astype(float) for t in repeated}
        documents[model] = {"wikitext_ppl": np.stack([-losses, words], 1), "lambada_ppl": last, **right}
        results = {t: right[t].mean() for t in repeated}
        results |= {
            "wikitext_ppl": math.exp(losses.sum() / words.sum()),
            "lambada_ppl": math.exp(-last.mean()),
        }
        part = {"results": results, "errors": dict.fromkeys(results, 1.0)}
        part["by_document"] = {k: v.tolist() for k, v in documents[model].items()}
        save(tmp_path, model, results, tasks={"all": part})
    ours, theirs = documents["osdn-340m"], documents["delta_net-340m"]
    draws = generator.integers(0, n, (3000, n))
    gains = sum((ours[t] - theirs[t])[generator.integers(0, n, (3000, n))].mean(1) for t in repeated) / 3
    wiki = (theirs["wikitext_ppl"] - ours["wikitext_ppl"])[:, 0][draws].sum(1) / words[draws].sum(1)
    other = generator.integers(0, n, (3000, n))
    lambada = (theirs["lambada_ppl"] - ours["lambada_ppl"])[other].mean(1)
    scores = read([tmp_path])[1].scores
    assert scores["repeated_change"].error == pytest.approx(gains.std(), rel=0.1)
    assert scores["nll_change"].error == pytest.approx(((wiki + lambada) / 2).std(), rel=0.1)
    assert scores["nll_change"].value == pytest.approx(-0.1, abs=0.02)
    assert scores["recall_repeated"].error == pytest.approx(
        1 / math.sqrt(3)
    )  # a score by itself is not paired


def test_the_best_of_a_block_is_bold_ties_too_and_alone_nothing_is(results):
    table = compare(read([results]), RECALL)
    base, osdn, mine = (cells(table, label) for label in ("DeltaNet 340M", "OSDN 340M", "mine"))
    assert (base["fda_twice"].best, osdn["fda_twice"].best, mine["fda_twice"].best) == (False, True, False)
    assert base["squad_twice"].best
    assert osdn["squad_twice"].best
    main = compare(read([results]), MAIN)
    assert cells(main, "OSDN 340M")["lm_ppl"].best  # lower is better
    assert not cells(main, "DeltaNet 340M")["lm_ppl"].best


def test_the_paper_stands_below_its_models_and_no_others(results):
    table = compare(read([results]), RECALL)
    labels = [row.label for row in table.rows]
    assert labels == ["DeltaNet 340M", "the paper's", "OSDN 340M", "the paper's", "mine"]
    assert table.columns[0].key == "fda_twice"  # no column that nobody has
    assert table.rows[3].cells[0].score == Score(0.044)
    assert [row.first for row in table.rows] == [True, False, False, False, True]


def test_two_checkpoints_of_one_model_are_told_apart(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name, "osdn-340m", {"piqa": 0.5}, checkpoint=f"runs/{name}")
    assert [model.label for model in read([tmp_path])] == ["runs/a", "runs/b"]


def test_models_that_are_no_presets_form_blocks_by_what_the_files_say(tmp_path):
    shape = {"block": "delta_net, 2 layers of width 64"}
    save(
        tmp_path, "new", {"wikitext_ppl": 9.0, "lambada_ppl": 4.0}, checkpoint="new", baseline=False, **shape
    )
    save(tmp_path, "old", {"wikitext_ppl": 9.0, "lambada_ppl": 9.0}, checkpoint="old", baseline=True, **shape)
    old, new = read([tmp_path])
    assert (old.name, new.name) == ("old", "new")
    assert new.scores["nll_change"].value == pytest.approx(math.log(6 / 9))


def test_markdown_and_latex_say_the_same(results):
    tables = comparisons(read([results]))
    text = markdown(tables)
    assert "| OSDN 340M | **0.200** ± 0.030 | **0.300** | **0.400** | **0.300** |" in text
    assert "| *the paper's* | 0.044 | 0.227 | 0.383 | 0.218 |" in text
    source = latex(tables)
    assert r"OSDN 340M & \textbf{0.200} {\tiny $\pm$ 0.030} & \textbf{0.300} & \textbf{0.400}" in source
    assert source.count(r"\begin{tabular}") == source.count(r"\end{tabular}") == len(tables)
    for line in source.splitlines():
        assert line.startswith("%") or line.count("{") == line.count("}")
        assert line.isascii() or line.startswith("%") or "Δ" not in line
    assert r"$\Delta$NLL $\downarrow$" in source


def test_everything_is_written_and_the_csv_has_every_number(results, tmp_path):
    paths = write(read([results]), tmp_path / "out")
    names = {path.name for path in paths}
    assert names == {
        "compare.md", "compare.tex", "compare.csv", "summary.svg", "summary.png", "pg19.svg", "pg19.png",
    }  # fmt: skip
    assert all(path.stat().st_size > 100 for path in paths)
    with (tmp_path / "out/compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    key = ("In-context recall", "OSDN 340M", "fda_twice")
    found = {r["source"]: r for r in rows if (r["table"], r["model"], r["column"]) == key}
    assert (found["measured"]["value"], found["measured"]["standard_error"]) == ("0.2", "0.03")
    assert found["measured"]["best"] == "1"
    assert found["paper"]["value"] == "0.044"


def test_the_command_prints_tables_and_names_what_is_wrong(results, tmp_path):
    done = CliRunner().invoke(app, ["compare", str(results), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for text in ("Main results", "OSDN 340M", "the paper's", "ΔNLL", "compare.tex"):
        assert text in done.output
    assert "24.00" in done.output
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"kind": "evaluation", "model": "x", "results": {"piqa": "high"}}))
    for path, message in (
        ("nowhere", "does not exist"), ("empty", "holds no results"), ("broken.json", "is not a result"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, ["compare", str(tmp_path / path)])
        assert done.exit_code == 1
        assert message in " ".join(done.output.split())


def test_no_model_is_lost_on_a_narrow_terminal(tmp_path, monkeypatch):
    from rich.console import Console

    from osdn.evaluation import commands

    for variant in (
        "delta_net",
        "osdn",
        "osdn-apf",
        "gdn",
        "osgdn",
        "osgdn-apf",
        "kda",
        "oskda",
        "oskda-apf",
    ):
        save(tmp_path, f"{variant}-340m", {"piqa": 0.5 + len(variant) / 1000})
    for width in (60, 200):
        monkeypatch.setattr(commands, "console", Console(width=width))
        done = CliRunner().invoke(app, ["compare", str(tmp_path), "--output", str(tmp_path / "out")])
        assert {f"0.{500 + len(variant)}" for variant in ("kda", "osdn", "oskda-apf")} <= set(
            done.output.split()
        )
        assert done.output.count("340M") == 9


def test_numbers_are_readable():
    assert number(0.12345, 3) == "0.123"
    assert number(0.12345, 3, True) == "+0.123"
    assert number(None, 3) == "–"
    assert number(123456789.0, 2) == "1.23e+08"


def test_a_change_against_another_baseline_is_not_shown(results):
    rows = [{"model": "osdn-340m", "change": 2.0, "baseline": "osdn-apf-340m"}]
    save_json(results / "throughput.json", {"kind": "throughput", "rows": rows})
    assert "throughput_change" not in cells(compare(read([results]), MAIN), "OSDN 340M")


@pytest.mark.parametrize("other", [{"weights": "b", "limit": None}, {"weights": "a", "limit": 2}])
def test_other_weights_and_fewer_documents_are_models_of_their_own(other, tmp_path):
    for folder, value, settings in (("x", 1.0, {"weights": "a", "limit": None}), ("y", 2.0, other)):
        task = {"results": {"fda": value}, "errors": {}, "settings": settings}
        content = {"kind": "evaluation", "model": "m", "checkpoint": "here", "tasks": {"fda": task}}
        save_json(tmp_path / folder / "recall.json", content | {"results": {"fda": value}})
    for order in (["x", "y"], ["y", "x"]):
        models = read([tmp_path / folder for folder in order])
        found = {model.label: model.scores["fda"].value for model in models}
        assert found == {str(tmp_path / "x"): 1.0, str(tmp_path / "y"): 2.0}


def test_averages_follow_from_the_newest_parts():
    stale = {"wikitext_ppl": Score(4.0), "lambada_ppl": Score(9.0), "lm_ppl": Score(100.0)}
    assert derive(stale)["lm_ppl"].value == pytest.approx(6.0)


def test_any_name_can_be_tabled_and_drawn(tmp_path):
    names = ["a$_$x", "_hidden", "p|q", "back\\slash {brace} ^~"]
    for name in names:
        save(tmp_path, name, {"wikitext_ppl": 2.0, "lambada_ppl": 3.0} | dict.fromkeys(BUCKETS, 20.0))
    paths = {path.name: path for path in write(read([tmp_path]), tmp_path / "out")}
    assert {"summary.svg", "pg19.svg"} <= paths.keys()
    assert r"p\|q" in paths["compare.md"].read_text()
    latex = paths["compare.tex"].read_text()
    assert r"a\$\_\$x" in latex
    assert r"back\textbackslash{}slash \{brace\} \^{}\~{}" in latex
