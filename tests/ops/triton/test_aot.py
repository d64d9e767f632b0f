"""Every kernel compiles for GPUs that are not here, and fits them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from osdn.ops.triton import aot, launch

ROOT = Path(__file__).parents[3]


def run(*command):
    """In a process of its own: this one may hold interpreted kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_every_kernel_fits_an_h100():
    done = run("-m", "osdn.ops.triton.aot", "--gpu", "sm_90", "--decay", "channel", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("sm_90 ")}
    assert compiled == {name.split(" of ")[0] for name in launch.TABLE}


@pytest.mark.slow
def test_every_kernel_variant_and_row_of_the_table_fits_every_gpu():
    done = run("-m", "osdn.ops.triton.aot")
    assert done.returncode == 0, done.stdout + done.stderr
    for gpu in ("sm_80", "sm_90", "sm_100", "gfx942"):
        assert f"\n{gpu} " in done.stdout


def test_a_kernel_that_spills_fails_the_report():
    """The report must be able to fail: a block sixteen times the table's cannot stay in registers."""
    program = """
import sys
from osdn.ops.triton import aot, launch
launch.TABLE["scale_keys_kernel"] = {"": [{"BK": 128, "num_warps": 1, "num_stages": 1}]}
launches = aot.launches
aot.launches = lambda *x: [l for l in launches(*x) if l.kernel.__name__ == "scale_keys_kernel"]
sys.argv = ["aot", "--gpu", "sm_80", "--decay", "none"]
aot.main()
"""
    done = run("-c", program)
    assert done.returncode != 0
    assert "does not fit" in done.stdout
    assert "spill or do not fit" in done.stderr


def test_the_interpreter_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["aot"])
    with pytest.raises(SystemExit):
        aot.main()
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err
