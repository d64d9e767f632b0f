"""Loads and saves checkpoints of flash-linear-attention.

The parameters of its DeltaNet, Gated DeltaNet and KDA models have the same names and shapes as ours, so only
the configuration is translated; the preconditioners of PGDN and PKDA have different names.  Loading is
strict: a model that would not compute what was trained is rejected, and so is a configuration with an unknown
key.  The meaning of the keys is that of version 0.6.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from osdn.layers import PreconditionerConfig
from osdn.models.attention import FULL, SLIDING
from osdn.models.configuration_osdn import OSDNConfig
from osdn.models.modeling_osdn import OSDNForCausalLM

# model_type: (our backbone, its model class, its defaults, the only values that we support)
CHECKPOINT_FORMATS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "delta_net": (
        "delta_net",
        "DeltaNetForCausalLM",
        {"hidden_size": 2048, "num_heads": 16, "num_hidden_layers": 24, "expand_k": 1.0, "expand_v": 1.0},
        {
            "use_gate": False,
            "use_beta": True,
            "use_output_norm": True,
            "qk_norm": "l2",
            "qk_activation": "silu",
        },
    ),
    "gated_deltanet": (
        "gated_delta_net",
        "GatedDeltaNetForCausalLM",
        {"hidden_size": 2048, "num_heads": 6, "num_hidden_layers": 21, "head_dim": 256, "expand_v": 2.0},
        {"use_gate": True},
    ),
    "kda": (
        "kda",
        "KDAForCausalLM",
        {"hidden_size": 2048, "num_heads": 16, "num_hidden_layers": 24, "head_dim": 128, "expand_v": 1.0},
        {},
    ),
    "precond_gated_deltanet": (
        "gated_delta_net",
        "PrecondGatedDeltaNetForCausalLM",
        {"hidden_size": 2048, "num_heads": 6, "num_hidden_layers": 21, "head_dim": 256, "expand_v": 2.0},
        {"use_gate": True},
    ),
    "precond_kda": (
        "kda",
        "PrecondKDAForCausalLM",
        {"hidden_size": 2048, "num_heads": 16, "num_hidden_layers": 24, "head_dim": 128, "expand_v": 1.0},
        {"num_v_heads": None},  # its write gate has one number per key head
    ),
}
# Its names for the preconditioner's settings and parameters, and ours.
PGDN_SETTINGS = {"squash_x": "squash", "squash_eps": "eps", "log_atk_scale_init": "center"}
PGDN_NAMES = {
    "precond_gated_deltanet": {"a_atk_proj.weight": "a_proj.weight"},
    "precond_kda": {"a_proj.weight": "a_proj.weight"},
}
for names in PGDN_NAMES.values():
    names |= {
        "b_atk_proj.weight": "b_proj.weight",
        "A_log_atk": "A_log",
        "dt_bias_atk": "dt_bias",
        "log_atk_scale": "center",
    }
FIXED = {
    "use_short_conv": True,
    "conv_bias": False,
    "hidden_act": "swish",
    "norm_first": False,
    "attnres_block_size": None,
}
SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "intermediate_size",
    "conv_size", "norm_eps", "initializer_range", "max_position_embeddings", "tie_word_embeddings",
    "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "allow_neg_eigval",
)  # fmt: skip
TRANSLATED = ("hidden_ratio", "attn")
OWN: dict[str, tuple[str, ...]] = {  # keys that not all formats have
    "delta_net": ("expand_k", "expand_v"),
    "gated_deltanet": ("head_dim", "expand_v", "num_v_heads", "output_gate_activation"),
    "kda": ("head_dim", "expand_v", "num_v_heads", "lower_bound", "safe_gate"),
    "precond_gated_deltanet": ("head_dim", "expand_v", "num_v_heads", *PGDN_SETTINGS),
    "precond_kda": ("head_dim", "expand_v", "num_v_heads", "lower_bound", "safe_gate", *PGDN_SETTINGS),
}
# Keys about how its kernels run, how it was trained or where it was saved, which do not affect the results.
WITHOUT_EFFECT = (
    "attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
    "a_log_init_lower", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "_name_or_path", "_attn_implementation_autoset", "architectures", "id2label", "label2id", "problem_type",
    "output_hidden_states", "output_attentions", "return_dict", "is_encoder_decoder", "is_decoder",
    "chunk_size_feed_forward", "tokenizer_class", "torchscript", "use_bfloat16",
)  # fmt: skip
ATTENTION = ("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta", "qk_norm")
QK_NORM_EPS = 1e-5  # of its norms of queries and keys


def load_flash_linear_attention(
    path: str | Path,
    preconditioner: PreconditionerConfig | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> OSDNForCausalLM:
    """Load a model trained with flash-linear-attention, unchanged or with online scaling switched on.

    Args:
        path: a directory or hub name with `config.json` and safetensors.
        preconditioner: settings of the online preconditioner; None keeps the model as it was trained.
        kwargs: passed to `from_pretrained`, such as `dtype` or `device_map`.
    """
    settings, _ = PreTrainedConfig.get_config_dict(path)
    config = config_from_flash_linear_attention(settings, preconditioner)
    names = PGDN_NAMES.get(settings["model_type"], {})
    model, report = OSDNForCausalLM.from_pretrained(
        path,
        config=config,
        key_mapping={
            rf"\.attn\.{re.escape(theirs)}$": f".attn.preconditioner.{ours}" for theirs, ours in names.items()
        },
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are reported below with the rest
        output_loading_info=True,
        **kwargs,
    )
    if names:
        model._weight_conversions = None  # save with our names, not those it was loaded from
    else:
        report["missing_keys"] = {k for k in report["missing_keys"] if ".attn.preconditioner." not in k}
    problems = [
        f"{kind.replace('_keys', '')}: {', '.join(sorted(map(_show, report[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if report[kind]
    ]
    if problems:
        raise ValueError(f"the weights of {path} do not fit its config.json: " + "; ".join(problems))
    return model


def save_flash_linear_attention(model: OSDNForCausalLM, path: str | Path) -> None:
    """Save a model for flash-linear-attention; it must have no preconditioner, or that of PGDN."""
    settings = config_to_flash_linear_attention(model.config)  # raises before anything is written
    names = PGDN_NAMES.get(settings["model_type"], {})
    theirs = {f".attn.preconditioner.{ours}": f".attn.{name}" for name, ours in names.items()}
    weights = {}
    for name, x in model.state_dict().items():
        ending = next((ours for ours in theirs if name.endswith(ours)), None)
        weights[name.removesuffix(ending) + theirs[ending] if ending else name] = x
    model.save_pretrained(path, state_dict=weights)
    (Path(path) / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def config_from_flash_linear_attention(
    settings: Mapping[str, Any], preconditioner: PreconditionerConfig | Mapping[str, Any] | None = None
) -> OSDNConfig:
    """Translate its `config.json` into our configuration."""
    kind = settings.get("model_type")
    if kind not in CHECKPOINT_FORMATS:
        raise ValueError(
            f"model_type is {kind!r}; of flash-linear-attention's models, only "
            f"{', '.join(CHECKPOINT_FORMATS)} can be loaded"
        )
    backbone, _, defaults, fixed = CHECKPOINT_FORMATS[kind]
    fixed = FIXED | fixed
    handled = {*SAME, *TRANSLATED, *OWN[kind], *fixed}
    if unknown := sorted(settings.keys() - handled - set(WITHOUT_EFFECT)):
        unknown_settings = ", ".join(f"{k} = {settings[k]!r}" for k in unknown)
        raise ValueError(
            f"this {kind} model cannot be loaded: it has {unknown_settings}, whose meaning is not known; "
            f"known keys are {', '.join(sorted(handled))}, and those without effect are "
            f"{', '.join(WITHOUT_EFFECT)}"
        )
    settings = {**defaults, **settings}
    different = [
        f"{k} = {settings[k]!r} (only {v!r} is supported)"
        for k, v in fixed.items()
        if settings.get(k, v) != v
    ]
    if different:
        raise ValueError(f"this {kind} model cannot be loaded: {', '.join(different)}")
    width, heads = settings["hidden_size"], settings["num_heads"]
    key = settings.get("head_dim") or width * settings["expand_k"] / heads
    value = (width / heads if kind == "delta_net" else key) * settings["expand_v"]
    if key != int(key) or value != int(value):
        raise ValueError(f"heads have {key} key and {value} value channels; these must be whole numbers")
    if kind in PGDN_NAMES:
        if preconditioner is not None:
            raise ValueError(f"a {kind} model already has a preconditioner; load it with preconditioner=None")
        own = {ours: settings[theirs] for theirs, ours in PGDN_SETTINGS.items() if theirs in settings}
        preconditioner = {"rule": "pgdn", **own}
    same = {k: settings[k] for k in (*SAME, "num_v_heads", "output_gate_activation") if k in settings}
    if same.get("output_gate_activation") in ("swish", "silu"):
        del same["output_gate_activation"]  # the default
    if same.get("intermediate_size") is None:
        ratio = settings.get("hidden_ratio")
        same["intermediate_size"] = 256 * -(-int(width * (4 if ratio is None else ratio) * 2 / 3) // 256)
    if settings.get("safe_gate") and settings.get("lower_bound") is None:
        raise ValueError(f"this {kind} model cannot be loaded: safe_gate = True needs a lower_bound")
    return OSDNConfig(
        backbone=backbone,
        preconditioner=preconditioner,
        head_k_dim=int(key),
        head_v_dim=int(value),
        decay_lower_bound=settings.get("lower_bound"),
        **same,
        **_hybrid(settings.get("attn"), settings["num_hidden_layers"]),
    )


def _hybrid(attn: Any, layers: int) -> dict[str, Any]:
    """Translate its `attn` (None, a dictionary or a list of them) into our `layer_types` and `attention`."""
    if not attn:
        return {}
    kinds, attention_settings = ["linear_attention"] * layers, []
    windows = set()
    for spec in [attn] if isinstance(attn, Mapping) else attn:
        if unknown := sorted(set(spec) - set(ATTENTION)):
            raise ValueError(
                f"attn has {', '.join(f'{k} = {spec[k]!r}' for k in unknown)}, whose meaning is not known; "
                f"known keys are {', '.join(ATTENTION)}"
            )
        window = spec.get("window_size")
        for i in spec["layers"]:
            if not 0 <= i < layers:
                raise ValueError(f"attn.layers has {i}; the model has {layers} layers, counted from 0")
            kinds[i] = FULL if window is None else SLIDING
        windows |= {window} - {None}
        settings = {k: spec[k] for k in ("num_heads", "num_kv_heads", "qkv_bias", "qk_norm") if k in spec}
        attention_settings.append(settings | {"rope_theta": spec.get("rope_theta", 10_000.0)})
    if any(settings != attention_settings[0] for settings in attention_settings) or len(windows) > 1:
        raise ValueError(f"attn = {attn!r}: attention layers may only differ in whether they have the window")
    if attention_settings[0]["rope_theta"] is None:
        raise ValueError("attn.rope_theta is None, but attention in flash-linear-attention needs positions")
    norm = {"qk_norm_eps": QK_NORM_EPS} if attention_settings[0].get("qk_norm") else {}
    return {
        "layer_types": kinds,
        "attention": attention_settings[0] | norm | {"window": windows.pop() if windows else None},
    }


def _attn(config: OSDNConfig) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Translate our attention layers into its `attn`."""
    if config.attention is None:
        return None
    settings = config.attention
    supported = {
        "qk_norm": False,
        "output_gate": False,
        "head_dim": config.hidden_size // settings["num_heads"],
    }
    if different := [f"{k} = {settings[k]!r}" for k, v in supported.items() if settings[k] != v]:
        raise ValueError(f"the attention of flash-linear-attention has no {', '.join(different)}")
    if settings["rope_theta"] is None:
        raise ValueError("rope_theta is None, but attention in flash-linear-attention needs positions")
    specs = [
        {
            "layers": [i for i, layer_type in enumerate(config.layer_types) if layer_type == kind],
            "window_size": settings["window"] if kind == SLIDING else None,
            **{k: settings[k] for k in ("num_heads", "num_kv_heads", "qkv_bias", "rope_theta")},
        }
        for kind in (FULL, SLIDING)
        if kind in config.layer_types
    ]
    return specs if len(specs) > 1 else specs[0]


def config_to_flash_linear_attention(config: OSDNConfig) -> dict[str, Any]:
    """Translate our configuration into its `config.json`."""
    settings = config.preconditioner
    pgdn = settings is not None and settings.get("rule") == "pgdn" and config.backbone != "delta_net"
    if settings is not None and not pgdn:
        raise ValueError(
            "flash-linear-attention has no online preconditioner except those of PGDN and PKDA; save this "
            "model with save_pretrained, or build it with preconditioner=None first"
        )
    if config.update_rule is not None:
        raise ValueError(
            f"update_rule is {config.update_rule!r}; only plain delta rules can be saved for "
            "flash-linear-attention: save this model with save_pretrained"
        )
    if config.beta_bias is not None or config.write_scale != 1:
        raise ValueError(
            f"beta_bias is {config.beta_bias} and write_scale is {config.write_scale}; "
            "flash-linear-attention has neither: save this model with save_pretrained"
        )
    kind = next(
        kind
        for kind, (backbone, *_) in CHECKPOINT_FORMATS.items()
        if backbone == config.backbone and (kind in PGDN_NAMES) == pgdn
    )
    _, architecture, _, fixed = CHECKPOINT_FORMATS[kind]
    if kind == "delta_net":
        heads = {"expand_k": config.num_heads * config.head_k_dim / config.hidden_size}
        heads["expand_v"] = config.num_heads * config.head_v_dim / config.hidden_size
    else:
        heads = {"head_dim": config.head_k_dim, "expand_v": config.head_v_dim / config.head_k_dim}
    same = {k: getattr(config, k) for k in SAME} | {"attn": _attn(config), "hidden_ratio": 4}
    if kind != "delta_net":
        same["num_v_heads"] = config.num_v_heads
    if config.backbone == "kda":
        same |= {"lower_bound": config.decay_lower_bound, "safe_gate": False}
    if config.output_gate_activation == "sigmoid":
        if kind != "gated_deltanet":
            raise ValueError(f"a {kind} model of flash-linear-attention has no output_gate_activation")
        same["output_gate_activation"] = "sigmoid"
    if kind == "precond_kda":
        if config.num_v_heads != config.num_heads:
            raise ValueError(
                "a precond_kda model of flash-linear-attention must have as many value heads as key heads"
            )
        same["num_v_heads"] = None
    if pgdn:
        assert settings is not None
        same |= {theirs: settings[ours] for theirs, ours in PGDN_SETTINGS.items()}
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    return {
        **FIXED, **fixed, **same, **heads,
        "model_type": kind, "architectures": [architecture], "dtype": dtype,
    }  # fmt: skip


def _show(key: Any) -> str:
    return key if isinstance(key, str) else " ".join(map(str, key))
