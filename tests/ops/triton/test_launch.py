"""What is launched, and what it costs."""

from pathlib import Path

import pytest
import torch

from osdn.ops import online_scaled_delta_rule
from osdn.ops.checks import Scaling
from osdn.ops.triton import decode, launch, phase1, phase1_backward, phase2, phase2_backward, roofline
from osdn.ops.triton.chunks import Chunks
from tests.ops.problems import Config, make
from tests.ops.triton.device import kernels


@pytest.mark.parametrize(
    "gpu", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100"]
)
def test_every_gpu_finds_a_row_for_every_kernel(gpu):
    for kernel in launch.TABLE:
        for decay in (0, 2):
            for row in launch._rows(kernel.split(" of ")[0], decay, gpu):
                assert row["num_warps"] in (1, 2, 4, 8)


def test_blocks_shrink_with_what_they_cover_and_as_keys_grow():
    row = {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 2}
    assert launch._fit(row, {"K": 128, "V": 128}, 2) == row
    assert launch._fit(row, {"K": 5, "V": 40}, 2) == {**row, "BK": 16, "BV": 64}
    assert launch._fit(row, {"K": 256, "V": 256}, 4) == {"BK": 16, "BV": 16, "num_warps": 8, "num_stages": 1}


def test_autotuning_tries_the_rows_of_the_table():
    from osdn.ops.triton.phase2 import scan_kernel

    rows = launch._rows("scan_kernel", 0, "sm_90")
    tuner = launch._autotuned(scan_kernel, tuple(tuple(row.items()) for row in rows))
    tried = [{**c.kwargs, "num_warps": c.num_warps, "num_stages": c.num_stages} for c in tuner.configs]
    assert tried == rows
    assert len(tried) > 1
    assert {"K", "V", "HV"} <= set(tuner.keys)


def test_grids_stay_within_what_gpus_launch(monkeypatch):
    """A batch of 70,000 sequences: only a grid's first axis may be longer than 65,535."""
    grids = {}

    def run(kernel, grid, like, sizes, **arguments):
        grids[kernel.__name__] = grid({"BK": 16, "BV": 16})

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(phase1, "PARALLEL_FROM", 1)
    q = torch.empty(70_000, 1, 1, 40, device="meta")
    at = Chunks(*(q.new_empty(n, dtype=torch.int32) for n in (70_000, 70_001, 70_001)), longest=1, size=64)
    beta = q[..., 0]
    settings = Scaling(0.003, (0.5, 2.0), True, 1e-6)
    for g in (None, q):
        inputs = phase2.Inputs(q, q, q, beta, q, g, None, at)
        phase2.forward(inputs, 1.0)
        phase2_backward.backward(inputs, 1.0, q, None, plain=False)
    for retention in (1.0, beta):
        scaling = phase1.Inputs(q, beta, retention, None, settings, at)
        phase1_backward.backward(scaling, phase1.forward(scaling)[2], q, None)
    decode.forward(inputs, None, 1.0)
    assert grids.keys() == {name.split(" of ")[0] for name in launch.TABLE}
    assert all(max(grid[1:]) <= 65_535 for grid in grids.values())
    assert grids["scan_kernel"][0] == grids["recurrent_kernel"][0] == 3 * 70_000


@pytest.mark.parametrize(("decay", "code"), [("none", 0), ("head", 1), ("channel", 2)])
def test_the_roofline_counts_the_products_that_are_made(tensor_cores, monkeypatch, decay, code):
    """One chunk and head, forward and backward, which makes the forward's again but for its outputs."""
    monkeypatch.setattr(phase1, "PARALLEL_FROM", 1)
    K, V = 64, 32
    config = Config((64,), H=1, K=K, V=V, decay=decay)
    kernels(online_scaled_delta_rule, make(config), torch.float16)
    launched = ["gram_kernel", "solve_kernel", "scan_kernel", "system_kernel"] * 2
    launched += ["read_kernel", "scan_back_kernel", "errors_back_kernel", "keys_back_kernel"]
    counted = [roofline.products(name, K, V, code) for name in launched]
    assert tensor_cores == {"operands": sum(c[0] for c in counted), "floats": sum(c[1] for c in counted)}


def test_the_roofline_counts_the_bytes_of_the_arguments():
    """Phase 1 by tokens reads keys, betas and retentions, and writes write keys, checkpoints and a scale."""
    B, T, H, K = 2, 128, 3, 64
    (first,), _ = roofline.costs(B, T, H, K, 16, "none", retention=True)
    assert first.kernel == "precondition_kernel"
    tables = 4 * 2 * (B * 2) + 4 * (B + 1)
    checkpoints = 4 * (T * B // 64 + B) * H * K
    assert first.bytes == 2 * 2 * B * T * H * K + 2 * 2 * B * T * H + checkpoints + 4 * B * H * K + tables
    assert first.depth == T
    by_chunks, second = roofline.costs(B, 256, H, K, 16, "none")
    assert [c.kernel for c in by_chunks] == ["system_kernel", "scale_scan_kernel", "scale_keys_kernel"]
    assert [c.depth for c in by_chunks] == [1, 4, 1]
    assert all(c.seconds >= c.bytes / roofline.BANDWIDTH for c in second)


def test_the_page_shows_what_the_roofline_prints():
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    assert roofline.table(1, 65536, 8, 128, 128, "none") in page
    assert roofline.shares(1, 65536, 8, 128, 128) in page
