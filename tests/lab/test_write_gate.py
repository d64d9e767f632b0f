"""The write-gate study: one change at a time, resuming from files, conclusions that follow the numbers."""

import json
import re
from itertools import product
from pathlib import Path

from typer.testing import CliRunner

from osdn.cli import app
from osdn.lab import runner, write_gate
from osdn.lab.recall import RecallTask
from osdn.lab.write_gate import BIASES, SETTINGS, Setting, Study
from osdn.results.gate_page import gate_table, gate_verdicts
from osdn.results.report import write_report
from osdn.results.store import read_results

TASK = RecallTask(vocab_size=24, pairs=3, length=21, passes=2, evaluation=7)
SMALL = tuple(
    Setting(f"recall, {change}", TASK, 8, 2, width=16, heads=heads, group="recall", change=change)
    for change, heads in (("base", 2), ("4 key channels", 4))
)


def test_every_setting_differs_from_its_base_in_one_thing():
    for task in ("text", "recall"):
        base, *others = [s for s in SETTINGS if s.group == task]
        assert base.change == "base"
        sizes = {(s.width, s.width // s.heads, s.task.length) for s in (base, *others)}
        assert len(sizes) == 7
        for s in others:
            changed = [
                s.width != base.width,
                s.width // s.heads != base.width // base.heads,
                s.task.length != base.task.length,
            ]
            assert sum(changed) == 1
        assert {s.width for s in (base, *others)} == {32, 64, 128}
        assert {s.width // s.heads for s in (base, *others)} == {16, 32, 64}


def test_biases_are_compared_on_the_same_seeds_and_their_runs_have_different_names():
    study = Study()
    runs = [run for mine in study.all_runs().values() for run in mine]
    assert len(runs) == len(SETTINGS) * len(BIASES) * 6
    assert len({runner.file_of(run, Path()) for run in runs}) == len(runs)
    for (setting, _), mine in study.all_runs().items():
        assert [run.seed for run in mine] == list(range(6))
        config = mine[0].variant.config(mine[0].width)
        assert (config.num_heads, config.head_k_dim) == (setting.heads, setting.width // setting.heads)


def content(effects):
    """A result in which the given (change, bias, budget) have a significant mean gain."""
    rows = []
    for budget in (0.25, 0.5, 1.0):
        for setting, name in product(SMALL, Study(SMALL).contestants):
            mean, adjusted = effects.get((setting.change, name, budget), (0.0, 1.0))
            gain = {"mean": mean, "low": mean - 0.02, "high": mean + 0.02, "seeds": 6, "p_value": 0.03}
            row = {"trial": setting.name, "contestant": name, "baseline": "delta_net", "budget": budget}
            row |= {"value": {"mean": 0.5}, "difference": None if name == "delta_net" else gain}
            rows.append(row | {"t_p": adjusted, "adjusted": adjusted})
    return {"kind": "write-gate", "trials": [s.record() for s in SMALL], "rows": rows, "writes": []}


def test_the_verdict_says_where_the_gain_holds_and_where_it_fades():
    found = gate_verdicts(
        content(
            {
                ("base", "delta_net bias=-2", 0.25): (0.3, 0.01),
                ("base", "delta_net bias=-2", 1.0): (0.1, 0.01),
                ("4 key channels", "delta_net bias=-4", 1.0): (-0.2, 0.01),
            }
        )
    )
    assert [words.partition(":")[0] for words in found] == [
        f"Recall, a bias that starts at {start}" for start in ("0", "-2", "-4")
    ]
    assert "better in 0 of 2 settings; on average +0.000" in found[0]
    assert "better in 1 of 2 settings, not significant after the correction in 4 key channels" in found[1]
    assert "+0.150 after a quarter of the budget, +0.050 after the full budget" in found[1]
    assert "better in 0 of 2 settings, worse in 1 (4 key channels (-0.200" in found[2]


def test_the_table_has_one_column_per_setting():
    table = gate_table(content({("base", "delta_net bias=-2", 1.0): (0.1, 0.01)}), "recall", 1.0)
    assert list(table.head) == ["base", "4 key channels"]
    assert table.rows[0].label == "DeltaNet (plain)"
    assert table.rows[2].cells[0].text == "★ +0.100"


def test_the_command_estimates_runs_resumes_and_appears_in_the_report(monkeypatch, tmp_path):
    study = Study(SMALL[1:], seeds=2)
    monkeypatch.setattr(write_gate, "Study", lambda seeds: study)

    def invoke(*more):
        options = ["lab", "write-gate", "--seeds", "2", "--jobs", "2", "--output", str(tmp_path), *more]
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 0, result.output
        return result.output.replace("\n", " ")

    assert re.search(r"together\s+8\s", invoke("--dry-run"))  # 4 starts, 2 seeds
    assert not list(tmp_path.iterdir())
    assert "a bias that starts at -2: better in" in invoke()
    file = tmp_path / "write-gate.json"
    content = json.loads(file.read_text())
    lost = study.runs(study.trials[0], "delta_net bias=-2")[1]
    packed = runner._packed(tmp_path)
    (tmp_path / runner.PACKED).unlink()
    for name, run in packed.items():
        if name != runner.file_of(lost, tmp_path).name:
            (tmp_path / name).write_text(json.dumps(run))
    assert sum(len(runs) for _, runs in write_gate.planned(study, tmp_path)) == 1
    invoke()
    assert json.loads(file.read_text())["rows"] == content["rows"]
    page = (tmp_path / "write-gate.html").read_text()
    for words in ("4 key channels", "DeltaNet bias=-4", "Recall, after a quarter of the budget", "<svg"):
        assert words in page
    report = write_report(read_results([tmp_path]), tmp_path / "report.html").read_text()
    assert "The start of the write gate: Recall, a bias that starts at 0: better in" in report
    assert "Recall, after the full budget" in report
