"""Registers our models where other packages look up model types."""

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from osdn.models.classification import OSDNForSequenceClassification, OSDNForTokenClassification
from osdn.models.configuration_osdn import AUTO_CLASSES, OSDNConfig
from osdn.models.modeling_osdn import OSDNForCausalLM, OSDNModel

MODELS = (OSDNModel, OSDNForCausalLM, OSDNForSequenceClassification, OSDNForTokenClassification)


def register() -> None:
    """Make the models known to `transformers`."""
    AutoConfig.register(OSDNConfig.model_type, OSDNConfig, exist_ok=True)
    auto_classes = {name: auto for auto, name in AUTO_CLASSES.items()}
    for model in MODELS:
        getattr(transformers, auto_classes[model.__name__]).register(OSDNConfig, model, exist_ok=True)
        # The pipelines and the server look up a checkpoint's class by name in `transformers`.
        setattr(transformers, model.__name__, model)
    # For label smoothing, `Trainer` shifts the labels only of models listed here.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[OSDNConfig.model_type] = OSDNForCausalLM.__name__
