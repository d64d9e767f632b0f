"""Small models for the tests of this folder."""

import torch
from torch import nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from tests.models.variants import scatter


def qwen3_next() -> nn.Module:
    """Three gated delta rule layers with grouped values, then one of attention."""
    config = Qwen3NextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=6, linear_value_head_dim=10, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return scatter(Qwen3NextForCausalLM(config)).eval()


def kimi_linear() -> nn.Module:
    """Two Kimi Delta Attention layers around one of attention."""
    config = KimiLinearConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8,
        num_local_experts=4, num_experts_per_tok=2, linear_head_dim=6, linear_num_heads=3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return scatter(KimiLinearForCausalLM(config)).eval()
