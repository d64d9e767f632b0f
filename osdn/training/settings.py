"""The settings of a run: plain dataclasses read from a YAML file.

Nothing has a default.  A file that is accepted says all there is to say about a run, so that a run does not
change when this code does; a key that is missing, unknown or of the wrong type is refused by its name.
"""

import math
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from osdn.models import OSDNConfig

T = TypeVar("T")


@dataclass(frozen=True)
class DataSettings:
    source: str  # stdlib, a file, a directory, or a data set of the hub
    name: str | None  # its configuration, for a data set of the hub
    split: str
    text_column: str
    streaming: bool  # read as needed, rather than tokenise and cache all of it first
    tokenizer: str  # bytes, a directory, or a name on the hub
    seq_len: int  # tokens a device reads at once, whole documents and pieces of them packed end to end
    context_len: int  # longer documents are split

    def __post_init__(self) -> None:
        _positive("data", self, "seq_len", "context_len")
        if self.context_len < 2:
            raise ValueError("data.context_len is 1; a piece of one token has nothing to predict")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, and a cosine from `learning_rate` to `min_lr_ratio` of it after a linear warm-up."""

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
            raise ValueError(f"optimizer.betas is {self.betas}; it must be two numbers from 0 up to 1")
        if not math.isfinite(self.learning_rate):
            raise ValueError(f"optimizer.learning_rate is {self.learning_rate}; it must be finite")
        for name in ("min_lr_ratio", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True)
class TrainingSettings:
    steps: int
    tokens_per_step: int  # over all devices and accumulated batches
    seed: int
    precision: str  # bfloat16 (on a GPU: mixed, with float32 reductions) or float32
    parallelism: str  # of several devices: ddp or fsdp2
    gradient_checkpointing: bool
    max_skipped_steps: (
        int  # steps with a gradient that is not finite are skipped; more than this stop the run
    )

    def __post_init__(self) -> None:
        _positive("training", self, "steps", "tokens_per_step")
        _one_of("training.precision", self.precision, "bfloat16", "float32")
        _one_of("training.parallelism", self.parallelism, "ddp", "fsdp2")


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
class Settings:
    """All of a run; `model` is a preset's name under "preset" and any field of `OSDNConfig` to replace."""

    output_dir: str
    model: dict[str, Any]
    data: DataSettings
    optimizer: OptimizerSettings
    training: TrainingSettings
    checkpoints: CheckpointSettings
    logging: LoggingSettings

    def model_config(self) -> OSDNConfig:
        replaced = dict(self.model)
        preset = replaced.pop("preset", None)
        _known("model", replaced, [field.name for field in fields(OSDNConfig)])
        replaced = {"max_position_embeddings": self.data.context_len, **replaced}
        return OSDNConfig(**replaced) if preset is None else OSDNConfig.from_preset(preset, **replaced)

    def accumulation(self, devices: int) -> int:
        """How many batches each device reads before a step of the optimizer."""
        tokens, batch = self.training.tokens_per_step, self.data.seq_len * devices
        if tokens % batch:
            raise ValueError(
                f"training.tokens_per_step is {tokens:,}, which is not a multiple of the {batch:,} tokens "
                f"that {devices} device{'s' * (devices > 1)} of data.seq_len {self.data.seq_len:,} take"
            )
        return tokens // batch

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)


def load_settings(path: str | Path, replacements: Sequence[str] = ()) -> Settings:
    """Read a YAML file; `replacements` are of the form "training.steps=100", their values YAML as well."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no config {path}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{path} is a directory; name a config in it") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold keys and values")
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
    settings = _build(Settings, content, "")
    settings.model_config()  # a model that cannot be built is refused before anything else happens
    return settings


def _build(cls: type[T], content: Any, prefix: str) -> T:
    if not isinstance(content, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'the config'} must hold keys and values, got {content!r}")
    assert is_dataclass(cls)
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    _known(prefix.rstrip("."), content, names)
    if missing := [prefix + name for name in names if name not in content]:
        raise ValueError(f"{', '.join(missing)} must be set: a config has no defaults")
    values = {name: _value(prefix + name, content[name], hints[name]) for name in names}
    return cls(**values)


def _value(name: str, value: Any, kind: Any) -> Any:
    """`value` if it is of the type, else an error; YAML reads 1e-3 as a string, which is let pass."""
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
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ValueError(f"unknown key {f'{section}.' if section else ''}{key}; {hint}")


def _positive(section: str, settings: Any, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:
            raise ValueError(f"{section}.{name} is {getattr(settings, name)}; it must be positive")


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
