"""Two processes give the same results as one."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from osdn.evaluation.processes import ALONE
from tests.evaluation.mirror import prose, write_mirror

SUITES = ["ppl", "recall", "commonsense", "pg19"]  # every kind of request, and the measures lm_eval lacks


def evaluate(launcher, checkpoint, mirror, output):
    """What two commands print, and the results: prompts are truncated, and the blocks of pg19 cannot be."""
    command = [sys.executable, "-m", *launcher, "osdn", "eval", checkpoint, "--output", output]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    printed = []
    for options in (
        ["--suite", *SUITES[:-1], "--data-dir", mirror, "--max-length", "400"],
        ["--suite", "pg19", "--books", mirror / "books"],
    ):
        run = subprocess.run(
            [*command, *options], capture_output=True, text=True, env=environment, timeout=600, check=False
        )
        assert run.returncode == 0, run.stderr[-3000:]
        printed.append(run.stdout)
    return printed, {suite: json.loads((output / f"{suite}.json").read_text()) for suite in SUITES}


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(osdn, tmp_path):
    mirror = write_mirror(tmp_path / "mirror", rows=5)  # not a multiple of two
    (mirror / "books").mkdir()
    for i in range(3):
        (mirror / "books" / f"{i}.txt").write_text(prose(i, 20_600 * (1 + i % 2)))
    _, alone = evaluate([], osdn, mirror, tmp_path / "one")
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m"]
    printed, together = evaluate(launch, osdn, mirror, tmp_path / "two")
    assert [text.count("results are in") for text in printed] == [1, 1]  # only the first process prints
    for suite in SUITES:
        assert together[suite]["results"] == pytest.approx(alone[suite]["results"], rel=1e-5), suite
        assert together[suite]["errors"].keys() == alone[suite]["errors"].keys()
        for name, entry in alone[suite]["tasks"].items():
            other = together[suite]["tasks"][name]
            for field in ("documents", "truncated", "data", "protocol"):
                assert other.get(field) == entry.get(field), (suite, name, field)
            for column, values in entry.get("by_document", {}).items():
                np.testing.assert_allclose(other["by_document"][column], values, rtol=1e-5)


def test_a_single_process_gets_everything():
    assert list(ALONE.share(range(5))) == ALONE.gather([0, 1, 2, 3, 4]) == [0, 1, 2, 3, 4]
    assert ALONE.total(3) == 3
    assert ALONE.device("cuda") == "cuda"
