"""Settings shared by all tests."""

import os

# Some virtual machines advertise AMX and trap on it; oneDNN reads this before its first matrix product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from hypothesis import settings

# Triton reads this when it is imported, which torch.compile may do long before the kernels are tested.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples every time, so that a new failure means a change in the code; no deadline, machines
# differ.
settings.register_profile("osdn", derandomize=True, deadline=None, database=None)
settings.load_profile("osdn")
