"""Checkpoints that are whole or not there.

A checkpoint is written aside, its files are listed with their checksums, everything is forced to the disk,
and only then does a rename give it its name.  A process killed at any moment leaves the checkpoints it had;
one that the disk damaged later is found out by its checksums, and the one before it is used.
"""

import hashlib
import json
import logging
import os
import shutil
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoTokenizer

from osdn.models import OSDNConfig, OSDNForCausalLM

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STAGING = ".writing"
SHARDS = "pytorch_model_fsdp_0"  # accelerate's name for a model's shards


def publish(staged: Path, final: Path) -> None:
    """Give a directory that was written aside its name; afterwards it is there, whole, whatever happens."""
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    digests = {path.relative_to(staged).as_posix(): _digest(path) for path in files}
    (staged / MANIFEST).write_text(json.dumps(digests, indent=1))
    for path in [*staged.rglob("*"), staged]:
        _flush(path)
    if final.exists():  # a damaged one, which this replaces
        shutil.rmtree(final)
    staged.rename(final)
    _flush(final.parent)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        digests = json.loads((checkpoint / MANIFEST).read_text())
        for name, digest in digests.items():
            if _digest(checkpoint / name) != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return None


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [path for path in run.glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def is_sharded(checkpoint: Path) -> bool:
    return (checkpoint / SHARDS).is_dir()


def newest_good(run: Path) -> Path | None:
    """The newest checkpoint that is not damaged; says which ones are."""
    for checkpoint in checkpoints(run):
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning("%s is damaged (%s); looking for the one before it", checkpoint, reason)
    return None


def prune(run: Path, keep: int) -> None:
    for checkpoint in checkpoints(run)[keep:]:
        # renamed first: what a kill leaves half deleted must not look like a checkpoint
        doomed = run / STAGING / f"old-{checkpoint.name}"
        doomed.parent.mkdir(exist_ok=True)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def write_text(path: Path, text: str) -> None:
    """Replace a file by another at once."""
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
        raise FileExistsError(f"{output} exists; choose another name or remove it")
    model = OSDNForCausalLM(OSDNConfig.from_pretrained(checkpoint))
    if is_sharded(checkpoint):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what we want
            dcp.load({"model": model.state_dict()}, checkpoint_id=checkpoint / SHARDS, no_dist=True)
    else:
        files = sorted(checkpoint.glob("model*.safetensors"))
        weights = {k: v for file in files for k, v in load_file(file).items()}
        if model.config.tie_word_embeddings:  # one tensor, saved once
            weights.setdefault("lm_head.weight", weights["model.embeddings.weight"])
        model.load_state_dict(weights)
    staged = output.with_name(f".{output.name}.writing")
    try:
        shutil.rmtree(staged, ignore_errors=True)
        model.save_pretrained(staged)
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(staged)
        for path in [*staged.iterdir(), staged]:
            _flush(path)
        staged.rename(output)
    except Exception as error:  # every library has its own for a full disk
        shutil.rmtree(staged, ignore_errors=True)
        raise OSError(f"{output} could not be written: {error}") from error
    return output


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
