"""The identity of a model: its name, a digest of its weights, and the block of models it is compared with.

Every result carries these, so that two models with the same name are told apart, and one model under two
paths is recognised.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from osdn.models.configuration_osdn import ADDED, OSDNConfig
from osdn.models.presets import PRESETS

DIGITS = 16  # of a digest: enough to tell checkpoints apart, short enough to read


@dataclass(frozen=True)
class Identity:
    """The model of a result."""

    model: str  # the name: an explicit one, or that of the run, the preset or the folder
    preset: str | None  # the preset with these shapes and this preconditioner, to look up the paper's figures
    checkpoint: str  # a folder, a name on the hub, or a preset
    weights: str | None  # a digest; None for the random weights of a preset
    block: str  # the models of a block share backbone, sizes and vocabulary, and are compared with each other
    baseline: bool  # whether this is the plain delta rule of its block

    def record(self) -> dict[str, Any]:
        """The fields of a result file."""
        return asdict(self)


def identify(
    model: PreTrainedModel | PreTrainedConfig, checkpoint: str | Path, name: str | None = None
) -> Identity:
    """The identity of a model loaded from `checkpoint`, which is a folder, a hub name or a preset.

    >>> identify(OSDNConfig.from_preset("osdn-tiny"), "osdn-tiny").block
    'delta_net, 2 layers of width 64, 2 heads of 32 × 32, vocabulary 512'
    """
    config = model if isinstance(model, PreTrainedConfig) else model.config
    preset = preset_of(config) if isinstance(config, OSDNConfig) else None
    path = str(checkpoint)
    return Identity(
        name or getattr(config, "run_name", None) or preset or path.rstrip("/").rpartition("/")[2],
        preset,
        path,
        weights_digest(path, config),
        block(config),
        not changed_writes(config),
    )


def changed_writes(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings by which the writes of a model differ from those of the plain delta rule."""
    usual = {"preconditioner": None, "beta_bias": None, "write_scale": 1.0, "update_rule": None}
    values = {name: getattr(config, name, value) for name, value in usual.items()}
    return {name: value for name, value in values.items() if value != usual[name]}


def preset_of(config: OSDNConfig) -> str | None:
    """The name of the preset with these shapes and this preconditioner."""
    for name in PRESETS:
        preset = OSDNConfig.from_preset(name)
        if preset.mixer | {"backend": None} == config.mixer | {"backend": None} and all(
            getattr(preset, k) == getattr(config, k)
            for k in ("backbone", "vocab_size", "layer_types", "attention", "intermediate_size")
        ):
            return name
    return None


def block(config: PreTrainedConfig) -> str:
    """The block of a model; the paper would compare the models of a block with each other."""
    if not isinstance(config, OSDNConfig):
        return str(config.model_type)
    heads = f"{config.num_heads} heads of {config.head_k_dim} × {config.head_v_dim}"
    layers = f"{config.num_hidden_layers} layers of width {config.hidden_size}"
    if config.attention is not None:  # the digest covers which layers, and their settings
        settings = repr((config.layer_types, sorted(config.attention.items())))
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        layers += f", {config.num_hidden_layers - config.linear_layers} of them attention ({digest})"
    changed = [x for x, usual in ADDED.items() if getattr(config, x) != usual]
    others = "".join(f"{x}={getattr(config, x)}, " for x in changed if x not in ("attention", "update_rule"))
    return f"{config.backbone}, {layers}, {heads}, {others}vocabulary {config.vocab_size}"


def weights_digest(checkpoint: str, config: PreTrainedConfig) -> str | None:
    """A SHA-256 of the weight files and config.json of a folder; for a hub name, its commit."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        commit = getattr(config, "_commit_hash", None)
        return None if commit is None else str(commit)[:DIGITS]
    total = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")]):
        with file.open("rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()[:DIGITS]
