"""Training on `transformers.Trainer`: data, packing, settings, checkpoints and monitoring."""
