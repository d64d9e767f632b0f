"""The timings of `osdn bench`: contenders take turns in one process, so slow spells affect all of them."""
