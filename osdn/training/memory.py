"""Checks whether a run fits into memory before anything is allocated.

How much a token saves for the backward pass depends on every detail of a block, so it is measured rather than
computed: one block runs on a few tokens, and a hook records what autograd saves.
"""

import os

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from osdn.models import OSDNConfig, describe_model
from osdn.models.modeling_osdn import OSDNBlock
from osdn.training.settings import RunSettings

COUNTED_TOKENS = 64
LESS_MEMORY = "Set training.gradient_checkpointing, a smaller data.seq_len, or fsdp2 on more devices."


def check_memory(config: OSDNConfig, settings: RunSettings, device: torch.device, devices: int) -> None:
    """Reject a run whose weights, gradients, AdamW moments and activations of one row cannot fit."""
    shards = devices if settings.training.parallelism == "fsdp2" else 1
    weights, activations = 16 * describe_model(config).parameters / shards, 0.0
    if device.type == "cpu":
        free = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        free = torch.cuda.mem_get_info(device)[0]
    if weights < free:
        tokens, layers = settings.data.seq_len, config.num_hidden_layers
        block = activation_bytes(config) * tokens / (2 if settings.training.precision == "bfloat16" else 1)
        activations = block * layers
        if settings.training.gradient_checkpointing:  # one block at a time, plus the float32 input of each
            activations = block + 4 * layers * config.hidden_size * tokens
    if weights + activations > free:
        raise ValueError(
            f"this run needs at least {weights / 1e9:.1f} GB for weights, gradients and moments and "
            f"{activations / 1e9:.1f} GB for the activations of {settings.data.seq_len:,} tokens; {device} "
            f"has {free / 1e9:.1f} GB free.\n{LESS_MEMORY}"
        )


def activation_bytes(config: OSDNConfig) -> float:
    """The bytes per token that one block saves for the backward pass, measured on a few float32 tokens."""
    linear = next(
        i for i, kind in enumerate(config.layer_types) if kind in ("delta_rule", "linear_attention")
    )
    with torch.random.fork_rng(devices=[]):
        block = OSDNBlock(config, layer_idx=linear)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    seen: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    x = torch.randn(1, COUNTED_TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = block(x)
    total = sum(seen.values())
    del y  # it kept the graph alive until here, so that no address was reused
    return total / COUNTED_TOKENS
