"""`osdn bench ops --device cuda`: what it says without a GPU, and that its contenders compute the same."""

import sys
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from osdn.benchmarks import gpu as bench_gpu
from osdn.benchmarks.ops import Workload, on_cpu
from osdn.cli import app
from osdn.ops import delta_rule
from tests.ops.problems import relative_error
from tests.ops.triton.device import DEVICE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends():
    result = CliRunner().invoke(app, ["bench", "ops", "--device", "cuda"])
    assert result.exit_code == 0
    assert (
        result.output == "nothing was measured: there is no CUDA or ROCm device, or triton is not installed\n"
    )


def test_another_device_is_refused():
    result = CliRunner().invoke(app, ["bench", "ops", "--device", "tpu"])
    assert result.exit_code == 1
    assert "device is 'tpu'; it must be cpu, cuda" in result.output


@pytest.fixture
def peer(monkeypatch):
    """Modules with the names and keywords of flash-linear-attention, which runs on no CPU."""

    def plain(q, k, v, beta, scale=None, initial_state=None, output_final_state=False):
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        return delta_rule(q, k, v, beta, scale=scale, **states, backend="reference")

    def gated(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        return delta_rule(q, k, v, beta, log_decay=g, scale=scale, **states, backend="reference")

    for rule, function in (("delta_rule", plain), ("gated_delta_rule", gated), ("kda", gated)):
        module = ModuleType(f"fla.ops.{rule}")
        for form in ("chunk", "fused_recurrent"):
            setattr(module, f"{form}_{rule}", function)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_contenders_compute_the_same(peer):
    p = Workload(1, 20, 1, 16, 12, DEVICE)
    found = {name: f(*p.inputs) for name, f in bench_gpu.contenders(p).items()}
    one = Workload(1, 1, 1, 16, 12, DEVICE)
    decoded = {name: call()[0] for name, call in bench_gpu.decoding(one).items()}
    for name in ("delta_net", "gdn", "kda"):
        for other in ("chunkwise", "fla"):
            assert relative_error(found[f"{name}, triton"], found[f"{name}, {other}"]) < 1e-5
        assert relative_error(decoded[f"{name}, triton"], decoded[f"{name}, fla"]) < 1e-5
        online = bench_gpu.ONLINE[name]
        assert relative_error(decoded[f"{online}, triton"], decoded[f"{online}, triton, in place"]) < 1e-6


def test_every_variant_is_timed_next_to_what_is_implied():
    """One call each instead of ten, as there is no GPU to fill."""
    tables = bench_gpu.measure(Workload(1, 20, 1, 16, 12, DEVICE), 1, lambda call, repeat: on_cpu(call, 1))
    where = "B=1 T=20 H=1 K=16 V=12, float32"
    assert [table["title"] for table in tables] == [f"forward, {where}", f"forward and backward, {where}"]
    for table in tables:
        ours = {name: row for name, row in table["ms"].items() if name.endswith(", triton")}
        assert len(ours) == 7
        assert all(row["min"] > row["implied"] > 0 for row in ours.values())
    forward, both = (table["ms"]["osdn, triton"]["implied"] for table in tables)
    assert both > 2 * forward
    assert forward > tables[0]["ms"]["delta_net, triton"]["implied"]
