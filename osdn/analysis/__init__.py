"""Looking into models and their theory: residual ratios, the paper's statements, tables and figures."""

from osdn.extras import require

require("osdn.analysis", "lab", "transformers", "matplotlib")
