"""The state of a layer during decoding, in the cache of `transformers`.

`transformers` stores several convolution and recurrent states per layer (`LinearAttentionLayer`) and reorders
them for beam search.  But it asks an attention layer how many tokens were seen, and there may be none, so
this layer counts them itself.  It is registered under the layer type "delta_rule", so that
`DynamicCache(config=config)`, and with it `generate`, builds it.

A recurrent state cannot be cropped.  If that may be necessary, as in assisted decoding, the layer keeps an
earlier state and the inputs since then.  Cropping returns to that state, and the remaining inputs are read
again together with the next ones.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin, LinearAttentionLayer

from osdn.layers import MixerState


class DeltaRuleCacheLayer(LinearAttentionLayer, CacheLayerMixin):
    """Recurrent state 0 is S, 1 is the scale; convolution states 0 to 2 are the tails of q, k and v."""

    _layer_type = "delta_rule"
    is_croppable = True  # while it records its past

    def __init__(self, **kwargs: Any) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=3)
        self.seen_tokens = 0
        self._forget()

    def _forget(self) -> None:
        self.inputs: list[Tensor] = []  # [B, T, D] each, since `snapshot`
        self.snapshot: MixerState | None = None  # the state before `inputs`; None is the empty state
        self.unread: Tensor | None = None  # inputs left by a crop that the state does not include yet

    def load(self) -> MixerState | None:
        if not self.has_previous_state[0]:
            return None
        states = [*(self.recurrent_states[i] for i in range(2)), *(self.conv_states[i] for i in range(3))]
        if torch.is_grad_enabled():  # the backward pass reads what the next `update` overwrites
            states = [None if x is None else x.clone() for x in states]
        return MixerState(*states)

    def update(self, state: MixerState, inputs: Tensor) -> None:
        """Store a copy of `state` at a fixed address; no gradient flows through it.

        `inputs` are those that led to it, including the `unread` ones.
        """
        if self.record_past:
            self._record(inputs.detach(), len(state.recurrent))
        self.unread = None
        self._store(state)

    def _store(self, state: MixerState) -> None:
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            for states in (self.recurrent_states, self.conv_states):
                for i in range(len(states)):
                    if states[i] is not None and states[i].is_inference():  # cannot be modified out here
                        states[i] = states[i].clone()
        for i, x in enumerate((state.recurrent, state.scale)):
            if x is not None and x is not self.recurrent_states[i]:  # unless it was updated in place
                self.update_recurrent_state(x.detach(), i)
        for i, x in enumerate((state.q_tail, state.k_tail, state.v_tail)):
            if not self.is_conv_states_initialized[i]:
                self.lazy_initialization(conv_states=x, state_idx=i)
            if x is not self.conv_states[i]:
                self.conv_states[i].copy_(x.detach())
            self.has_previous_state[i] = True

    def _record(self, inputs: Tensor, batch: int) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "a compiled forward cannot record its past; decode with the model that is not compiled"
            )
        if len(inputs) != batch:
            raise ValueError(
                "a padded batch cannot be rolled back; pass one sequence at a time, or no attention_mask"
            )
        if not self.inputs:
            state = self.load()
            self.snapshot = None if state is None else state.map(Tensor.clone)
        self.inputs.append(inputs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, which must have been recorded."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
        if not self.record_past:
            raise RuntimeError(
                "this cache does not record its past, so it cannot be cropped; "
                "call activate_past_recording() on it before the tokens that may be removed"
            )
        if tokens_to_remove == 0:
            if self.unread is None:
                self._forget()
            return
        pending = [self.unread] if self.unread is not None else self.inputs
        known = sum(x.shape[1] for x in pending)
        keep = known + tokens_to_remove
        if keep < 0:
            raise ValueError(f"crop({tokens_to_remove}): {known} tokens were recorded since the last crop")
        if self.unread is None:  # the state includes all of them
            if self.snapshot is None:
                LinearAttentionLayer.reset(self)
            else:
                self._store(self.snapshot)
        self._forget()
        self.unread = torch.cat(pending, 1)[:, :keep] if keep else None
        self.seen_tokens += tokens_to_remove

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen_tokens + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        if self.inputs or self.unread is not None:
            raise ValueError("a cache that records its past for a crop cannot be reordered for beam search")

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        self.seen_tokens = 0
        self._forget()


STATIC_LAYER_TYPE_MAPPING["delta_rule"] = DeltaRuleCacheLayer  # its size never grows, so it is static too


def check_cache(cache: Cache, layer_types: list[str], batch: int) -> int:
    """Reject a cache that does not fit the model or the batch; return how many tokens it has seen.

    `transformers` builds its own layer for "linear_attention"; while it is empty, ours replaces it.
    """
    layers = getattr(cache, "layers", None) or []
    linear = [kind in ("delta_rule", "linear_attention") for kind in layer_types]
    for i, layer in enumerate(layers):
        if type(layer) is LinearAttentionLayer and layer.device is None:
            layers[i] = DeltaRuleCacheLayer()
            layers[i].record_past = layer.record_past
    if [isinstance(layer, DeltaRuleCacheLayer) for layer in layers] != linear:
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} with layers {layers}; this model needs "
            f"{len(linear)} layers, {sum(linear)} of them DeltaRuleCacheLayer: "
            "pass DynamicCache(config=model.config)"
        )
    first = layers[linear.index(True)]
    known = len(first.recurrent_states[0]) if first.has_previous_state[0] else batch
    if known != batch:
        raise ValueError(
            f"past_key_values continues {known} sequences; the batch has {batch}: pass the same sequences, "
            f"or a new DynamicCache(config=model.config)"
        )
    return first.seen_tokens
