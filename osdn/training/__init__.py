"""Training on `transformers.Trainer`: data, packing, settings, checkpoints and what is seen while it runs."""
