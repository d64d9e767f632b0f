"""The operators: phase 1 by three rules, phase 2 (`delta_rule`), and both in one pass.

The paper's rule is `precondition_keys` and `online_scaled_delta_rule`; Newton's method and the rule of
Preconditioned Gated DeltaNet stand beside it.
"""

from osdn.ops.operators import (
    available_backends,
    delta_rule,
    newton_delta_rule,
    newton_keys,
    online_scaled_delta_rule,
    pgdn_delta_rule,
    pgdn_keys,
    precondition_keys,
)

__all__ = [
    "available_backends",
    "delta_rule",
    "newton_delta_rule",
    "newton_keys",
    "online_scaled_delta_rule",
    "pgdn_delta_rule",
    "pgdn_keys",
    "precondition_keys",
]
