"""The paper's benchmarks for any causal model: `osdn eval` runs them, `osdn compare` tabulates results."""

from osdn.extras import require

require("osdn.evaluation", "eval", "transformers", "datasets", "psutil")
