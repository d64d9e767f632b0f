"""Small controlled experiments that run on a CPU in minutes: several seeds, the same batches, intervals."""
