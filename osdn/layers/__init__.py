"""Token mixers to build models from: `y, state = DeltaNet(...)(x, state)`."""

from osdn.layers.mixers import (
    DeltaNet,
    GatedDeltaNet,
    KimiDeltaAttention,
    MixerState,
    OperatorInputs,
    TokenMixer,
)
from osdn.layers.preconditioner import NewtonConfig, PGDNConfig, Preconditioner, PreconditionerConfig

__all__ = [
    "DeltaNet",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "MixerState",
    "NewtonConfig",
    "OperatorInputs",
    "PGDNConfig",
    "Preconditioner",
    "PreconditionerConfig",
    "TokenMixer",
]
