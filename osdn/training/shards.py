"""Reads the shards of a distributed checkpoint without running code from them.

PyTorch reads the index of a sharded checkpoint (`.metadata`), and every entry that is not a tensor, with
`pickle`, which runs whatever code a file names.  Here the index may only name the classes that PyTorch itself
writes into it, and entries may only be plain values.
"""

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

INDEX = ".metadata"


def load_shards(folder: Path, state: dict[str, Any], alone: bool = False) -> None:
    """Fill `state` from the shards in a folder, in all processes together or in this one alone."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(state, storage_reader=_Reader(folder), planner=_Planner(), no_dist=alone)
    except CheckpointException as error:  # not a subclass of Exception
        reasons = "; ".join(sorted({str(reason) for reason, _ in error.failures.values()}))
        raise ValueError(f"the shards in {folder} cannot be read: {reasons}") from error


def check_shards(folder: Path) -> None:
    """Read everything in a folder of shards; raise an error if PyTorch would not have written it."""
    for info in _Reader(folder).read_metadata().storage_data.values():
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> index.Metadata:
        with Path(self.path, INDEX).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, index.Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError(f"{INDEX} is not the index of a sharded checkpoint")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{INDEX} names {info.relative_path!r}, which is not in the same folder")
        return metadata


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Pass on plain values only; the base class would unpickle anything."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _Unpickler(pickle.Unpickler):
    """Knows only the classes of an index."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.known: dict[tuple[str, str], Any] = {
            ("torch", "Size"): torch.Size,
            ("torch.serialization", "_get_layout"): lambda name: {"torch.strided": torch.strided}[name],
            (index.__name__, "_MEM_FORMAT_ENCODING"): lambda value: index._MEM_FORMAT_ENCODING(value),
            **{
                (module, "PosixPath"): lambda *parts: PurePosixPath(*parts)
                for module in ("pathlib", "pathlib._local")
            },
        }
        for cls in (
            index.Metadata,
            index.MetadataIndex,
            index.StorageMeta,
            index.TensorStorageMetadata,
            index.TensorProperties,
            index.ChunkStorageMetadata,
            index.BytesStorageMetadata,
            _StorageInfo,
        ):
            self.known[cls.__module__, cls.__name__] = _stand_in(cls)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.known:
            return self.known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{INDEX} names {module}.{name}, which no index of shards contains")


def _stand_in(cls: type) -> type:
    """A class that creates objects of `cls`; a pickle that got `cls` itself could modify it."""
    new: Callable[..., Any] = cls.__new__
    return type(cls.__name__, (), {"__new__": lambda _: new(cls)})
