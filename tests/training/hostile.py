"""Malicious checkpoints with valid checksums."""

import io
import os
import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from osdn.training.checkpoints import MANIFEST, publish


class Evil:
    """Unpickling it creates a directory, which proves that a file ran code."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def sign(checkpoint: Path) -> None:
    """Write a manifest for the checkpoint's current contents."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    publish(checkpoint.rename(checkpoint.with_name("unsigned")), checkpoint)


def save_shards(folder: Path, state: dict) -> None:
    """Write what FSDP2 writes, from one process."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def poison(file: Path, proof: Path) -> None:
    """Make a file run code when it is unpickled; in a file of shards, its tensors or values do."""
    if file.suffix == ".distcp":
        _poison_entries(file, proof)
    elif file.name == ".metadata":
        file.write_bytes(pickle.dumps(Evil(proof)))
    else:
        torch.save({"state": {}, "param_groups": Evil(proof)}, file)


def _poison_entries(file: Path, proof: Path) -> None:
    payload = io.BytesIO()
    torch.save(Evil(proof), payload)
    index = pickle.loads((file.parent / ".metadata").read_bytes())
    for info in index.storage_data.values():
        if info.relative_path == file.name:
            info.offset, info.length = file.stat().st_size, len(payload.getvalue())
    file.write_bytes(file.read_bytes() + payload.getvalue())
    (file.parent / ".metadata").write_bytes(pickle.dumps(index))
