"""Where other packages look for a model type: what they need to find ours there."""

import sys

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from osdn.models.classification import OSDNForSequenceClassification, OSDNForTokenClassification
from osdn.models.configuration_osdn import OSDNConfig
from osdn.models.modeling_osdn import OSDNForCausalLM, OSDNModel

AUTO_CLASSES = {
    AutoModel: OSDNModel,
    AutoModelForCausalLM: OSDNForCausalLM,
    AutoModelForSequenceClassification: OSDNForSequenceClassification,
    AutoModelForTokenClassification: OSDNForTokenClassification,
}


def register() -> None:
    """Make the models known to `transformers`."""
    AutoConfig.register(OSDNConfig.model_type, OSDNConfig, exist_ok=True)
    for auto_class, model_class in AUTO_CLASSES.items():
        auto_class.register(OSDNConfig, model_class, exist_ok=True)
        # The pipelines and the server find a checkpoint's class by its name in `transformers`.
        setattr(transformers, model_class.__name__, model_class)
    # `Trainer` shifts the labels that it smooths only for models that it finds by name here.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[OSDNConfig.model_type] = OSDNForCausalLM.__name__


def register_lora_targets() -> None:
    """Tell PEFT, if it is in use, what `LoraConfig(task_type="CAUSAL_LM")` adapts: a mixer's projections."""
    if "peft" in sys.modules:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

        TARGETS.setdefault(OSDNConfig.model_type, ["q_proj", "k_proj", "v_proj", "o_proj"])
