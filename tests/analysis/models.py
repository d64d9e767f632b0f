"""Small models for the tests of this folder."""

from functools import cache
from pydoc_data import topics

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from osdn import OSDNConfig, OSDNForCausalLM
from tests.models.variants import scatter


def qwen3_next() -> nn.Module:
    """Three gated delta rule layers with grouped values, then an attention layer."""
    config = Qwen3NextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=6, linear_value_head_dim=10, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return scatter(Qwen3NextForCausalLM(config)).eval()


def kimi_linear() -> nn.Module:
    """Two Kimi Delta Attention layers around an attention layer."""
    config = KimiLinearConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8,
        num_local_experts=4, num_experts_per_tok=2, linear_head_dim=6, linear_num_heads=3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return scatter(KimiLinearForCausalLM(config)).eval()


@cache
def trained(variant: str, steps: int) -> tuple[OSDNForCausalLM, Tensor]:
    """A tiny byte-level model trained on Python's documentation, and a passage repeated once."""
    text = torch.tensor(list(" ".join(" ".join(topics.topics.values()).split()).encode()))
    torch.manual_seed(0)
    model = OSDNForCausalLM(OSDNConfig.from_preset(f"{variant}-tiny", vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - 128, (8,))
        batch = torch.stack([text[i : i + 128] for i in starts])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    passage = text[7000:7200]
    return model.eval(), torch.cat([passage, passage])[None]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
