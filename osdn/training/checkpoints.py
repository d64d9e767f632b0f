"""Checkpoints are either complete or absent.

A checkpoint is written to a staging directory, its files are listed with their checksums, everything is
flushed to disk, and only then is it renamed to its final name.  Killing the process at any moment leaves the
earlier checkpoints intact.  If a disk damages one later, its checksums reveal that, and the previous one is
used.  Reading a checkpoint never runs code from it, wherever it comes from.
"""

import hashlib
import json
import logging
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.trainer_pt_utils import safe_globals

from osdn.models import OSDNConfig, OSDNForCausalLM
from osdn.terminal import printable
from osdn.training.shards import INDEX, check_shards, load_shards

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STAGING = ".writing"
SHARDS, OPTIMIZER_SHARDS = "pytorch_model_fsdp_0", "optimizer_0"  # accelerate's names for them
POSITION = "position.json"
# What a manifest must list: one of the alternatives in each tuple; names can be patterns.
MODEL_FILES = (("config.json",), ("model*.safetensors",))
CHECKPOINT_FILES = (
    ("config.json",),
    ("trainer_state.json",),
    (POSITION,),
    ("scheduler.pt",),
    ("optimizer.pt", f"{OPTIMIZER_SHARDS}/{INDEX}"),
    ("model*.safetensors", f"{SHARDS}/{INDEX}"),
)


def publish(staged: Path, final: Path) -> None:
    """Move a staged directory to its final name; from then on it is complete, whatever happens."""
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    digests = {path.relative_to(staged).as_posix(): _digest(path) for path in files}
    (staged / MANIFEST).write_text(json.dumps(digests, indent=1))
    for path in [*staged.rglob("*"), staged]:
        _flush(path)
    if final.exists():  # it is damaged and gets replaced
        shutil.rmtree(final)
    staged.rename(final)
    _flush(final.parent)


def damage(folder: Path, needed: tuple[tuple[str, ...], ...] = CHECKPOINT_FILES) -> str | None:
    """What is wrong with a checkpoint or a model's directory; None if nothing is."""
    name = MANIFEST
    try:
        digests = json.loads((folder / MANIFEST).read_text())
        for either in needed:
            if not any(fnmatch(listed, pattern) for listed in digests for pattern in either):
                return f"{MANIFEST} does not list {' or '.join(either)}"
        for name, digest in digests.items():
            path = folder / name
            if ".." in path.parts or folder not in path.parents or not path.is_file():
                return f"{name} is missing"
            if _digest(path) != digest:
                return f"{name} has changed since it was written"
            _check_readable(path)
    except Exception as error:  # a malicious file may raise anything
        return f"{name}: {error}"
    return None


def _check_readable(path: Path) -> None:
    """Raise an error for a file that its reader would reject; no reader runs code from a file."""
    if path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".safetensors":
        with safe_open(path, framework="pt"):
            pass
    elif path.suffix in (".pt", ".pth"):
        with safe_globals():  # for NumPy's random states
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    elif path.name == INDEX:
        check_shards(path.parent)


def set_aside(path: Path) -> None:
    """Rename a damaged directory, so that its name is free again and nothing is lost."""
    aside, count = path.with_name(f"damaged-{path.name}"), 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"damaged-{path.name}-{count}")
    path.rename(aside)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    paths = [path for path in run.glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    return sorted(paths, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def is_sharded(checkpoint: Path) -> bool:
    return (checkpoint / SHARDS).is_dir()


def newest_good(run: Path) -> Path | None:
    """The newest checkpoint that is not damaged; warns about those that are."""
    for checkpoint in checkpoints(run):
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning("%s is damaged (%s); trying the previous one", checkpoint, printable(reason))
    return None


def prune(run: Path, keep: int) -> None:
    for checkpoint in checkpoints(run)[keep:]:
        # rename first: if killed now, the half-deleted directory must not look like a checkpoint
        doomed = run / STAGING / f"old-{checkpoint.name}"
        doomed.parent.mkdir(exist_ok=True)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    _flush(partial)
    partial.replace(path)


def convert(checkpoint: str | Path, output: str | Path) -> Path:
    """Turn a training checkpoint, sharded or not, into a directory for `from_pretrained`."""
    checkpoint, output = Path(checkpoint), Path(output)
    if not (checkpoint / MANIFEST).is_file():
        raise FileNotFoundError(f"{checkpoint} is not a checkpoint of `osdn train`: it has no {MANIFEST}")
    if (reason := damage(checkpoint)) is not None:
        raise ValueError(f"{checkpoint} is damaged: {reason}")
    if output.exists():
        raise FileExistsError(f"{output} already exists; choose another name or remove it")
    try:
        model = OSDNForCausalLM(OSDNConfig.from_pretrained(checkpoint))
        _load_weights(model, checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except Exception as error:  # the files are intact, but do not belong together
        raise ValueError(f"{checkpoint} does not contain a model that can be loaded: {error}") from error
    staged = output.with_name(f".{output.name}.writing")
    try:
        shutil.rmtree(staged, ignore_errors=True)
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        publish(staged, output)
    except Exception as error:  # each library raises its own error for a full disk
        shutil.rmtree(staged, ignore_errors=True)
        raise OSError(f"{output} could not be written: {error}") from error
    return output


def _load_weights(model: OSDNForCausalLM, checkpoint: Path) -> None:
    if is_sharded(checkpoint):
        load_shards(checkpoint / SHARDS, {"model": model.state_dict()}, alone=True)
        return
    files = sorted(checkpoint.glob("model*.safetensors"))
    weights = {k: v for file in files for k, v in load_file(file).items()}
    if model.config.tie_word_embeddings:  # it is a single tensor, saved once
        weights.setdefault("lm_head.weight", weights["model.embeddings.weight"])
    model.load_state_dict(weights)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
