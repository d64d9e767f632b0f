"""The modules that PEFT adapts in our models by default."""

import sys

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def register_lora_targets(model_type: str) -> None:
    """Tell PEFT, if it is imported, that `LoraConfig(task_type="CAUSAL_LM")` adapts a mixer's projections."""
    if "peft" in sys.modules:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

        TARGETS.setdefault(model_type, LORA_TARGETS)
