"""Checkpoints of flash-linear-attention, in and out.

The parameters of its DeltaNet, Gated DeltaNet and KDA models have the names and shapes of ours, so that only
the configuration is translated; those of PGDN's and PKDA's preconditioners have names of their own.  Loading
is strict: a model that would not compute what was trained is refused.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from osdn.layers import PreconditionerConfig
from osdn.models.configuration_osdn import OSDNConfig
from osdn.models.modeling_osdn import OSDNForCausalLM

# model_type: (our backbone, its model class, what it sets by default, the only values that we compute)
FORMATS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
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
        {"safe_gate": False},
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
        {"safe_gate": False, "lower_bound": None},
    ),
}
# What its preconditioner's settings and parameters are called, and what they are called here.
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
    "allow_neg_eigval": False,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "norm_first": False,
    "attn": None,
    "attnres_block_size": None,
}
SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "num_v_heads", "intermediate_size",
    "conv_size", "norm_eps", "initializer_range", "max_position_embeddings", "tie_word_embeddings",
    "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


def load_flash_linear_attention(
    path: str | Path,
    preconditioner: PreconditionerConfig | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> OSDNForCausalLM:
    """A model trained with flash-linear-attention, as it is or with online scaling switched on.

    Args:
        path: a directory or hub name with `config.json` and safetensors.
        preconditioner: settings of the online preconditioner; None keeps the model as it was trained.
        kwargs: passed on to `from_pretrained`, such as `dtype` or `device_map`.
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
        ignore_mismatched_sizes=True,  # so that they are listed below with the rest
        output_loading_info=True,
        **kwargs,
    )
    if names:
        model._weight_conversions = None  # saved again it has our names, not those it was loaded from
    else:
        report["missing_keys"] = {k for k in report["missing_keys"] if ".attn.preconditioner." not in k}
    problems = [
        f"{kind.replace('_keys', '')}: {', '.join(sorted(map(_show, report[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if report[kind]
    ]
    if problems:
        raise ValueError(f"{path} is not a checkpoint of this model: " + "; ".join(problems))
    return model


def save_flash_linear_attention(model: OSDNForCausalLM, path: str | Path) -> None:
    """Save a model without a preconditioner, or with that of PGDN, for flash-linear-attention to load."""
    settings = config_to_flash_linear_attention(model.config)  # refuses before anything is written
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
    """Our configuration for the contents of its `config.json`."""
    kind = settings.get("model_type")
    if kind not in FORMATS:
        raise ValueError(f"model_type is {kind!r}; this loads {', '.join(FORMATS)} of flash-linear-attention")
    backbone, _, defaults, fixed = FORMATS[kind]
    settings = {**defaults, **settings}
    fixed = FIXED | fixed
    if settings.get("intermediate_size") is not None:
        del fixed["hidden_ratio"]  # then it has no effect
    different = [
        f"{k} = {settings[k]!r} (we compute {v!r})" for k, v in fixed.items() if settings.get(k, v) != v
    ]
    if different:
        raise ValueError(f"this {kind} model cannot be loaded: {', '.join(different)}")
    width, heads = settings["hidden_size"], settings["num_heads"]
    key = settings.get("head_dim") or width * settings["expand_k"] / heads
    value = (width / heads if kind == "delta_net" else key) * settings["expand_v"]
    if key != int(key) or value != int(value):
        raise ValueError(f"heads of {key} key and {value} value channels: they must be whole numbers")
    if kind in PGDN_NAMES:
        if preconditioner is not None:
            raise ValueError(
                f"a {kind} model has a preconditioner of its own; load it with preconditioner=None"
            )
        own = {ours: settings[theirs] for theirs, ours in PGDN_SETTINGS.items() if theirs in settings}
        preconditioner = {"rule": "pgdn", **own}
    same = {k: settings[k] for k in SAME if k in settings}
    return OSDNConfig(
        backbone=backbone, preconditioner=preconditioner, head_k_dim=int(key), head_v_dim=int(value), **same
    )


def config_to_flash_linear_attention(config: OSDNConfig) -> dict[str, Any]:
    """The contents of its `config.json` for our configuration."""
    settings = config.preconditioner
    pgdn = settings is not None and settings.get("rule") == "pgdn" and config.backbone != "delta_net"
    if settings is not None and not pgdn:
        raise ValueError(
            "flash-linear-attention has no online preconditioner but that of PGDN and PKDA; save this model "
            "with save_pretrained, or build it with preconditioner=None first"
        )
    if config.update_rule is not None:
        raise ValueError(
            f"update_rule is {config.update_rule!r}; flash-linear-attention is given plain delta rules only: "
            "save this model with save_pretrained"
        )
    if config.beta_bias is not None or config.write_scale != 1:
        raise ValueError(
            f"beta_bias is {config.beta_bias} and write_scale {config.write_scale}; the write gates of "
            "flash-linear-attention have neither: save this model with save_pretrained"
        )
    kind = next(
        kind
        for kind, (backbone, *_) in FORMATS.items()
        if backbone == config.backbone and (kind in PGDN_NAMES) == pgdn
    )
    _, architecture, _, fixed = FORMATS[kind]
    if kind == "delta_net":
        heads = {"expand_k": config.num_heads * config.head_k_dim / config.hidden_size}
        heads["expand_v"] = config.num_heads * config.head_v_dim / config.hidden_size
    else:
        heads = {"head_dim": config.head_k_dim, "expand_v": config.head_v_dim / config.head_k_dim}
    same = {k: getattr(config, k) for k in SAME}
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
