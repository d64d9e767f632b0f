"""Small controlled experiments that run on a CPU in minutes: several seeds, matched data order, intervals."""
