"""Analysis of models and of the theory: residual ratios, and the paper's statements checked numerically."""

from osdn.extras import require

require("osdn.analysis", "lab", "transformers", "matplotlib")
