"""The timings of `osdn bench`: contenders take turns in one process, so slow spells affect all of them."""

from osdn.extras import require

require("osdn.benchmarks", "lab", "transformers", "matplotlib")
