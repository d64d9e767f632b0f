"""A model and its tokenizer from a directory or hub name, whoever trained it, and a name for it."""

from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from osdn.models.describe import describe
from osdn.models.interchange import FORMATS, load_flash_linear_attention
from osdn.models.modeling_osdn import OSDNForCausalLM


def load_model(path: str | Path, device: str = "cpu") -> PreTrainedModel:
    """Ours, flash-linear-attention's or any other causal model; in float32 on a CPU, else as saved."""
    settings, _ = PreTrainedConfig.get_config_dict(path)
    if not settings:
        raise ValueError(f"{path} is not a checkpoint: it has no config.json")
    dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
    if settings.get("model_type") in FORMATS:
        model = load_flash_linear_attention(path, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True)
    return model.to(device).eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved with a checkpoint."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} has no tokenizer that can be loaded; save the one it was trained with there "
            f"(tokenizer.save_pretrained)"
        ) from error


def model_name(model: nn.Module, path: str) -> str:
    """The preset a model was made from, or the last part of its path."""
    preset = describe(model).preset if isinstance(model, OSDNForCausalLM) else None
    return preset or path.rstrip("/").rpartition("/")[2]
