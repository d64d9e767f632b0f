"""Whether bfloat16 works on this CPU, and whether it pays.

Some virtual machines advertise AMX, which oneDNN then uses for bfloat16 products, and trap on its first
instruction: the process dies.  A trial in another process tells, and oneDNN is then kept from AMX.
"""

import logging
import os
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import torch
from torch import nn

logger = logging.getLogger(__name__)

CPU_FLAGS = Path("/proc/cpuinfo")
TRIAL = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); assert (x @ x)[0, 0] == 64"
WITHOUT_AMX = "AVX512_CORE_BF16"
WORTHWHILE = 1.1  # times the speed of float32
SECONDS = 2.0  # that the measurement may take


@cache
def avoid_broken_amx() -> None:
    """Keep oneDNN from AMX where AMX kills a process; call this before the first product in bfloat16."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not _advertises_amx():
        return
    trial = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, check=False)
    if trial.returncode < 0:
        logger.warning("this machine advertises AMX and does not have it; bfloat16 does without")
        os.environ["ONEDNN_MAX_CPU_ISA"] = WITHOUT_AMX


def _advertises_amx() -> bool:
    try:
        return "amx_bf16" in CPU_FLAGS.read_text(encoding="ascii")
    except OSError:  # not Linux
        return False


def speedup(module: nn.Module, x: torch.Tensor, seconds: float = SECONDS) -> float:
    """How many times as fast a module is under bfloat16 autocast, forward and backward, measured in turns."""
    avoid_broken_amx()
    x = x.detach().requires_grad_()

    def run(half: bool) -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            y = module(x)
        y.sum().backward()
        return time.perf_counter() - start

    for half in (False, True):  # what is slow only once
        run(half)
    ratios, start = list[float](), time.perf_counter()
    while time.perf_counter() - start < seconds or not ratios:
        ratios.append(run(False) / run(True))
    module.zero_grad(set_to_none=True)
    return statistics.median(ratios)
