"""The attention layers of hybrid models: grouped queries, on the attention interface of `transformers`.

`attn_implementation` selects the kernel by name, as in every model of `transformers`; masks come from its
`masking_utils`.  A layer sees the batch as `[B, T]`, with padding, whose keys and values are masked.  The
sequences of a packed row attend one by one, so that no mask grows with the square of the row's length.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from osdn.layers.linear import Linear
from osdn.layers.precision import RMSNorm
from osdn.models.layout import Layout
from osdn.ops import checks

if TYPE_CHECKING:
    from osdn.models.configuration_osdn import OSDNConfig

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class AttentionConfig:
    """What the attention layers of a hybrid model compute.

    Args:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of `num_heads`; None is `num_heads`.
        head_dim: channels per head; None divides the width by `num_heads`.
        window: how many tokens a `sliding_attention` layer sees, including the current one.
        rope_theta: base of the rotary position embedding; None means no positions.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        qk_norm: whether queries and keys are normalised per head (RMS, with weights).
        qk_norm_eps: epsilon of these norms.
        output_gate: whether the output is multiplied by `sigmoid(g_proj(x))`.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    rope_theta: float | None = 10_000.0
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    output_gate: bool = False

    @classmethod
    def of(cls, settings: "Mapping[str, Any] | AttentionConfig", hidden_size: int) -> "AttentionConfig":
        """The settings from a mapping, with all sizes filled in and checked."""
        if isinstance(settings, AttentionConfig):
            settings = asdict(settings)
        if not isinstance(settings, Mapping):
            raise TypeError(f"attention must be None or a dictionary, got {type(settings).__name__}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(settings) - set(known)):
            raise ValueError(f"attention has no setting {', '.join(unknown)}; it has {', '.join(known)}")
        if "num_heads" not in settings:
            raise ValueError("attention needs num_heads, the number of query heads")
        settings = dict(settings)
        heads = settings["num_heads"]
        checks.size("attention.num_heads", heads)
        if settings.get("num_kv_heads") is None:
            settings["num_kv_heads"] = heads
        if settings.get("head_dim") is None:
            if hidden_size % heads:
                raise ValueError(
                    f"attention.num_heads is {heads}, which does not divide hidden_size, {hidden_size}; "
                    "change one of them or set attention.head_dim"
                )
            settings["head_dim"] = hidden_size // heads
        config = cls(**settings)
        config._check()
        return config

    def _check(self) -> None:
        for name in ("num_kv_heads", "head_dim", "window"):
            if getattr(self, name) is not None:
                checks.size(f"attention.{name}", getattr(self, name))
        for name in ("qkv_bias", "qk_norm", "output_gate"):
            checks.flag(f"attention.{name}", getattr(self, name))
        checks.number("attention.qk_norm_eps", self.qk_norm_eps, checks.SMALLEST)
        assert self.num_kv_heads is not None
        assert self.head_dim is not None
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention.num_kv_heads is {self.num_kv_heads}; it must divide num_heads, {self.num_heads}"
            )
        if self.rope_theta is not None:
            checks.number("attention.rope_theta", self.rope_theta, checks.SMALLEST)
            if self.head_dim % 2:
                raise ValueError(
                    f"attention.head_dim is {self.head_dim}; a rotary embedding needs an even number: "
                    "change it or set rope_theta to None"
                )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class AttentionInputs(NamedTuple):
    """What all attention layers share in one forward pass."""

    masks: dict[str, Any]  # by kind of layer; with `pieces`, one per piece
    pieces: list[slice] | None  # the sequences of a packed row; None attends within the whole batch
    rotary: tuple[Tensor, Tensor] | None  # cosines and sines, [B, T, head_dim]
    packing: dict[str, Any]  # boundaries, for kernels that take those instead of a mask
    weights: list[Tensor | None] | None  # collects the layers' attention weights, if requested


class Attention(nn.Module):
    """Causal attention; parameters are named as in flash-linear-attention.

    The interface of `transformers` reads the attributes `config`, `layer_idx`, `is_causal` and
    `num_key_value_groups`.
    """

    def __init__(self, config: "OSDNConfig", layer_idx: int) -> None:
        super().__init__()
        settings = AttentionConfig.of(config.attention or {}, config.hidden_size)
        assert settings.num_kv_heads is not None
        assert settings.head_dim is not None
        self.config, self.layer_idx, self.kind = config, layer_idx, config.layer_types[layer_idx]
        self.head_dim, self.scaling, self.is_causal = settings.head_dim, settings.head_dim**-0.5, True
        self.num_key_value_groups = settings.num_heads // settings.num_kv_heads
        self.window = settings.window if self.kind == SLIDING else None
        width, kv_width = settings.num_heads * self.head_dim, settings.num_kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, width, bias=settings.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=settings.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=settings.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, bias=False)
        self.g_proj = Linear(config.hidden_size, width, bias=False) if settings.output_gate else None
        self.q_norm = RMSNorm(self.head_dim, eps=settings.qk_norm_eps) if settings.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=settings.qk_norm_eps) if settings.qk_norm else None

    def forward(self, x: Tensor, inputs: AttentionInputs, past_key_values: Cache | None = None) -> Tensor:
        """Attend from every token of `x` `[B, T, D]` to itself and earlier tokens."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, head_dim]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if inputs.rotary is not None:
            q, k = (y.to(x.dtype) for y in apply_rotary_pos_emb(q, k, *inputs.rotary))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        masks = inputs.masks[self.kind]
        if inputs.pieces is None:
            y, weights = self._attend(q, k, v, masks, inputs.packing)
            if inputs.weights is not None:
                inputs.weights.append(weights)
        else:
            parts = [
                self._attend(q[:, :, i], k[:, :, i], v[:, :, i], mask, {})[0]
                for i, mask in zip(inputs.pieces, masks)
            ]
            y = torch.cat(parts, 1)
        y = y.flatten(2)  # [B, T, heads * head_dim]
        if self.g_proj is not None:
            y = y * self.g_proj(x).sigmoid()
        return self.o_proj(y)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, packing: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Outputs `[B, T, heads, head_dim]`, and the attention weights if the implementation returns them."""
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        settings = {"dropout": 0.0, "scaling": self.scaling, "sliding_window": self.window}
        return interface(self, q, k, v, mask, **settings, **packing)


def attention_inputs(
    config: "OSDNConfig",
    x: Tensor,  # [B, T, D], the embeddings
    layout: Layout,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    seen: int,
    weights: list[Tensor | None] | None = None,
) -> AttentionInputs:
    """Masks and positions for the attention layers; `seen` is the number of cached tokens."""
    if attention_mask is not None:
        if cache is None:
            attention_mask = attention_mask[:, attention_mask.shape[1] - layout.T :]
        elif not torch.compiler.is_compiling() and attention_mask.shape[1] != seen + layout.T:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns; attention layers need one for each "
                f"of the {seen} cached tokens and {layout.T} new ones"
            )
    packing, pieces, sequences = {}, None, None
    if layout.packed:
        if is_flash_attention_requested(config):
            packing = _boundaries(layout)
        elif (
            layout.B == 1 and layout.tokens is None and weights is None and not torch.compiler.is_compiling()
        ):
            assert layout.cu_seqlens is not None
            cuts = checks.boundaries(layout.cu_seqlens, layout.T)
            pieces = [slice(a, b) for a, b in pairwise(cuts) if a < b]
        else:
            sequences = layout.sequences()

    def mask_of(kind: str, x: Tensor) -> Any:
        create = create_causal_mask if kind == FULL else create_sliding_window_causal_mask
        return create(
            config=config,
            inputs_embeds=x,
            attention_mask=attention_mask if pieces is None else None,  # a packed row has no padding
            past_key_values=cache,
            and_mask_function=None if sequences is None else packed_sequence_mask_function(sequences),
            layer_idx=config.layer_types.index(kind),
        )

    masks: dict[str, Any] = {}
    for kind in set(config.layer_types) & {FULL, SLIDING}:
        if pieces is None:
            masks[kind] = mask_of(kind, x)
        else:
            lengths = {i.stop - i.start for i in pieces}
            by_length = {length: mask_of(kind, x[:, :length]) for length in lengths}
            masks[kind] = [by_length[i.stop - i.start] for i in pieces]
    rotary = None
    assert config.attention is not None
    if (theta := config.attention["rope_theta"]) is not None:
        positions = _positions(layout, attention_mask, position_ids, seen, x.device)
        rotary = _rotary(positions, config.attention["head_dim"], theta)
    return AttentionInputs(masks, pieces, rotary, packing, weights)


def _positions(
    layout: Layout, mask: Tensor | None, position_ids: Tensor | None, seen: int, device: torch.device
) -> Tensor:
    """The position of every token in its sequence, `[B, T]`: as given, or counted without padding."""
    B, T = layout.B, layout.T
    if position_ids is not None:
        return position_ids.expand(B, T)
    if layout.packed:
        return layout.positions()
    if mask is not None:
        return (mask.long().cumsum(1) - 1).clamp(min=0)[:, mask.shape[1] - T :]
    return torch.arange(seen, seen + T, device=device).expand(B, T)


def _rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every pair's angle, in float32: half precision would confuse late positions."""
    channel = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * theta ** (-channel / head_dim)
    angles = torch.cat([angles, angles], -1)  # [B, T, head_dim]
    return angles.cos(), angles.sin()


def _boundaries(layout: Layout) -> dict[str, Any]:
    assert layout.cu_seqlens is not None
    if layout.tokens is not None:
        raise ValueError(
            "flash attention needs packed rows without padding; remove the padding, or use "
            'attn_implementation="sdpa"'
        )
    cuts = layout.cu_seqlens.int()
    longest = int(layout.cu_seqlens.diff().max())
    lengths = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
    return lengths | {"max_length_q": longest, "max_length_k": longest}
