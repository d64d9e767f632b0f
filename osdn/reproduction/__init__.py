"""The paper's tables, measured at a size that a laptop can afford, with seeds and intervals."""
