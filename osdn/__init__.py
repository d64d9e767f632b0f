"""Online Scaled DeltaNet: the delta rule with an online, provable preconditioner.

Importing this package registers its models with the Auto classes of `transformers`.
"""

from osdn.hosts import accelerate
from osdn.models import (
    PRESETS,
    OSDNConfig,
    OSDNForCausalLM,
    OSDNForSequenceClassification,
    OSDNForTokenClassification,
    OSDNModel,
    QuantizationConfig,
    describe,
    load_flash_linear_attention,
    save_flash_linear_attention,
)

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "OSDNConfig",
    "OSDNForCausalLM",
    "OSDNForSequenceClassification",
    "OSDNForTokenClassification",
    "OSDNModel",
    "QuantizationConfig",
    "accelerate",
    "describe",
    "load_flash_linear_attention",
    "save_flash_linear_attention",
]
