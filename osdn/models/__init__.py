"""The Hugging Face models; importing this registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from osdn.models.configuration_osdn import OSDNConfig
from osdn.models.describe import describe
from osdn.models.interchange import load_flash_linear_attention, save_flash_linear_attention
from osdn.models.modeling_osdn import OSDNForCausalLM, OSDNModel
from osdn.models.presets import PRESETS

AutoConfig.register("osdn", OSDNConfig, exist_ok=True)
AutoModel.register(OSDNConfig, OSDNModel, exist_ok=True)
AutoModelForCausalLM.register(OSDNConfig, OSDNForCausalLM, exist_ok=True)
# `Trainer` shifts the labels it smooths only for models that it finds by name here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["osdn"] = OSDNForCausalLM.__name__

__all__ = [
    "PRESETS",
    "OSDNConfig",
    "OSDNForCausalLM",
    "OSDNModel",
    "describe",
    "load_flash_linear_attention",
    "save_flash_linear_attention",
]
