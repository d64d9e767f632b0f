"""The costs of a model: parameters, state per sequence and flops per token, next to the paper's figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from osdn.layers import TokenMixer
from osdn.models.attention import FULL, SLIDING, AttentionConfig
from osdn.models.checkpoints import saved_settings
from osdn.models.configuration_osdn import OSDNConfig
from osdn.models.identity import preset_of
from osdn.models.interchange import CHECKPOINT_FORMATS, config_from_flash_linear_attention
from osdn.models.modeling_osdn import OSDNForCausalLM
from osdn.models.presets import PRESETS

MIB = 1024**2

# The paper, tables "Inference throughput and persistent recurrent-state size" and "1.3B / 100B scaling pair":
# MiB of state per sequence in bfloat16, including the scale if there is one.
PAPER_STATE_MIB = {
    "delta_net-340m": 6.000,
    "osdn-340m": 6.047,
    "osdn-apf-340m": 6.047,
    "gdn-340m": 7.875,
    "osgdn-340m": 7.906,
    "osgdn-apf-340m": 7.906,
    "kda-340m": 5.750,
    "oskda-340m": 5.795,
    "oskda-apf-340m": 5.795,
    "delta_net-1.3b": 12.000,
    "osdn-apf-1.3b": 12.094,
}


@dataclass(frozen=True)
class Description:
    """The costs of a model; `print` it for a table."""

    preset: str | None
    backbone: str
    layers: int
    width: int
    heads: int
    head_k_dim: int
    head_v_dim: int
    parameters: int
    preconditioner_parameters: int
    state_mib: float  # per sequence in bfloat16, without the convolutions' tails
    scale_mib: float  # what the scale adds
    forward_flops: int  # per token, without attention to earlier tokens
    paper_state_mib: float | None
    attention_layers: int = 0  # of a hybrid model
    cache_kib_per_token: float = 0.0  # keys and values of full attention, per sequence in bfloat16
    window_mib: float = 0.0  # keys and values of sliding attention, at most
    flops_per_earlier_token: int = 0  # what full attention adds per token it sees

    def memory_mib(self, tokens: int) -> float:
        """The memory of a sequence of so many tokens: state, scale, keys and values, in bfloat16."""
        return self.state_mib + self.scale_mib + self.window_mib + tokens * self.cache_kib_per_token / 1024

    def rows(self) -> list[tuple[str, str]]:
        """Pairs of a label and a value, for printing."""
        own, scale = self.preconditioner_parameters, self.scale_mib
        own_share, scale_share = 100 * own / self.parameters, 100 * scale / self.state_mib
        rows = [
            ("model", self.preset or "(not a preset)"),
            ("backbone", f"{self.backbone}, {self.layers} layers of width {self.width}"),
            ("heads", f"{self.heads}, keys of {self.head_k_dim}, values of {self.head_v_dim}"),
            ("parameters", f"{self.parameters:,}"),
            (
                "of the preconditioner",
                f"{own:,}, {own_share:.3f} % (the paper: at most 0.3 %)" if own else "none",
            ),
            ("state per sequence, bf16", f"{self.state_mib:.3f} MiB"),
            (
                "of the scale",
                f"{scale:.3f} MiB, {scale_share:.2f} % (the paper: at most 0.05 %)" if scale else "none",
            ),
            ("forward flops per token", f"{self.forward_flops:,}"),
        ]
        if self.attention_layers:
            rows.insert(2, ("attention", f"{self.attention_layers} of the layers"))
            rows.append(("keys and values, bf16", f"{self.cache_kib_per_token:.3f} KiB per token"))
            if self.window_mib:
                rows.append(("of the windows", f"at most {self.window_mib:.3f} MiB per sequence"))
            rows.append(("flops per token seen", f"{self.flops_per_earlier_token:,}"))
        if self.paper_state_mib is not None:
            total = self.state_mib + self.scale_mib
            rows.append(("state and scale", f"{total:.3f} MiB (the paper: {self.paper_state_mib:.3f} MiB)"))
        return rows

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        return "\n".join(f"{label:<{width}}  {value}" for label, value in self.rows())


def describe_model(model: OSDNForCausalLM | OSDNConfig | str | Path) -> Description:
    """The costs of a model, configuration, preset or saved model's directory; allocates no weights.

    >>> describe_model("osdn-340m").state_mib
    6.0
    """
    if isinstance(model, nn.Module):
        config = model.config
    else:
        config = load_config(model) if isinstance(model, (str, Path)) else model
        with torch.device("meta"):
            model = OSDNForCausalLM(config)
    preset = preset_of(config)
    heads = config.linear_layers * config.num_v_heads
    own = [p for name, p in model.named_parameters() if ".preconditioner." in name]
    return Description(
        preset=preset,
        backbone=config.backbone,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_heads,
        head_k_dim=config.head_k_dim,
        head_v_dim=config.head_v_dim,
        parameters=sum(p.numel() for p in model.parameters()),
        preconditioner_parameters=sum(p.numel() for p in own),
        state_mib=heads * config.head_k_dim * config.head_v_dim * 2 / MIB,
        scale_mib=heads * config.head_k_dim * _block_size(config) * 2 / MIB,
        forward_flops=_forward_flops(model, config),
        paper_state_mib=PAPER_STATE_MIB.get(preset or ""),
        **_attention_costs(config),
    )


def _attention_costs(config: OSDNConfig) -> dict[str, Any]:
    """Two bytes per number in keys and values; 4 flops per channel for a score and its output."""
    if config.attention is None:
        return {}
    full, sliding = (config.layer_types.count(kind) for kind in (FULL, SLIDING))
    settings = AttentionConfig.of(config.attention, config.hidden_size)
    assert settings.num_kv_heads is not None
    assert settings.head_dim is not None
    per_token = 4 * settings.num_kv_heads * settings.head_dim  # bytes per layer
    return {
        "attention_layers": full + sliding,
        "cache_kib_per_token": full * per_token / 1024,
        "window_mib": sliding * per_token * (settings.window or 0) / MIB,
        "flops_per_earlier_token": full * 4 * settings.num_heads * settings.head_dim,
    }


def load_config(name: str | Path) -> OSDNConfig:
    """The configuration of a preset or of a saved model, ours or one of flash-linear-attention."""
    if str(name) in PRESETS or not Path(name).is_dir():
        return OSDNConfig.from_preset(str(name))
    settings = saved_settings(name)
    kind = settings.get("model_type")
    if kind in CHECKPOINT_FORMATS:
        return config_from_flash_linear_attention(settings)
    if kind != OSDNConfig.model_type:
        raise ValueError(
            f"{name} contains a model of type {kind!r}; it must be one of osdn, "
            f"{', '.join(CHECKPOINT_FORMATS)}"
        )
    return OSDNConfig.from_pretrained(name)


def _forward_flops(model: OSDNForCausalLM, config: OSDNConfig) -> int:
    """Two per weight of a projection or convolution, plus those of the recurrence.

    The recurrence reads with the key, writes, and reads with the query: three times 2·K·V per head.  The
    scale takes a dot product, a step and the write key: 8·K per head.  Other elementwise work is not counted.
    """
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv1d)))
    heads, K, V = config.linear_layers * config.num_v_heads, config.head_k_dim, config.head_v_dim
    writes = next(m.writes for m in model.modules() if isinstance(m, TokenMixer))  # per token
    recurrence = heads * (writes * 6 * K * V + 8 * K * _block_size(config))
    return 2 * weights + recurrence


def _block_size(config: OSDNConfig) -> int:
    """How many numbers the preconditioner carries per key channel."""
    return 0 if config.preconditioner is None else config.preconditioner.get("block_size", 1)
