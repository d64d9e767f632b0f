"""Timings behind `osdn bench`: contenders take turns in one process, so that a slow spell hits them all."""

from osdn.extras import require

require("osdn.benchmarks", "lab", "transformers", "matplotlib")
