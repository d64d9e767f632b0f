"""The configuration of all models: a backbone, and the settings of its online preconditioner or None.

An impossible configuration is rejected here, with the reason, before any weight is allocated.
"""

import os
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from osdn.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention, TokenMixer
from osdn.layers.mixers import GATES, check_lower_bound
from osdn.layers.preconditioner import RULES, check_settings, for_strength
from osdn.layers.updates import check_update
from osdn.models.adapters import register_lora_targets
from osdn.models.attention import FULL, SLIDING, AttentionConfig
from osdn.ops import checks
from osdn.ops.operators import check_backend

MIXERS: dict[str, type[TokenMixer]] = {
    "delta_net": DeltaNet,
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDeltaAttention,
}

# Saved with every checkpoint, for loading with `trust_remote_code=True` if this package is installed.
REMOTE_CODE = "osdn_classes.py"
AUTO_CLASSES = {
    "AutoConfig": "OSDNConfig",
    "AutoModel": "OSDNModel",
    "AutoModelForCausalLM": "OSDNForCausalLM",
    "AutoModelForSequenceClassification": "OSDNForSequenceClassification",
    "AutoModelForTokenClassification": "OSDNForTokenClassification",
}


class _AllLinear:
    """The layer types of a model that is not a hybrid, which `transformers` reads to choose a cache.

    It is not a data descriptor, so the attribute of a hybrid's configuration takes precedence.
    """

    def __get__(self, config: "OSDNConfig | None", owner: type) -> list[str]:
        return [] if config is None else ["delta_rule"] * config.num_hidden_layers


LAYER_TYPES = ("linear_attention", FULL, SLIDING)
ADDED = {
    "attention": None,
    "allow_neg_eigval": False,
    "output_gate_activation": None,
    "decay_lower_bound": None,
    "update_rule": None,
}  # fields added after version 0.1, saved only if they are set


class OSDNConfig(PreTrainedConfig):
    """Configuration of `OSDNModel` and `OSDNForCausalLM`.

    Args:
        backbone: "delta_net", "gated_delta_net" or "kda".
        preconditioner: the settings of a `PreconditionerConfig`, or of another rule given by "rule"; None is
            the plain backbone.
        vocab_size, hidden_size, num_hidden_layers: as in every model.
        num_heads: number of query and key heads.
        num_v_heads: number of value heads (grouped value attention, not in DeltaNet); None is `num_heads`.
        head_k_dim: channels per key; None is `hidden_size / num_heads`.
        head_v_dim: channels per value; None is `head_k_dim`.
        intermediate_size: width of the SwiGLU; None is 8/3 of the hidden size, rounded up to a multiple of
            256.
        conv_size: width of the short convolutions.
        norm_eps: epsilon of every RMS norm.
        beta_bias: initial value of a learned bias of the write gate; None is a gate without a bias.
        write_scale: a constant factor for every write strength.
        allow_neg_eigval: whether write strengths reach 2 instead of 1.
        output_gate_activation: for Gated DeltaNet: "swish" (or "silu") or "sigmoid"; None is "swish".
        decay_lower_bound: for KDA: the logarithm of a decay lies between this and 0; None is no bound.
        update_rule: an update other than the plain delta rule: "longhorn", "efla", "kaczmarz", "comba",
            "gdn2" or "product-2" (docs/models.md); it has no preconditioner.
        initializer_range: standard deviation of the initial projections, convolutions and embeddings.
        max_position_embeddings: the training context, for tools that ask; the model has no positions.
        backend: which implementation of the operators to use.
        layer_types: the kind of each layer of a hybrid model: "linear_attention" (the backbone),
            "full_attention" or "sliding_attention"; by default all layers are the backbone's.
        attention: the settings of an `AttentionConfig`, for hybrid models.

    >>> OSDNConfig.from_preset("osdn-apf-340m").preconditioner["retention"]
    'learned'
    """

    model_type = "osdn"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    attribute_map: ClassVar = {"num_attention_heads": "num_heads"}

    layer_types = _AllLinear()

    backbone: str = "delta_net"
    preconditioner: dict[str, Any] | None = None
    vocab_size: int = 32_000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_heads: int = 8
    # None is filled in below.
    num_v_heads: int = None  # type: ignore[assignment]
    head_k_dim: int = None  # type: ignore[assignment]
    head_v_dim: int = None  # type: ignore[assignment]
    intermediate_size: int = None  # type: ignore[assignment]
    conv_size: int = 4
    norm_eps: float = 1e-6
    beta_bias: float | None = None
    write_scale: float = 1.0
    allow_neg_eigval: bool = False
    output_gate_activation: str | None = None
    decay_lower_bound: float | None = None
    update_rule: str | None = None
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096
    attention: dict[str, Any] | None = None
    backend: str = "auto"
    run_name: str | None = None  # the run that trained the model, written by the trainer
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        inside = {field.name for settings in RULES.values() for field in fields(settings)} | {"rule"}
        if misplaced := sorted(set(kwargs) & inside):
            raise ValueError(
                f"{', '.join(misplaced)} must be set inside preconditioner={{...}}; "
                f"without a preconditioner there is no scale to apply it to"
            )
        for alias in kwargs.keys() & self.attribute_map.keys():  # other sizes are derived from these
            setattr(self, alias, kwargs.pop(alias))
        if (layer_types := kwargs.pop("layer_types", None)) is not None:
            self.layer_types = list(layer_types)
        # `transformers` keeps unknown fields, which may come from a later version; reject misspelt ones.
        for name in kwargs:
            if meant := get_close_matches(name, self.own_fields(), 1, cutoff=0.7):
                raise ValueError(f"there is no field {name}; did you mean {meant[0]}?")
        self._check_sizes()
        if self.head_k_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size is {self.hidden_size}, which is not divisible by num_heads = "
                    f"{self.num_heads}; change one of them or set head_k_dim"
                )
            self.head_k_dim = self.hidden_size // self.num_heads
        if self.head_v_dim is None:
            self.head_v_dim = self.head_k_dim
        if self.num_v_heads is None:
            self.num_v_heads = self.num_heads
        if self.intermediate_size is None:
            self.intermediate_size = 256 * -(-(self.hidden_size * 8 // 3) // 256)
        if self.preconditioner is not None:
            self.preconditioner = for_strength(self.preconditioner, self.strongest).to_dict()
        if self.attention is not None:
            self.attention = AttentionConfig.of(self.attention, self.hidden_size).to_dict()
        super().__post_init__(**kwargs)
        self.validate()

    def validate(self) -> None:
        """Reject an impossible configuration; `transformers` also calls this before saving."""
        self._check_sizes()
        if self.backbone not in MIXERS:
            raise ValueError(f"backbone is {self.backbone!r}; it must be one of {', '.join(MIXERS)}")
        check_backend(self.backend)
        if self.num_v_heads % self.num_heads:
            raise ValueError(
                f"num_v_heads is {self.num_v_heads}; it must be a multiple of num_heads, {self.num_heads}"
            )
        if self.num_v_heads != self.num_heads and self.backbone == "delta_net":
            raise ValueError(
                "num_v_heads can differ from num_heads in gated_delta_net and kda, not in delta_net"
            )
        for name, backbone in (("output_gate_activation", "gated_delta_net"), ("decay_lower_bound", "kda")):
            if getattr(self, name) is not None and self.backbone != backbone:
                raise ValueError(f"{name} is an option of {backbone}; the backbone is {self.backbone}")
        if self.output_gate_activation not in (None, *GATES):
            got = self.output_gate_activation
            raise ValueError(f"output_gate_activation is {got!r}; it must be one of {', '.join(GATES)}")
        check_lower_bound(self.decay_lower_bound)
        check_update(self.update_rule, self.preconditioner)
        if self.preconditioner is not None:
            settings = for_strength(self.preconditioner, self.strongest)
            check_settings(settings, self.head_k_dim, MIXERS[self.backbone].has_decay)

        self._check_layers()

    def _check_layers(self) -> None:
        if not self.is_hybrid:
            if self.attention is not None:
                raise ValueError(
                    "attention is for hybrid models; set layer_types to choose the layers with it"
                )
            return
        kinds = self.layer_types
        if unknown := sorted({str(kind) for kind in kinds} - set(LAYER_TYPES)):
            raise ValueError(f"layer_types has {', '.join(unknown)}; choose from {', '.join(LAYER_TYPES)}")
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(kinds)} entries; num_hidden_layers is {self.num_hidden_layers}"
            )
        if "linear_attention" not in kinds:
            raise ValueError("layer_types has no linear_attention; at least one layer must be the backbone's")
        if {FULL, SLIDING} & set(kinds):
            if self.attention is None:
                raise ValueError('hybrid models need attention={"num_heads": ...}, the settings of attention')
            settings = AttentionConfig.of(self.attention, self.hidden_size)
            if SLIDING in kinds and settings.window is None:
                raise ValueError("sliding_attention needs attention.window, the number of tokens it sees")

    def _check_sizes(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "num_v_heads", "head_k_dim",
            "head_v_dim", "intermediate_size", "conv_size",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                checks.size(name, getattr(self, name))
        if self.beta_bias is not None:
            checks.number("beta_bias", self.beta_bias)
        checks.number("write_scale", self.write_scale, 0)
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps is {self.norm_eps}; it must be positive")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id is {self.pad_token_id}; it must be below vocab_size, {self.vocab_size}"
            )

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save the configuration, and a file that makes the classes loadable without `import osdn`."""
        self.auto_map = {
            auto: f"{REMOTE_CODE.removesuffix('.py')}.{name}" for auto, name in AUTO_CLASSES.items()
        }
        if not os.path.isfile(save_directory):  # the library rejects a file below
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            names = ", ".join(sorted(AUTO_CLASSES.values()))
            (Path(save_directory) / REMOTE_CODE).write_text(f"from osdn import {names}  # pip install osdn\n")
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: every checkpoint already names its classes (see `save_pretrained`)."""

    @property
    def strongest(self) -> float:
        """The largest write strength, before `write_scale`."""
        return 2.0 if self.allow_neg_eigval else 1.0

    @property
    def is_hybrid(self) -> bool:
        """Whether `layer_types` was given."""
        return "layer_types" in self.__dict__

    @property
    def linear_layers(self) -> int:
        """The number of backbone layers."""
        return sum(kind in ("delta_rule", "linear_attention") for kind in self.layer_types)

    @property
    def sliding_window(self) -> int | None:
        """Where `transformers` looks for the window of sliding layers."""
        return None if self.attention is None else self.attention["window"]

    def to_dict(self) -> dict[str, Any]:
        register_lora_targets(self.model_type)  # PEFT calls this before it looks up the modules to adapt
        content = super().to_dict()
        for name, usual in ADDED.items():
            if content.get(name) == usual:
                content.pop(name, None)
        return content

    @property
    def mixer(self) -> dict[str, Any]:
        """The arguments of a layer's token mixer."""
        sizes = [
            "hidden_size",
            "num_heads",
            "num_v_heads",
            "head_k_dim",
            "head_v_dim",
            "conv_size",
            "norm_eps",
        ]
        gate = ("beta_bias", "write_scale", "allow_neg_eigval", "update_rule")
        own = [
            name
            for name in ("output_gate_activation", "decay_lower_bound")
            if getattr(self, name) is not None
        ]
        return {name: getattr(self, name) for name in (*sizes, *gate, *own, "preconditioner", "backend")}

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "OSDNConfig":
        """One of the paper's models, such as "osdn-340m", with any field replaced; see `osdn.PRESETS`."""
        from osdn.models.presets import PRESETS, every_fourth

        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; choose from {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)} | cls.attribute_map.keys()
        known |= {"num_labels", "layer_types"}
        if unknown := sorted(overrides.keys() - known):
            raise ValueError(
                f"there is no field {', '.join(unknown)}; choose from {', '.join(cls.own_fields())}"
            )
        settings = PRESETS[name] | overrides
        if "layer_types" in PRESETS[name] and "layer_types" not in overrides:
            settings["layer_types"] = every_fourth(settings["num_hidden_layers"])
        return cls(**settings)

    @classmethod
    def own_fields(cls) -> list[str]:
        """The fields that are specific to these models."""
        return [*(field.name for field in fields(cls) if field.name in cls.__annotations__), "layer_types"]
