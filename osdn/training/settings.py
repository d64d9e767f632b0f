"""The settings of a run: plain dataclasses read from a YAML file.

Nothing has a default.  A config, together with the one it names under `base`, specifies a run completely, so
that a run does not change when this code does.  The error for a missing, unknown or mistyped key names it.
"""

import math
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from osdn.models import PRESETS, OSDNConfig

T = TypeVar("T")

CONFIGS = Path(__file__).parent / "configs"  # shipped configs; their bases start with an underscore


@dataclass(frozen=True)
class DataSettings:
    source: str  # stdlib, installed, a file, a directory, or a data set on the hub
    name: str | None  # the configuration of a data set on the hub
    split: str
    text_column: str
    streaming: bool  # read as needed instead of tokenising and caching everything first
    tokenizer: str  # bytes, a directory, or a name on the hub
    seq_len: int  # tokens per device and batch; documents and pieces of them are packed end to end
    context_len: int  # longer documents are split
    shuffle: int | None  # pieces move by less than this, null is anywhere; the buffer's size for a stream

    def __post_init__(self) -> None:
        _positive("data", self, "seq_len", "context_len", *["shuffle"] * (self.shuffle is not None))
        if self.context_len < 2:
            raise ValueError("data.context_len is 1; it must be at least 2, or there is nothing to predict")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a linear warm-up, then a cosine from `learning_rate` down to `min_lr_ratio` of it."""

    learning_rate: float
    min_lr_ratio: float
    warmup_steps: int
    betas: list[float]
    eps: float
    weight_decay: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        _positive("optimizer", self, "learning_rate", "max_grad_norm")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {self.betas}; it must be two numbers in [0, 1)")
        if not math.isfinite(self.learning_rate):
            raise ValueError(f"optimizer.learning_rate is {self.learning_rate}; it must be finite")
        for name in ("min_lr_ratio", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; it must not be negative")

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate after `step` of `steps` steps."""
        if step < self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        share = (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)


@dataclass(frozen=True)
class TrainingSettings:
    steps: int
    tokens_per_step: int  # over all devices and accumulated batches
    seed: int
    precision: str  # bfloat16 (mixed, with float32 weights and reductions), float32, or auto: the faster
    parallelism: str  # ddp or fsdp2, with several devices
    gradient_checkpointing: bool
    max_skipped_steps: int  # steps without a finite gradient are skipped; more than this stop the run

    def __post_init__(self) -> None:
        _positive("training", self, "steps", "tokens_per_step")
        _one_of("training.precision", self.precision, "auto", "bfloat16", "float32")
        _one_of("training.parallelism", self.parallelism, "ddp", "fsdp2")


@dataclass(frozen=True)
class ValidationSettings:
    split: str | None  # a held-out split of data.source; None disables validation
    every: int  # steps; 0 is only at the end
    tokens: int  # of the split, rounded up to batches of data.seq_len; the same ones every time

    def __post_init__(self) -> None:
        _positive("validation", self, "tokens")
        if self.every < 0:
            raise ValueError(f"validation.every is {self.every}; it must not be negative")


@dataclass(frozen=True)
class CheckpointSettings:
    every: int
    keep: int

    def __post_init__(self) -> None:
        _positive("checkpoints", self, "every", "keep")


@dataclass(frozen=True)
class LoggingSettings:
    every: int
    diagnostics_every: int  # residual ratio and scale of every layer; 0 is never

    def __post_init__(self) -> None:
        _positive("logging", self, "every")


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run; `model` names a "preset" and any fields of `OSDNConfig` that replace its own."""

    name: str  # of the run and its model, in every result
    output_dir: str
    model: dict[str, Any]
    data: DataSettings
    optimizer: OptimizerSettings
    training: TrainingSettings
    validation: ValidationSettings
    checkpoints: CheckpointSettings
    logging: LoggingSettings

    def __post_init__(self) -> None:
        plain = self.name == self.name.strip(" .") and self.name.isprintable() and not {*self.name} & {*"/\\"}
        if not self.name or not plain:
            raise ValueError(
                f"name is {self.name!r}; it is also used for files, so it must not be empty, contain slashes "
                f"or control characters, or start or end with a dot or a space"
            )
        if self.validation.split == self.data.split:
            raise ValueError(
                f"validation.split and data.split are both {self.data.split!r}; validate on a held-out "
                f"split, or set validation.split to null"
            )

    def model_config(self) -> OSDNConfig:
        replaced = dict(self.model)
        preset = replaced.pop("preset", None)
        known = {field.name for field in fields(OSDNConfig)} | set(OSDNConfig.own_fields())
        _known("model", replaced, sorted(known - {"run_name"}))
        replaced = {"max_position_embeddings": self.data.context_len, "run_name": self.name, **replaced}
        if preset is None:
            return OSDNConfig(**replaced)
        return OSDNConfig.from_preset(preset, **_completed(replaced, PRESETS.get(preset, {})))

    def accumulation(self, devices: int) -> int:
        """How many batches each device reads per optimizer step."""
        tokens, batch = self.training.tokens_per_step, self.data.seq_len * devices
        if tokens % batch:
            raise ValueError(
                f"training.tokens_per_step is {tokens:,}, which is not a multiple of the {batch:,} tokens "
                f"that {devices} device{'s' * (devices > 1)} read with data.seq_len {self.data.seq_len:,}"
            )
        return tokens // batch

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)


def _completed(replaced: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    """`replaced`, where a preconditioner of the same rule keeps the settings that are not replaced."""
    result = dict(replaced)
    for name in replaced.keys() & preset.keys():
        before, after = preset[name], replaced[name]
        if not (isinstance(before, dict) and isinstance(after, dict)):
            continue
        if after.get("rule", before.get("rule")) == before.get("rule"):
            result[name] = before | after
    return result


def config_names() -> list[str]:
    """The names of the shipped configs, such as "tiny/osdn"."""
    paths = CONFIGS.glob("*/[!_]*.yaml")
    return sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in paths)


def load_settings(config: str | Path, replacements: Sequence[str] = ()) -> RunSettings:
    """Read a YAML file, or a shipped config by its name.

    `replacements` have the form "training.steps=100"; the values are YAML.
    """
    content = _resolved(_find(str(config), Path()), [])
    for replacement in replacements:
        name, equals, value = replacement.partition("=")
        if not equals:
            raise ValueError(f"{replacement!r} must be of the form section.key=value")
        *sections, key = name.split(".")
        section = content
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ValueError(f"{replacement!r}: {part} is a value, not a section")
        try:
            section[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{replacement!r}: {value!r} is not YAML") from None
    settings = _build(RunSettings, content, "")
    settings.model_config()  # reject an impossible model before anything else happens
    return settings


def _find(config: str, folder: Path) -> Path:
    """The file of a config: a path relative to `folder`, or the name of a shipped config."""
    path = folder / config
    if path.is_file():
        return path
    if config in config_names():
        return CONFIGS / f"{config}.yaml"
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a config in it")
    sizes: dict[str, list[str]] = {}
    for name in config_names():
        size, _, model = name.partition("/")
        sizes.setdefault(size, []).append(model)
    shipped = "".join(f"\n  {size}/ {', '.join(models)}" for size, models in sizes.items())
    raise FileNotFoundError(f"there is no config {path}; name a file or one of the shipped configs:{shipped}")


def _resolved(path: Path, above: list[Path]) -> dict[str, Any]:
    """The contents of a config merged with those of its base; `above` are the configs that led here."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain keys and values")
    if "base" not in content:
        return content
    base = content.pop("base")
    if not isinstance(base, str):
        raise ValueError(f"{path}: base is {base!r}; it must be a file or the name of a shipped config")
    above = [*above, path.resolve()]
    try:
        base_path = _find(base, path.parent)
    except OSError as error:
        raise type(error)(f"{path}: base is {base}, but {error}") from None
    if base_path.resolve() in above:
        raise ValueError(f"{path}: base is {base}, which leads back to this file")
    return _overlay(_resolved(base_path, above), content)


def _overlay(base: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """`content`, completed section by section from `base`."""
    both = base | content
    for key in base.keys() & content.keys():
        if isinstance(base[key], dict) and isinstance(content[key], dict):
            both[key] = _overlay(base[key], content[key])
    return both


def _build(cls: type[T], content: Any, prefix: str) -> T:
    if not isinstance(content, dict):
        raise ValueError(
            f"{prefix.rstrip('.') or 'the config'} must contain keys and values, got {content!r}"
        )
    assert is_dataclass(cls)
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    _known(prefix.rstrip("."), content, names)
    if missing := [prefix + name for name in names if name not in content]:
        raise ValueError(f"{', '.join(missing)} must be set: a config has no defaults")
    values = {name: _value(prefix + name, content[name], hints[name]) for name in names}
    return cls(**values)


def _value(name: str, value: Any, kind: Any) -> Any:
    """Check the type of `value`; a string such as "1e-3", as YAML reads it, is accepted as a float."""
    if is_dataclass(kind):
        return _build(kind, value, f"{name}.")  # type: ignore[arg-type]
    if get_origin(kind) is types.UnionType:
        return None if value is None else _value(name, value, get_args(kind)[0])
    if get_origin(kind) is list and isinstance(value, list):
        return [_value(name, x, get_args(kind)[0]) for x in value]
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    plain = get_origin(kind) or kind
    if not isinstance(value, plain) or (plain is int and isinstance(value, bool)):
        raise ValueError(f"{name} is {value!r}; it must be of type {plain.__name__}")
    return value


def _known(section: str, content: dict[str, Any], names: list[str]) -> None:
    for key in content:
        if key not in names:
            near = get_close_matches(str(key), names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
            raise ValueError(f"unknown key {f'{section}.' if section else ''}{key}; {hint}")


def _positive(section: str, settings: Any, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:
            raise ValueError(f"{section}.{name} is {getattr(settings, name)}; it must be positive")


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
