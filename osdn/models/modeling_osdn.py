"""`OSDNModel` and `OSDNForCausalLM`: pre-norm blocks of a token mixer and a SwiGLU, for `transformers`.

A padded batch runs as one row of sequences without padding (see `layout.py`).  The loss computes a few rows
of logits at a time and never holds all of them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple

from osdn.layers.linear import Linear, linears
from osdn.layers.mixers import DecayingMixer, WriteGate
from osdn.layers.precision import RMSNorm, widen
from osdn.layers.preconditioner import PGDNPreconditioner, Preconditioner, Retention
from osdn.layers.updates import Update
from osdn.models.attention import FULL, SLIDING, Attention, AttentionInputs, attention_inputs
from osdn.models.cache import DeltaRuleCacheLayer, check_cache
from osdn.models.configuration_osdn import MIXERS, OSDNConfig
from osdn.models.decoder import decode
from osdn.models.layout import Layout, lay_out
from osdn.models.loss import IGNORED_LABEL, summed_cross_entropy
from osdn.ops import tracing

LABELS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class OSDNMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: OSDNConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linears([(self.gate_proj, x), (self.up_proj, x)])
        return self.down_proj(F.silu(gate) * up)


class OSDNBlock(GradientCheckpointingLayer):
    def __init__(self, config: OSDNConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn: nn.Module
        if config.layer_types[layer_idx] in (FULL, SLIDING):
            self.attn = Attention(config, layer_idx)
        else:
            self.attn = MIXERS[config.backbone](**config.mixer)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = OSDNMLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        layout: Layout | None = None,
        attention: AttentionInputs | None = None,
    ) -> Tensor:
        x = self.attn_norm(hidden_states)
        if isinstance(self.attn, Attention):
            assert layout is not None
            mixed = layout.gather(self.attn(layout.spread(x), attention, past_key_values))
        else:
            mixed = self._mix(x, past_key_values, layout)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))

    def _mix(self, x: Tensor, past_key_values: Cache | None, layout: Layout | None) -> Tensor:
        cu_seqlens = None if layout is None else layout.cu_seqlens
        if past_key_values is None:
            return self.attn(x, cu_seqlens=cu_seqlens)[0]
        cache = past_key_values.layers[self.layer_idx]
        state, unread = cache.load(), cache.unread
        if unread is not None:
            x = torch.cat([unread, x], 1)
            cu_seqlens = None if cu_seqlens is None else F.pad(cu_seqlens[1:] + unread.shape[1], (1, 0))
        padding = layout is not None and layout.padding is not None
        if padding and state is not None:
            state = state.map(lambda x: torch.cat([x, torch.zeros_like(x[:1])]))
        # A cache that records its past needs the state as it was.
        own = {"overwrite_state": True} if state is not None and not cache.record_past else {}
        mixed, state = self.attn(x, state, cu_seqlens=cu_seqlens, output_final_state=True, **own)
        cache.update(state.map(lambda x: x[:-1]) if padding else state, x)
        return mixed if unread is None else mixed[:, unread.shape[1] :]


class OSDNPreTrainedModel(PreTrainedModel):
    config_class = OSDNConfig
    config: OSDNConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OSDNBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (DecayingMixer, PGDNPreconditioner)):
            A_log, dt_bias = module.initial_decay()
            init.copy_(module.A_log, A_log)
            init.copy_(module.dt_bias, dt_bias)
        if isinstance(module, WriteGate):
            module.reset_bias()
        elif isinstance(module, (Preconditioner, Retention, Update)):
            module.reset_parameters()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: every checkpoint already names its classes (see `OSDNConfig.save_pretrained`)."""


class OSDNModel(OSDNPreTrainedModel):
    """Embeddings, blocks and the final norm."""

    def __init__(self, config: OSDNConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(OSDNBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the blocks over `input_ids` `[B, T]` or `inputs_embeds` `[B, T, D]`.

        Args:
            attention_mask: `[B, ≥ T]`, 0 for padding, which may be anywhere; only the last T columns count.
            position_ids: `[B, T]`, positions for the attention of hybrid models; computed if None.  Where
                they do not increase by one, another sequence starts (the padding-free collator of
                `transformers`).  While a program is traced, this requires that no cache is requested.
            past_key_values: the cache of earlier tokens, `DynamicCache(config=model.config)`.
            cu_seqlens: `[N + 1]` boundaries of sequences packed into one row; also as `cu_seq_lens_q`.
            kwargs: also `seq_idx` `[B, T]`, the index of each token's sequence within its row.
        """
        if input_ids is not None and inputs_embeds is None:
            if input_ids.ndim != 2:
                raise ValueError(f"input_ids has shape {list(input_ids.shape)}; it must be [B, T]")
            x = self.embeddings(input_ids)
        elif inputs_embeds is not None and input_ids is None:
            if inputs_embeds.ndim != 3:
                raise ValueError(f"inputs_embeds has shape {list(inputs_embeds.shape)}; it must be [B, T, D]")
            x = inputs_embeds
        else:
            raise ValueError("pass either input_ids or inputs_embeds")
        B, T, _ = x.shape
        if cu_seqlens is None:
            cu_seqlens = kwargs.get("cu_seq_lens_q")
        cached = past_key_values is not None or bool(use_cache)
        layout = lay_out(B, T, attention_mask, position_ids, cu_seqlens, kwargs.get("seq_idx"), cached)
        past_key_values, seen = self._cache(past_key_values, use_cache, layout)
        weights = self._weights(output_attentions)
        attention = None
        if self.config.attention is not None:
            inputs = (x, layout, attention_mask, position_ids, past_key_values, seen, weights)
            attention = attention_inputs(self.config, *inputs)
        x = layout.gather(x)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        decoded = None
        if T == 1 and past_key_values is not None and layout.cu_seqlens is None and not output_hidden_states:
            decoded = decode(self, x, past_key_values)
        hidden = []
        for layer in self.layers if decoded is None else ():
            if output_hidden_states:
                hidden.append(layout.spread(x))
                x = layout.gather(hidden[-1])  # the next layer reads exactly what is returned
            x = layer(x, past_key_values=past_key_values, layout=layout, attention=attention)
        x = layout.spread(self.norm(x)) if decoded is None else decoded
        if past_key_values is not None:
            for cache in past_key_values.layers:
                if isinstance(cache, DeltaRuleCacheLayer):
                    cache.seen_tokens += T
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden, x) if output_hidden_states else None,
            attentions=None if weights is None else tuple(weights),
        )

    def _weights(self, output_attentions: bool | None) -> list[Tensor | None] | None:
        """A list for the weights of attention layers, if they are requested."""
        if not (self.config.output_attentions if output_attentions is None else output_attentions):
            return None
        if self.config.attention is None:
            raise ValueError("output_attentions=True: this model has no attention weights; leave it out")
        if self.config._attn_implementation != "eager" or (self.training and self.gradient_checkpointing):
            raise ValueError(
                'output_attentions=True needs set_attn_implementation("eager"), and no gradient checkpointing'
            )
        return []

    def _cache(self, cache: Cache | None, use_cache: bool | None, layout: Layout) -> tuple[Cache | None, int]:
        """The cache to use, and how many tokens it has seen."""
        if layout.packed:
            if cache is not None or use_cache:
                raise ValueError("a packed row cannot be cached: pass its sequences as a padded batch")
            return None, 0
        if self.training and self.gradient_checkpointing:  # a layer that runs twice must not update a cache
            if cache is not None:
                raise ValueError(
                    "gradient checkpointing cannot continue from past_key_values; "
                    "call gradient_checkpointing_disable() or pass None"
                )
            return None, 0
        if cache is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not self.training
            cache = DynamicCache(config=self.config) if use_cache else None
        return cache, 0 if cache is None else check_cache(cache, self.config.layer_types, layout.B)


class OSDNForCausalLM(OSDNPreTrainedModel, GenerationMixin):
    """`OSDNModel` with a language-modelling head.

    >>> model = OSDNForCausalLM(OSDNConfig.from_preset("osdn-tiny"))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 512])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: OSDNConfig) -> None:
        super().__init__(config)
        self.model = OSDNModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Takes the arguments of `OSDNModel.forward`, including `cu_seqlens`, and:

        Args:
            labels: `[B, T]`, usually `input_ids`; shifted here, and -100 is ignored.
            logits_to_keep: which logits to return: 0 for all, n for the last n, or positions.
            skip_logits: whether to return no logits; None skips them when training with labels.
            num_items_in_batch: divide the summed loss by this instead of the number of labels.
            kwargs: also `shift_labels`, labels that are already shifted, instead of `labels`.
        """
        logits_to_keep = kwargs.pop("num_logits_to_keep", logits_to_keep)  # its name until transformers 4.45
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = logits = None
        # Not a named argument, because `Trainer` would then expect it in every batch.
        shift_labels = kwargs.get("shift_labels")
        if shift_labels is not None:
            _check_labels("shift_labels", shift_labels, hidden_states.shape[:2])
        elif labels is not None:
            _check_labels("labels", labels, hidden_states.shape[:2])
            shift_labels = F.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
        if shift_labels is not None:
            loss = self._loss(hidden_states, shift_labels, num_items_in_batch)
        if skip_logits is None:
            skip_logits = self.training and loss is not None
        if not skip_logits:
            logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The mask unchanged: the layers need to know the padding, and create their own masks."""
        return attention_mask

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Reject continuous batching, which `generate_batch` and the server would start here."""
        raise NotImplementedError(
            "continuous batching (generate_batch) pages keys and values, but this model has recurrent "
            "states; call generate with a left-padded batch instead"
        )

    def _loss(self, hidden_states: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
        """Cross-entropy of the labels, summed and divided by their number or by `num_items`."""
        labels = labels.flatten().to(hidden_states.device, torch.int64)
        x = hidden_states.flatten(0, 1)
        weight = self.lm_head.weight
        if _is_its_weight(self.lm_head) and not tracing.in_transform():
            if torch.is_autocast_enabled(x.device.type):
                dtype = torch.get_autocast_dtype(x.device.type)
                x, weight = x.to(dtype), weight.to(dtype)
            loss = summed_cross_entropy(x, weight, labels)
        else:  # the logits can only be computed by calling the head
            loss = F.cross_entropy(
                widen(self.lm_head(x)), labels, reduction="sum", ignore_index=IGNORED_LABEL
            )
        return loss / ((labels != IGNORED_LABEL).sum() if num_items is None else num_items)


def _is_its_weight(head: nn.Module) -> bool:
    """Whether a head is just a product with its weight: not adapted, hooked, quantized or offloaded."""
    return (
        type(head) in (nn.Linear, Linear)
        and head.bias is None
        and type(head.weight) in (Tensor, nn.Parameter)
        and not head.weight.is_meta
        and not (head._forward_hooks or head._forward_pre_hooks)
    )


def _check_labels(name: str, labels: Tensor, shape: torch.Size) -> None:
    if labels.shape != shape:
        raise ValueError(
            f"{name} has shape {list(labels.shape)}; it must have the shape of the tokens, {list(shape)}"
        )
    if labels.dtype not in LABELS:
        raise ValueError(f"{name} has dtype {labels.dtype}; it must be an integer dtype")
