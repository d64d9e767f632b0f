"""The Hugging Face models; importing this package registers them with the Auto classes."""

from osdn.extras import require

require("osdn.models", "models", "transformers")

from osdn.models.classification import OSDNForSequenceClassification, OSDNForTokenClassification
from osdn.models.configuration_osdn import OSDNConfig
from osdn.models.describe import describe_model
from osdn.models.describe import describe_model as describe  # its name before 0.2
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
    "describe_model",
    "load_flash_linear_attention",
    "save_flash_linear_attention",
]
