"""Every variant, ablation and rule of phase 1: small, with odd shapes, far from the initial values."""

import torch

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.models.presets import VARIANTS as PRESET_VARIANTS

STRONG = 2.0  # a step size that takes the scale to its bounds within a few tokens
VARIANTS = {name: (backbone, settings, {}) for name, (backbone, settings) in PRESET_VARIANTS.items()}
VARIANTS |= {
    "osdn, constant retention": ("delta_net", {"retention": 0.9}, {}),
    "osdn, D0": ("delta_net", {"initial_scale": "projected"}, {}),
    "osdn, free D0": ("delta_net", {"initial_scale": "free"}, {}),
    "osdn, blind to beta": ("delta_net", {"beta_aware": False, "retention": "learned"}, {}),
    "osdn, unbounded": ("delta_net", {"bounds": None}, {}),
    "osgdn, learned retention": ("gated_delta_net", {"retention": "learned"}, {}),
    "osgdn-apf, grouped values": ("gated_delta_net", {"retention": "tied"}, {"num_v_heads": 6}),
    "oskda, retention per channel": ("kda", {"retention": "learned_per_channel"}, {}),
    "oskda, tied retention": ("kda", {"retention": "tied"}, {}),
    "oskda-apf, grouped values, bounded decay, strong writes": (
        "kda",
        {"retention": "learned"},
        {"num_v_heads": 6, "decay_lower_bound": -3.0, "allow_neg_eigval": True},
    ),
    "osdn-newton, one block": (
        "delta_net",
        {"rule": "newton", "block_size": 10, "retention": "learned", "prior": 2.0},
        {"beta_bias": -1.0},
    ),
    "osgdn-newton, blocks, grouped values": (
        "gated_delta_net",
        {"rule": "newton", "block_size": 2, "retention": "tied"},
        {"num_v_heads": 6, "write_scale": 2.0},
    ),
    "oskda-newton, blocks": ("kda", {"rule": "newton", "block_size": 3, "retention": "tied"}, {}),
    "pgdn on delta_net": ("delta_net", {"rule": "pgdn"}, {}),
    "pgdn, grouped values": ("gated_delta_net", {"rule": "pgdn", "squash": 2.0}, {"num_v_heads": 6}),
    "pkda": ("kda", {"rule": "pgdn"}, {"beta_bias": 0.5}),
    "delta_net, write gate": ("delta_net", None, {"beta_bias": -2.0, "write_scale": 0.5}),
    "osdn-apf, hybrid": (
        "delta_net",
        {"retention": "learned"},
        {
            "layer_types": ["linear_attention", "full_attention"],
            "attention": {"num_heads": 3, "num_kv_heads": 1, "qk_norm": True},
        },
    ),
    "osgdn-apf, sliding hybrid": (
        "gated_delta_net",
        {"retention": "tied"},
        {
            "layer_types": ["sliding_attention", "linear_attention"],
            "attention": {
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 6,
                "window": 4,
                "qkv_bias": True,
                "rope_theta": 100.0,
            },
        },
    ),
    "oskda, hybrid without positions": (
        "kda",
        {},
        {
            "layer_types": ["linear_attention", "full_attention"],
            "attention": {"num_heads": 2, "output_gate": True, "rope_theta": None},
        },
    ),
    "longhorn": ("delta_net", None, {"update_rule": "longhorn"}),
    "efla": ("delta_net", None, {"update_rule": "efla", "beta_bias": -1.0}),
    "kaczmarz, grouped values": ("gated_delta_net", None, {"update_rule": "kaczmarz", "num_v_heads": 6}),
    "comba": ("gated_delta_net", None, {"update_rule": "comba"}),
    "gdn2": ("kda", None, {"update_rule": "gdn2"}),
    "delta product": ("gated_delta_net", None, {"update_rule": "product-2", "num_v_heads": 6}),
}
HYBRIDS = [name for name in VARIANTS if "hybrid" in name]


# The variants that some analyses are about: those with the paper's rule or no rule at all.
ONLINE_SCALING = [
    name
    for name, (_, settings, shape) in VARIANTS.items()
    if "rule" not in (settings or {}) and "update_rule" not in shape
]


def make_config(variant: str, **overrides) -> OSDNConfig:
    backbone, settings, shape = VARIANTS[variant]
    if settings is not None and "rule" not in settings:
        settings = {"eta": STRONG} | settings
    sizes = {
        "hidden_size": 30,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "vocab_size": 61,
        "intermediate_size": 40,
    }
    if backbone != "delta_net":
        sizes |= {"head_k_dim": 6, "head_v_dim": 11}
    return OSDNConfig(**({"backbone": backbone, "preconditioner": settings} | sizes | shape | overrides))


def make(variant: str, seed: int = 0, **overrides) -> OSDNForCausalLM:
    """A model in evaluation mode, all of whose layers affect the logits."""
    return scatter(OSDNForCausalLM(make_config(variant, **overrides)), seed).eval()


@torch.no_grad()
def scatter(model, seed: int = 0):
    """Redraw every parameter with a magnitude that matters, whatever its initial value."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        fan_in = 1 if p.ndim == 1 or name.endswith(("embeddings.weight", "log_scale")) else p.shape[-1]
        draw = torch.randn(p.shape, generator=generator) * fan_in**-0.5
        offset = {"norm.weight": 1.0, "retention.bias": 2.0, "dt_bias": -2.0}
        p.copy_(draw * (0.3 if p.ndim == 1 else 1.0) + sum(v for k, v in offset.items() if name.endswith(k)))
    return model


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(seed))
