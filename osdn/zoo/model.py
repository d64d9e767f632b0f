"""A language model built on any row: the project's own blocks, with the row as their token mixer.

Embedding, norms, SwiGLU and head are those of `OSDNForCausalLM`, so rows differ from its variants, and from
each other, only in the recurrence.
"""

from typing import Any

from torch import Tensor, nn

from osdn.models import OSDNConfig, OSDNForCausalLM
from osdn.zoo.mixer import RecurrentMixer


class BlockMixer(nn.Module):
    """Gives a `RecurrentMixer` the signature that blocks expect; it handles whole sequences only."""

    def __init__(self, mixer: RecurrentMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, None]:
        if state is not None or output_final_state:
            raise ValueError("a row of the zoo has no cache: pass use_cache=False")
        if cu_seqlens is not None:
            raise ValueError("a row of the zoo needs sequences of equal length, without padding or packing")
        return self.mixer(x), None


def causal_lm(name: str, config: OSDNConfig, num_slots: int = 64) -> OSDNForCausalLM:
    """The model of `config` with the row called `name` in place of its mixers."""
    model = OSDNForCausalLM(config)
    model.config.use_cache = False
    for block in model.model.layers:
        block.attn = BlockMixer(
            RecurrentMixer(
                name,
                config.hidden_size,
                config.num_heads,
                config.head_k_dim,
                config.head_v_dim,
                num_slots,
                config.conv_size,
            )
        )
    return model
