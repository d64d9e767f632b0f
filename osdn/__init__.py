"""Online Scaled DeltaNet: delta-rule operators, layers and models, with an online preconditioner.

Everything public is reachable from here and imported on first use: `import osdn` loads neither torch nor
transformers.  The Auto classes of transformers load our checkpoints once this package has been imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from osdn import auto_classes

if TYPE_CHECKING:
    from osdn import hosts, layers, models, ops
    from osdn.hosts import accelerate
    from osdn.layers import (
        DeltaNet,
        GatedDeltaNet,
        KimiDeltaAttention,
        MixerState,
        NewtonConfig,
        PGDNConfig,
        PreconditionerConfig,
    )
    from osdn.models import (
        PRESETS,
        OSDNConfig,
        OSDNForCausalLM,
        OSDNForSequenceClassification,
        OSDNForTokenClassification,
        OSDNModel,
        QuantizationConfig,
        describe_model,
        load_flash_linear_attention,
        save_flash_linear_attention,
    )
    from osdn.models import describe_model as describe
    from osdn.ops import (
        available_backends,
        delta_rule,
        newton_delta_rule,
        newton_keys,
        online_scaled_delta_rule,
        pgdn_delta_rule,
        pgdn_keys,
        precondition_keys,
    )

__version__ = "0.2.0"
__all__ = [
    "PRESETS",
    "DeltaNet",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "MixerState",
    "NewtonConfig",
    "OSDNConfig",
    "OSDNForCausalLM",
    "OSDNForSequenceClassification",
    "OSDNForTokenClassification",
    "OSDNModel",
    "PGDNConfig",
    "PreconditionerConfig",
    "QuantizationConfig",
    "accelerate",
    "available_backends",
    "delta_rule",
    "describe",
    "describe_model",
    "hosts",
    "layers",
    "load_flash_linear_attention",
    "models",
    "newton_delta_rule",
    "newton_keys",
    "online_scaled_delta_rule",
    "ops",
    "pgdn_delta_rule",
    "pgdn_keys",
    "precondition_keys",
    "save_flash_linear_attention",
]

_PACKAGES = ("ops", "layers", "hosts", "models")  # each imports only those before it


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"osdn.{name}")
    if name in __all__:
        for package in _PACKAGES:
            module = import_module(f"osdn.{package}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)  # so that the next access is an ordinary one
                return globals()[name]
    raise AttributeError(f"module 'osdn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


auto_classes.install()
