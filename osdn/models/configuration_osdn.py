"""The configuration of all models: a backbone, and the settings of its online preconditioner or None.

A configuration that cannot be built is refused here, with the reason, before any weight is allocated.
"""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from osdn.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention, PreconditionerConfig, TokenMixer
from osdn.layers.preconditioner import RULES, check_settings
from osdn.layers.updates import check_update
from osdn.ops import checks
from osdn.ops.operators import check_backend

MIXERS: dict[str, type[TokenMixer]] = {
    "delta_net": DeltaNet,
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDeltaAttention,
}


class OSDNConfig(PreTrainedConfig):
    """Configuration of `OSDNModel` and `OSDNForCausalLM`.

    Args:
        backbone: "delta_net", "gated_delta_net" or "kda".
        preconditioner: the settings of a `PreconditionerConfig`, or of the other rule that it names; None is
            the plain backbone.
        vocab_size, hidden_size, num_hidden_layers: as everywhere.
        num_heads: heads of queries and keys.
        num_v_heads: heads of the values (grouped value attention, Gated DeltaNet only); None is `num_heads`.
        head_k_dim: channels of a key; None is `hidden_size / num_heads`.
        head_v_dim: channels of a value; None is `head_k_dim`.
        intermediate_size: width of the SwiGLU; None is 8/3 of the hidden size, up to a multiple of 256.
        conv_size: width of the short convolutions.
        norm_eps: epsilon of every RMS norm.
        beta_bias: where a learned bias of the write gate starts; None is a gate without one.
        write_scale: a constant factor of every write strength.
        update_rule: another update than the plain delta rule: "longhorn", "efla", "kaczmarz", "comba",
            "gdn2" or "product-2" (docs/models.md); it has no preconditioner.
        initializer_range: standard deviation that projections, convolutions and embeddings start with.
        max_position_embeddings: the training context, for tools that ask; the model has no positions.
        backend: which implementation of the operators to use.

    >>> OSDNConfig.from_preset("osdn-apf-340m").preconditioner["retention"]
    'learned'
    """

    model_type = "osdn"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    attribute_map: ClassVar = {"num_attention_heads": "num_heads"}

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
    update_rule: str | None = None
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096
    backend: str = "auto"
    run_name: str | None = None  # of the run that trained it, written by the trainer
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
        for alias in kwargs.keys() & self.attribute_map.keys():  # before sizes are derived from them
            setattr(self, alias, kwargs.pop(alias))
        # `transformers` keeps what it does not know, as a later version's fields; not what is only misspelt.
        for name in kwargs:
            if meant := get_close_matches(name, self.own_fields(), 1, cutoff=0.7):
                raise ValueError(f"there is no field {name}; did you mean {meant[0]}?")
        self._check_sizes()
        if self.head_k_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size is {self.hidden_size}, which num_heads = {self.num_heads} does not divide; "
                    f"change one of them or set head_k_dim"
                )
            self.head_k_dim = self.hidden_size // self.num_heads
        if self.head_v_dim is None:
            self.head_v_dim = self.head_k_dim
        if self.num_v_heads is None:
            self.num_v_heads = self.num_heads
        if self.intermediate_size is None:
            self.intermediate_size = 256 * -(-(self.hidden_size * 8 // 3) // 256)
        if self.preconditioner is not None:
            self.preconditioner = PreconditionerConfig.of(self.preconditioner).to_dict()
        super().__post_init__(**kwargs)
        self.validate()

    def validate(self) -> None:
        """Refuse what no model can be built from; `transformers` calls this before it saves."""
        self._check_sizes()
        if self.backbone not in MIXERS:
            raise ValueError(f"backbone is {self.backbone!r}; it must be one of {', '.join(MIXERS)}")
        check_backend(self.backend)
        if self.num_v_heads % self.num_heads:
            raise ValueError(
                f"num_v_heads is {self.num_v_heads}; it must be a multiple of num_heads, {self.num_heads}"
            )
        if self.num_v_heads != self.num_heads and self.backbone != "gated_delta_net":
            raise ValueError(
                f"num_v_heads can differ from num_heads in gated_delta_net, not in {self.backbone}"
            )
        check_update(self.update_rule, self.preconditioner)
        if self.preconditioner is not None:
            settings = PreconditionerConfig.of(self.preconditioner)
            check_settings(settings, self.head_k_dim, MIXERS[self.backbone].has_decay)

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

    @property
    def layer_types(self) -> list[str]:
        """What `transformers` reads to choose the cache of each layer (see `cache.py`)."""
        return ["delta_rule"] * self.num_hidden_layers

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
        write = ("beta_bias", "write_scale", "update_rule")
        return {name: getattr(self, name) for name in (*sizes, *write, "preconditioner", "backend")}

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "OSDNConfig":
        """One of the paper's models, say "osdn-340m", with any field replaced; `osdn.PRESETS` lists them."""
        from osdn.models.presets import PRESETS

        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)} | cls.attribute_map.keys()
        if unknown := sorted(overrides.keys() - known):
            raise ValueError(
                f"there is no field {', '.join(unknown)}; there are {', '.join(cls.own_fields())}"
            )
        return cls(**(PRESETS[name] | overrides))

    @classmethod
    def own_fields(cls) -> list[str]:
        """The fields that are not those of every model."""
        return [field.name for field in fields(cls) if field.name in cls.__annotations__]
