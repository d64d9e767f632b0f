"""Tables of several models: what shares a column, differences, bold values, the paper's rows, and files."""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from osdn import terminal
from osdn.cli import app
from osdn.results.columns import ABLATIONS, MAIN, PG19, RECALL
from osdn.results.comparison import compare, paper_table, tables, write
from osdn.results.paper import BUCKETS
from osdn.results.scores import Score, derive
from osdn.results.store import read_results
from osdn.results.tables import latex, markdown, number
from tests.results.files import identity, save_evaluation, save_throughput

NINE = ("delta_net", "osdn", "osdn-apf", "gdn", "osgdn", "osgdn-apf", "kda", "oskda", "oskda-apf")


@pytest.fixture
def results(tmp_path):
    columns = ("wikitext_ppl", "lambada_ppl", "fda_twice", "swde_twice", "squad_twice")
    ours = dict(zip(columns, (18.0, 32.0, 0.2, 0.3, 0.4)))
    save_evaluation(tmp_path, "osdn-340m", ours, {"fda_twice": 0.03})
    base = dict(zip(columns, (20.0, 45.0, 0.1, 0.2, 0.4))) | {b: 20.0 + i for i, b in enumerate(BUCKETS)}
    save_evaluation(tmp_path, "delta_net-340m", base, dict.fromkeys(columns[2:], 0.04))
    save_evaluation(tmp_path, "mine", {"fda_twice": 0.9, "pg19_ppl": 12.3456})
    presets = [identity(name, weights=None) for name in ("delta_net-340m", "osdn-340m")]
    save_throughput(tmp_path, [(presets[0], {}), (presets[1], {"change": -1.5})])
    (tmp_path / "other.json").write_text("[]")
    return tmp_path


def only(folder):
    """The one comparison of the results in a folder."""
    [found] = compare(read_results([folder]))
    return found


def cells(table, label):
    row = next(row for row in table.rows if row.label == label)
    return dict(zip(table.keys, row.cells))


def value(table, label, key):
    return cells(table, label)[key].score.value


def test_a_block_has_a_baseline_and_the_models_built_on_it(results):
    found = only(results)
    base, osdn, mine = found.models
    assert [model.label for model in found.models] == ["DeltaNet 340M", "OSDN 340M", "mine"]
    table = paper_table(found, MAIN)
    assert value(table, "OSDN 340M", "lm_ppl") == pytest.approx(24.0)
    assert value(table, "OSDN 340M", "repeated_change") == pytest.approx(0.3 - 0.7 / 3)
    assert osdn.scores["nll_change"].value == pytest.approx(math.log(24 / 30))
    assert "repeated_change" not in mine.scores  # it has no baseline
    assert "repeated_change" not in base.scores  # it is one


def test_a_trained_model_gets_the_timing_of_its_preset(results):
    assert value(paper_table(only(results), MAIN), "OSDN 340M", "throughput_change") == -1.5
    assert len(only(results).models) == 3


def test_differences_have_the_errors_of_paired_documents(tmp_path):
    """Against a bootstrap that resamples the same documents for both models."""
    generator = np.random.default_rng(0)
    n, repeated = 400, ("fda_twice", "swde_twice", "squad_twice")
    words = generator.integers(50, 500, n)
    hard = generator.normal(4.0, 1.0, n)  # how hard each document is, for both models
    documents = {}
    for model, gain in (("delta_net-340m", 0.0), ("osdn-340m", 0.1)):
        losses = (hard - gain + generator.normal(0, 0.1, n)) * words
        last = -hard + gain + generator.normal(0, 0.1, n)
        right = {t: (generator.normal(-hard + 4 + gain, 0.3) > 0).astype(float) for t in repeated}
        documents[model] = {"wikitext_ppl": np.stack([-losses, words], 1), "lambada_ppl": last, **right}
        scores = {t: right[t].mean() for t in repeated}
        scores["wikitext_ppl"] = math.exp(losses.sum() / words.sum())
        scores["lambada_ppl"] = math.exp(-last.mean())
        lists = {k: v.tolist() for k, v in documents[model].items()}
        save_evaluation(tmp_path, model, scores, dict.fromkeys(scores, 1.0), by_document=lists)
    ours, theirs = documents["osdn-340m"], documents["delta_net-340m"]
    draws = generator.integers(0, n, (3000, n))
    gains = sum((ours[t] - theirs[t])[generator.integers(0, n, (3000, n))].mean(1) for t in repeated) / 3
    wiki = (theirs["wikitext_ppl"] - ours["wikitext_ppl"])[:, 0][draws].sum(1) / words[draws].sum(1)
    other = generator.integers(0, n, (3000, n))
    lambada = (theirs["lambada_ppl"] - ours["lambada_ppl"])[other].mean(1)
    scores = only(tmp_path).models[1].scores
    assert scores["repeated_change"].error == pytest.approx(gains.std(), rel=0.1)
    assert scores["nll_change"].error == pytest.approx(((wiki + lambada) / 2).std(), rel=0.1)
    assert scores["nll_change"].value == pytest.approx(-0.1, abs=0.02)
    assert scores["recall_repeated"].error == pytest.approx(1 / math.sqrt(3))  # by itself it is not paired


def test_the_best_of_a_block_is_bold_including_ties_but_not_a_single_model(results):
    table = paper_table(only(results), RECALL)
    base, osdn, mine = (cells(table, label) for label in ("DeltaNet 340M", "OSDN 340M", "mine"))
    assert (base["fda_twice"].best, osdn["fda_twice"].best, mine["fda_twice"].best) == (False, True, False)
    assert base["squad_twice"].best
    assert osdn["squad_twice"].best
    main = paper_table(only(results), MAIN)
    assert cells(main, "OSDN 340M")["lm_ppl"].best  # lower is better
    assert not cells(main, "DeltaNet 340M")["lm_ppl"].best


def test_the_papers_figures_are_below_its_own_models_only(results):
    table = paper_table(only(results), RECALL)
    labels = [row.label for row in table.rows]
    assert labels == ["DeltaNet 340M", "the paper's", "OSDN 340M", "the paper's", "mine"]
    assert table.keys[0] == "fda_twice"  # no column that nobody has
    assert table.rows[3].cells[0].score == Score(0.044)
    assert [row.rule for row in table.rows] == [True, False, False, False, True]


def test_results_with_a_limit_get_a_separate_table(tmp_path):
    save_evaluation(tmp_path / "full", "osdn-340m", {"fda": 0.3})
    save_evaluation(tmp_path / "first", "osdn-340m", {"fda": 0.9}, protocol={"limit": 10})
    found = tables(compare(read_results([tmp_path])), [RECALL])
    assert [table.title for table in found] == ["In-context recall", "In-context recall (limit 10)"]
    assert [value(table, "OSDN 340M", "fda") for table in found] == [0.3, 0.9]


def test_other_data_gets_a_separate_column_and_no_average_mixes_the_two(tmp_path):
    recall = {"fda": 0.3, "swde": 0.3, "squad": 0.3}
    save_evaluation(tmp_path, "osdn-340m", recall)
    save_evaluation(tmp_path, "delta_net-340m", recall)
    other = {"source": "elsewhere", "documents": 3, "digest": "other"}
    save_evaluation(tmp_path, "osdn-apf-340m", recall | {"fda": 0.9}, data=other)
    table = paper_table(only(tmp_path), RECALL)
    assert cells(table, "OSDN-APF 340M")["fda"].score is None
    assert value(table, "OSDN-APF 340M", "fda (2)") == 0.9
    assert cells(table, "OSDN-APF 340M")["recall_single"].score is None
    assert value(table, "OSDN 340M", "recall_single") == pytest.approx(0.3)
    assert "elsewhere, test, 3 documents" in table.note


def test_other_books_are_not_labelled_pg19(tmp_path):
    scores = dict.fromkeys((*BUCKETS, "pg19_ppl"), 9.0)
    save_evaluation(tmp_path, "osdn-340m", scores, data={"source": "stdlib"})
    table = paper_table(only(tmp_path), PG19)
    assert table.title == "Books by position"
    assert "0–2K to final: stdlib, test, 10 documents." in table.note
    assert paper_table(only(tmp_path), MAIN).head == ["books ↓"]
    save_evaluation(tmp_path, "osdn-340m", scores, data={"source": "emozilla/pg19-test"})
    assert paper_table(only(tmp_path), PG19).title == "PG-19 by position"
    assert paper_table(only(tmp_path), MAIN).head == ["PG-19 ↓"]


def test_truncated_prompts_are_counted_in_the_note(tmp_path):
    save_evaluation(tmp_path, "osdn-340m", {"fda": 0.1}, truncated={"prompts": 7, "tokens": 9})
    assert "OSDN 340M: 7 prompts were truncated." in paper_table(only(tmp_path), RECALL).note


def test_two_checkpoints_with_the_same_name_get_different_labels(tmp_path):
    for place, weights in (("a", "1"), ("b", "2"), ("b", "3")):
        model = replace(identity("osdn-340m", weights), checkpoint=place)
        save_evaluation(tmp_path / f"{place}{weights}", model, {"piqa": 0.5})
    labels = [model.label for model in only(tmp_path).models]
    assert sorted(labels) == ["OSDN 340M (a)", "OSDN 340M (b, 2)", "OSDN 340M (b, 3)"]


def test_the_same_weights_in_another_place_are_the_same_model(tmp_path):
    save_evaluation(tmp_path / "a", replace(identity("osdn-340m"), checkpoint="a"), {"piqa": 0.5})
    save_evaluation(tmp_path / "b", replace(identity("osdn-340m"), checkpoint="b"), {"fda": 0.5})
    assert [model.label for model in only(tmp_path).models] == ["OSDN 340M"]


def test_ablations_are_compared_with_the_baseline_of_their_size(tmp_path):
    for size, loss in (("tiny", 2.0), ("340m", 1.0)):
        base = identity(f"delta_net-{size}")
        ablation = replace(base, model=f"osdn-d0-{size}", preset=None, baseline=False, weights=size)
        save_evaluation(tmp_path, base, {"pg19_ppl": loss, "wikitext_ppl": 9.0, "lambada_ppl": 9.0})
        save_evaluation(tmp_path, ablation, {"pg19_ppl": loss, "wikitext_ppl": 9.0, "lambada_ppl": 4.0})
    save_evaluation(tmp_path, "kda-340m", {"pg19_ppl": 1.0})
    found = only(tmp_path)
    labels = [row.label for row in paper_table(found, ABLATIONS).rows if not row.faint]
    assert sorted(labels) == ["DeltaNet 340M", "DeltaNet tiny", "OSDN+D0 340M", "OSDN+D0 tiny"]
    changes = [model.scores["nll_change"].value for model in found.models if "nll_change" in model.scores]
    assert changes == [pytest.approx(math.log(6 / 9))] * 2


def test_markdown_and_latex_have_the_same_numbers(results):
    found = tables([only(results)])
    text = markdown(found)
    assert "| OSDN 340M | **0.200** ±0.030 | **0.300** | **0.400** | **0.300** |" in text
    assert "| *the paper's* | 0.044 | 0.227 | 0.383 | 0.218 |" in text
    source = latex(found)
    assert r"OSDN 340M & \textbf{0.200} {\tiny $\pm$ 0.030} & \textbf{0.300} & \textbf{0.400}" in source
    assert source.count(r"\begin{tabular}") == source.count(r"\end{tabular}") == len(found)
    for line in source.splitlines():
        assert line.startswith("%") or line.count("{") == line.count("}")
        assert line.isascii() or line.startswith("%")
    assert r"$\Delta$NLL $\downarrow$" in source


def test_all_files_are_written_and_the_csv_has_every_number(results, tmp_path):
    paths = write([only(results)], tmp_path / "out")
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


def test_the_command_prints_tables_and_reports_bad_paths(results, tmp_path):
    done = CliRunner().invoke(app, ["compare", str(results), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for text in ("Main results", "OSDN 340M", "the paper's", "ΔNLL", "compare.tex"):
        assert text in done.output
    assert "24.00" in done.output
    (tmp_path / "empty").mkdir()
    for path, message in (("nowhere", "does not exist"), ("empty", "there are no results here")):
        done = CliRunner().invoke(app, ["compare", str(tmp_path / path)])
        assert done.exit_code == 1
        assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: c["tasks"]["task"]["results"].update(fda="high"), "expected a number, got 'high'"),
        (lambda c: c.pop("tasks"), "'tasks' is missing"),
        (lambda c: c.pop("weights"), "'weights' is missing"),
        (lambda c: c.update(tasks=None), "NoneType"),
        (lambda c: c["tasks"]["task"].pop("data"), "'data' is missing"),
    ],
)
def test_a_malformed_file_is_reported_and_the_others_are_read(damage, reason, tmp_path):
    save_evaluation(tmp_path, "osdn-340m", {"fda": 0.25})
    broken = save_evaluation(tmp_path, "delta_net-340m", {"fda": 0.5})
    content = json.loads(broken.read_text())
    damage(content)
    broken.write_text(json.dumps(content))
    for command in (
        ["compare", "--output", str(tmp_path / "out")],
        ["report", "--output", str(tmp_path / "r.html")],
    ):
        done = CliRunner().invoke(app, [command[0], str(tmp_path), *command[1:]])
        assert done.exit_code == 0, done.output
        assert f"left out: {broken}" in done.output
        assert reason in done.output
    assert "0.250" in (tmp_path / "r.html").read_text()


def test_names_from_files_cannot_inject_terminal_codes(tmp_path):
    save_evaluation(tmp_path, replace(identity("mine"), model="a\x1b[2Jb"), {"fda": 0.25})
    done = CliRunner().invoke(app, ["compare", str(tmp_path), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert "\x1b[2J" not in done.output


def test_a_narrow_terminal_shows_every_model(tmp_path, monkeypatch):
    for variant in NINE:
        save_evaluation(tmp_path, f"{variant}-340m", {"piqa": 0.5 + len(variant) / 1000})
    for width in (40, 60, 200):
        monkeypatch.setattr(terminal, "console", Console(width=width))
        done = CliRunner().invoke(app, ["compare", str(tmp_path), "--output", str(tmp_path / "out")])
        shown = {f"0.{500 + len(variant)}" for variant in NINE}
        assert shown <= set(done.output.split())


def test_numbers_are_readable():
    assert number(0.12345, 3) == "0.123"
    assert number(0.12345, 3, True) == "+0.123"
    assert number(None, 3) == "–"
    assert number(123456789.0, 2) == "1.23e+08"


def test_the_newer_of_two_equal_measurements_counts(tmp_path):
    for folder, score, date in (("a", 0.5, "2026-02-01"), ("b", 0.25, "2026-01-01")):
        save_evaluation(tmp_path / folder, "osdn-340m", {"fda": score}, date=date)
    assert only(tmp_path).models[0].scores["fda"] == Score(0.5)


def test_averages_are_computed_from_the_newest_parts():
    stale = {"wikitext_ppl": Score(4.0), "lambada_ppl": Score(9.0), "lm_ppl": Score(100.0)}
    assert derive(stale)["lm_ppl"].value == pytest.approx(6.0)


def test_any_model_name_works_in_tables_and_figures(tmp_path):
    names = ["a$_$x", "_hidden", "p|q", "back\\slash {brace} ^~"]
    for name in names:
        save_evaluation(
            tmp_path, name, {"wikitext_ppl": 2.0, "lambada_ppl": 3.0} | dict.fromkeys(BUCKETS, 20.0)
        )
    paths = {path.name: path for path in write([only(tmp_path)], tmp_path / "out")}
    assert {"summary.svg", "pg19.svg"} <= paths.keys()
    assert r"p\|q" in paths["compare.md"].read_text()
    source = paths["compare.tex"].read_text()
    assert r"a\$\_\$x" in source
    assert r"back\textbackslash{}slash \{brace\} \^{}\~{}" in source
