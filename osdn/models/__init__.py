"""The Hugging Face models; importing this package registers them with the Auto classes."""

from osdn.models.classification import OSDNForSequenceClassification, OSDNForTokenClassification
from osdn.models.configuration_osdn import OSDNConfig
from osdn.models.describe import describe
from osdn.models.interchange import load_flash_linear_attention, save_flash_linear_attention
from osdn.models.modeling_osdn import OSDNForCausalLM, OSDNModel
from osdn.models.presets import PRESETS
from osdn.models.quantization import QuantizationConfig
from osdn.models.registration import register

register()

__all__ = [
    "PRESETS",
    "OSDNConfig",
    "OSDNForCausalLM",
    "OSDNForSequenceClassification",
    "OSDNForTokenClassification",
    "OSDNModel",
    "QuantizationConfig",
    "describe",
    "load_flash_linear_attention",
    "save_flash_linear_attention",
]
