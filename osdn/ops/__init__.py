"""The operators: phase 1 (`precondition_keys`), phase 2 (`delta_rule`), and both in one pass."""

from osdn.ops.operators import (
    available_backends,
    delta_rule,
    online_scaled_delta_rule,
    precondition_keys,
)

__all__ = ["available_backends", "delta_rule", "online_scaled_delta_rule", "precondition_keys"]
