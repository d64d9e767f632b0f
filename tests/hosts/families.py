"""The eight families at tiny size, with odd shapes and parameters far from their initial values."""

import importlib

import torch
from transformers import PreTrainedModel

from osdn.hosts.names import FAMILIES
from tests.models.variants import scatter

BASE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GDN = {
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10,
}  # fmt: skip
KDA = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "linear_head_dim": 6, "linear_num_heads": 3, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
QWEN4 = {
    "hc_count": 2, "hc_lowrank": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 64, "indexer_compress_ratio": 4,
}  # fmt: skip
GLM = {
    "qk_rope_head_dim": 0, "q_lora_rank": 8, "n_routed_experts": 4, "index_topk": 64, "index_kpool": 4,
    "index_head_dim": 8, "index_n_heads": 2, "hc_mult": 2,
}  # fmt: skip
EYES = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 28, "out_hidden_size": 32,
    "intermediate_size": 16, "projection_intermediate_size": 16,
}  # fmt: skip
# family: the names of its configuration and model, settings, and its name for attention
KINDS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", GDN | MOE, "full_attention"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", GDN, "full_attention"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", GDN | MOE, "full_attention"),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", GDN | MOE | QWEN4, "indexed_attention"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", GDN, "full_attention"),
    "kimi_linear": (
        "KimiLinearConfig", "KimiLinearForCausalLM", KDA | {"num_local_experts": 4}, "full_attention",
    ),
    "bailing_hybrid": (
        "BailingHybridConfig", "BailingHybridForCausalLM",
        KDA | {"num_local_experts": 4, "first_k_dense_replace": 1}, "full_attention",
    ),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextForConditionalGeneration", KDA | GLM, "indexed_attention"),
}  # fmt: skip
assert tuple(KINDS) == FAMILIES


def module(family: str):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def make(family: str, attention: bool = True) -> PreTrainedModel:
    """Two delta-rule layers, optionally around an attention layer, in evaluation mode."""
    config_name, model_name, settings, kind = KINDS[family]
    layers = ["linear_attention", *([kind] if attention else []), "linear_attention"]
    configurations = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(configurations, config_name)(
        **(BASE | settings | {"layer_types": layers, "num_hidden_layers": len(layers)})
    )
    if family == "glm5_next":
        config = configurations.Glm5NextConfig(text_config=config, vision_config=EYES)
    config._experts_implementation = "eager"  # supports float64
    torch.manual_seed(0)
    return scatter(getattr(module(family), model_name)(config)).eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(seed))
