"""The precision chosen for a CPU, and that AMX which is advertised but broken kills nothing."""

import os

import pytest
import torch
from torch import nn

from osdn import bfloat16


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    bfloat16.avoid_broken_amx.cache_clear()
    yield
    bfloat16.avoid_broken_amx.cache_clear()


def advertise(monkeypatch, tmp_path, flags):
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}\n")
    monkeypatch.setattr(bfloat16, "CPU_FLAGS", tmp_path / "cpuinfo")


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("flags", "trial", "limit"),
    [
        ("amx_tile amx_bf16", "import os, signal; os.kill(os.getpid(), signal.SIGILL)", "AVX512_CORE_BF16"),
        ("amx_tile amx_bf16", "pass", None),
        ("avx512_bf16", "import os, signal; os.kill(os.getpid(), signal.SIGILL)", None),
    ],
    ids=["advertised and trapping", "working", "not advertised"],
)
def test_amx_is_avoided_where_it_kills_a_process(monkeypatch, tmp_path, flags, trial, limit):
    advertise(monkeypatch, tmp_path, flags)
    monkeypatch.setattr(bfloat16, "TRIAL", trial)
    bfloat16.avoid_broken_amx()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == limit


@pytest.mark.usefixtures("environment")
def test_the_users_choice_is_respected(monkeypatch, tmp_path):
    advertise(monkeypatch, tmp_path, "amx_bf16")
    monkeypatch.setattr(bfloat16, "TRIAL", "import os; os.abort()")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    bfloat16.avoid_broken_amx()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"


def test_the_trial_passes_on_this_machine():
    exec(bfloat16.TRIAL, {})


def test_both_precisions_are_timed_and_no_gradient_is_left():
    module = nn.Linear(16, 16)
    seen = []
    module.register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    assert bfloat16.speedup(module, torch.ones(3, 16), seconds=0) > 0
    assert set(seen) == {torch.float32, torch.bfloat16}
    assert module.weight.grad is None
