"""What a layer remembers while decoding, in `transformers`' own cache.

`transformers` keeps several convolution and recurrent states a layer (`LinearAttentionLayer`), and reorders
them for beam search, but it asks an attention layer how many tokens were seen, and here there is none: this
layer counts them itself.  It registers under the layer type "delta_rule", so that
`DynamicCache(config=config)` builds it, and `generate` with it.
"""

from typing import Any

import torch
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin, LinearAttentionLayer

from osdn.layers import MixerState


class DeltaRuleCacheLayer(LinearAttentionLayer, CacheLayerMixin):
    """Recurrent state 0 is S, 1 is the scale; convolution states 0 to 2 are the tails of q, k and v."""

    _layer_type = "delta_rule"

    def __init__(self, **kwargs: Any) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=3)
        self.seen_tokens = 0

    def load(self) -> MixerState | None:
        if not self.has_previous_state[0]:
            return None
        states = [*(self.recurrent_states[i] for i in range(2)), *(self.conv_states[i] for i in range(3))]
        if torch.is_grad_enabled():  # a backward reads what the next `update` writes over
            states = [None if x is None else x.clone() for x in states]
        return MixerState(*states)

    def update(self, state: MixerState) -> None:
        """Keep a copy of `state`, at an address that does not change; no gradient flows through it."""
        if not torch.is_inference_mode_enabled() and not torch.compiler.is_compiling():
            for states in (self.recurrent_states, self.conv_states):
                for i in range(len(states)):
                    if states[i] is not None and states[i].is_inference():  # which nothing may change now
                        states[i] = states[i].clone()
        for i, x in enumerate((state.recurrent, state.scale)):
            if x is not None:
                self.update_recurrent_state(x.detach(), i)
        for i, x in enumerate((state.q_tail, state.k_tail, state.v_tail)):
            if not self.is_conv_states_initialized[i]:
                self.lazy_initialization(conv_states=x, state_idx=i)
            self.conv_states[i].copy_(x.detach())
            self.has_previous_state[i] = True

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen_tokens + query_length, 0

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        self.seen_tokens = 0


STATIC_LAYER_TYPE_MAPPING["delta_rule"] = DeltaRuleCacheLayer  # its size never grows, so it is static as well


def check_cache(cache: Cache, num_layers: int, batch: int) -> None:
    layers = getattr(cache, "layers", None) or []
    if len(layers) != num_layers or not all(isinstance(layer, DeltaRuleCacheLayer) for layer in layers):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} with layers {layers}; this model needs "
            f"{num_layers} of DeltaRuleCacheLayer: pass DynamicCache(config=model.config)"
        )
    known = len(layers[0].recurrent_states[0]) if layers[0].has_previous_state[0] else batch
    if known != batch:
        raise ValueError(
            f"past_key_values continues {known} sequences; the batch has {batch}: pass the same sequences, "
            f"or a new DynamicCache(config=model.config)"
        )
