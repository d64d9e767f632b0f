"""Training on `transformers.Trainer`: data, packing, settings, checkpoints and monitoring."""

from osdn.extras import require

require("osdn.training", "train", "transformers", "datasets", "accelerate", "pyarrow", "psutil", "yaml")
