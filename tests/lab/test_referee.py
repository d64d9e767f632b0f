"""The protocol: separate tuning and judging, equal batches, comparisons with the tuned plain rule."""

import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from osdn.cli import app
from osdn.lab import referee, runner
from osdn.lab.recall import RecallTask
from osdn.lab.referee import BUDGETS, Protocol, Trial

TASK = RecallTask(vocab_size=24, pairs=3, length=21, passes=2, evaluation=7)
TRIAL = Trial("small", TASK, steps=8, batch=2)
SMALL = Protocol((TRIAL,), ("delta_net", "osdn", "osdn-newton"), (0.01,), (None, -2.0), seeds=2, width=16)


def test_every_contestant_has_the_same_grid_and_the_judged_seeds_are_fresh():
    protocol = Protocol()
    for trial, contestant in protocol.cells():
        grid = protocol.tuning(trial, contestant)
        points = [(runs[0].learning_rate, runs[0].variant.beta_bias) for runs in grid]
        assert points == [(0.005, None), (0.005, -2), (0.01, None), (0.01, -2)]
        assert {run.seed for runs in grid for run in runs} == {1000, 1001}
        assert {run.steps for runs in grid for run in runs} == {trial.steps // 2}
        judged = protocol.judging(trial, grid[1][0])
        assert [run.seed for run in judged] == list(range(6))
        assert {(run.learning_rate, run.variant.beta_bias) for run in judged} == {points[1]}
        assert {(run.steps, run.budgets) for run in judged} == {(trial.steps, BUDGETS)}
        assert {run.variant.write_scale for run in judged} == {trial.write_scale}


def test_all_contestants_can_be_built_and_have_a_baseline():
    protocol = Protocol()
    baselines = {name: protocol.baseline(name) for name in protocol.contestants}
    assert set(baselines.values()) == {"delta_net", "gdn", "kda"}
    assert baselines["osdn-newton+block-8"] == "delta_net"
    assert baselines["gdn+pgdn"] == "gdn"
    for trial in protocol.trials[:1]:
        for name in protocol.contestants:
            protocol.tuning(trial, name)[0][0].variant.config(protocol.width)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"contestants": ("osdn",)}, "osdn cannot be judged without delta_net"),
        ({"seeds": 1}, "seeds is 1"),
        ({"tuning_seeds": (1,)}, "tuning_seeds"),
        ({"contestants": ("delta_net", "osdm")}, "there is no variant 'osdm'"),
    ],
)
def test_unfair_protocols_are_rejected(settings, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        replace(SMALL, **settings)


def results_of(monkeypatch, scores):
    """Results whose accuracy is looked up by contestant, bias and seed."""

    def look_up(run, folder):
        return {"accuracy": scores[run.variant.beta_bias, run.seed]}

    monkeypatch.setattr(referee, "read_result", look_up)


def test_tuning_chooses_the_best_mean_over_its_seeds(monkeypatch, tmp_path):
    protocol = replace(SMALL, tuning_seeds=(7, 8))
    grid = protocol.tuning(TRIAL, "osdn")
    results_of(monkeypatch, {(None, 7): 0.9, (None, 8): 0.1, (-2, 7): 0.6, (-2, 8): 0.5})
    assert referee.choose(TRIAL, grid, tmp_path).variant.beta_bias == -2
    loss = replace(TRIAL, lower_is_better=True)
    assert referee.choose(loss, grid, tmp_path).variant.beta_bias is None
    results_of(monkeypatch, {(None, 7): 0.9, (None, 8): float("nan"), (-2, 7): 0.1, (-2, 8): 0.1})
    assert referee.choose(loss, grid, tmp_path).variant.beta_bias == -2  # not a number loses


def outcome(**values):
    """Results by contestant: for each seed, the accuracies at the three budgets."""
    return {
        ("small", name): [{"budgets": [{"accuracy": x} for x in seed]} for seed in seeds]
        for name, seeds in values.items()
    }


def test_differences_are_paired_by_seed_to_the_tuned_plain_rule_at_each_budget():
    protocol = replace(SMALL, contestants=("delta_net", "osdn"))
    found = outcome(delta_net=[(0.1, 0.2, 0.5), (0.2, 0.3, 0.7)], osdn=[(0.3, 0.2, 0.4), (0.4, 0.5, 0.7)])
    rows = {(r["contestant"], r["budget"]): r for r in referee.judge(protocol, found)}
    assert rows["delta_net", 1.0]["difference"] is None
    means = [rows["osdn", budget]["difference"]["mean"] for budget in BUDGETS]
    assert means == pytest.approx([0.2, 0.1, -0.05])
    worse = replace(protocol, trials=(replace(TRIAL, lower_is_better=True),))
    rows = {(r["contestant"], r["budget"]): r for r in referee.judge(worse, found)}
    assert rows["osdn", 1.0]["difference"]["mean"] == pytest.approx(0.05)  # a lower loss is better


def test_the_correction_counts_all_comparisons_at_a_budget():
    values = {
        "delta_net": [(0.5, 0.5, 0.5), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)],
        "osdn": [(0.5, 0.5, 0.60), (0.5, 0.5, 0.61), (0.5, 0.5, 0.62)],
        "osdn-newton": [(0.5, 0.5, 0.4), (0.5, 0.5, 0.6), (0.5, 0.5, 0.5)],
    }
    rows = {
        (r["contestant"], r["budget"]): r for r in referee.judge(replace(SMALL, seeds=3), outcome(**values))
    }
    sure, unsure = rows["osdn", 1.0], rows["osdn-newton", 1.0]
    assert sure["adjusted"] == pytest.approx(2 * sure["t_p"])
    assert unsure["adjusted"] == pytest.approx(1.0)
    assert rows["osdn", 0.25]["adjusted"] == 1


def run(protocol, folder):
    with runner.progress_bar(Console(quiet=True)) as progress:
        return referee.run_referee(protocol, folder, progress, 2), progress.tasks[0]


def test_the_referee_runs_and_resumes_and_its_files_are_small(tmp_path, monkeypatch):
    content, bar = run(SMALL, tmp_path)
    assert bar.completed == pytest.approx(bar.total)
    files = list(tmp_path.glob("*-seed*.json"))
    assert len(files) == 3 * (2 * 2 + 2)  # contestants, by grid and tuning seeds, and judged seeds
    assert max(path.stat().st_size for path in files) < 6000
    assert len(content["rows"]) == 3 * 3
    assert {row["contestant"] for row in content["writes"] if row["beta"] > 0} == set(SMALL.contestants)
    assert referee.planned(SMALL, tmp_path) == [(TRIAL, [])]

    lost = next(path for path in files if "seed1-" in path.name)
    lost.unlink()
    assert [len(runs) for _, runs in referee.planned(SMALL, tmp_path)] == [1]
    again, _ = run(SMALL, tmp_path)
    assert again == content
    assert lost.exists()


def test_a_quick_referee_is_a_subset_of_the_full_one():
    full = referee.with_tasks(Protocol(), ())
    names = {trial.name for trial in full.trials}
    assert set(referee.QUICK) < names
    assert not set(referee.LEFT_OUT) & names
    assert names | set(referee.LEFT_OUT) == {trial.name for trial in Protocol().trials}
    quick = referee.quick(replace(full, contestants=referee.QUICK_CONTESTANTS))
    assert {quick.baseline(name) for name in quick.contestants} == {"delta_net", "gdn", "kda"}
    assert quick.seeds == 6
    assert all(a.steps < b.steps for a, b in zip(quick.trials, full.trials))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(referee, "TRIALS", (TRIAL,))


def test_a_dry_run_lists_the_runs_and_trains_none(small, tmp_path):
    options = ["lab", "referee", "--contestants", "delta_net", "osdn", "--seeds", "3", "--dry-run"]
    result = CliRunner().invoke(app, [*options, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert re.search(r"together\s+22\s", result.output)  # 2 contestants, 4 points of 2 seeds, 3 seeds
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_page_and_prints_the_findings(small, tmp_path):
    options = ["lab", "referee", "--contestants", "delta_net", "osdn", "--seeds", "2", "--jobs", "2"]
    result = CliRunner().invoke(app, [*options, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "nothing beats the tuned plain delta rule" in result.output.replace("\n", " ")
    assert json.loads((tmp_path / "referee.json").read_text())["kind"] == "referee"
    assert "nothing beats" in (tmp_path / "referee.html").read_text()


def test_unknown_tasks_are_rejected(tmp_path):
    result = CliRunner().invoke(app, ["lab", "referee", "--tasks", "chess", "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "unknown task chess; choose from capacity" in result.output.replace("\n", " ")
