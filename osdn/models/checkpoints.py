"""Loads any causal model and its tokenizer from a directory or hub name."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from osdn.bfloat16 import avoid_broken_amx
from osdn.hub import hub_answers, no_waiting
from osdn.models.interchange import CHECKPOINT_FORMATS, load_flash_linear_attention
from osdn.models.quantization import quantize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: str | Path, device: str = "cpu", dtype: str | None = None, weights: str | None = None
) -> PreTrainedModel:
    """Load one of our models, one of flash-linear-attention, or any other causal model.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto" for the saved dtype; None is float32 on a CPU and
            "auto" elsewhere.
        weights: "int8" or "int4" quantizes the weights of linear layers, on a CPU.
    """
    place = usable_device(device)
    name = dtype or ("float32" if place.type == "cpu" else "auto")
    if name not in (*DTYPES, "auto"):
        raise ValueError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)} and auto")
    if place.type == "cpu" and name != "float32":
        avoid_broken_amx()
    if weights is not None and place.type != "cpu":
        raise ValueError(f"{weights} weights work only on CPUs, but device is {device}")
    precision = DTYPES.get(name, "auto")
    settings = saved_settings(path)
    with no_waiting():
        if settings.get("model_type") in CHECKPOINT_FORMATS:
            model = load_flash_linear_attention(path, dtype=precision)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=precision, use_safetensors=True)
    if weights is not None:
        quantize(model, weights)
    return model.to(place).eval()


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer saved with a checkpoint."""
    from transformers import AutoTokenizer  # takes half a second, which building a model does not need

    if not any(Path(path).glob("tokenizer*")):
        saved_settings(path)  # raises an error if something is wrong with the path
    try:
        with no_waiting():
            return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} has no tokenizer that can be loaded; save the one it was trained with there, with "
            f"tokenizer.save_pretrained"
        ) from error


def saved_settings(path: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint's config.json."""
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        run = (folder / "model" / "config.json").is_file()
        hint = f"; it is the folder of a run, whose model is {folder / 'model'}" if run else ""
        raise ValueError(f"{path} is not a checkpoint: it has no config.json{hint}")
    with no_waiting():
        try:
            settings, _ = PreTrainedConfig.get_config_dict(path)
        except OSError as error:
            if folder.exists() or hub_answers():
                raise
            message = f"there is no directory {path}, it is not cached, and the hub cannot be reached"
            raise FileNotFoundError(message) from error
    if not settings:
        raise ValueError(f"{path} is not a checkpoint: it has no config.json")
    return settings


def usable_device(name: str) -> torch.device:
    """A device by name; raises an error if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter if PyTorch is built without the device
        usable = (
            f"cpu, cuda:0 to cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"
        )
        raise ValueError(f"device is {name!r}, which cannot be used here; use {usable}") from error
    return device
