"""Small controlled experiments that run on a CPU in minutes: several seeds, the same batches, intervals."""

from osdn.extras import require

require("osdn.lab", "lab", "transformers", "datasets", "matplotlib")
