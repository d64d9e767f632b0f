"""The data of tasks: from a local mirror, or from the hub and its cache.

A mirror is a folder with one folder per data set, named as on the hub (`allenai/ai2_arc`) or as in the cache
of `datasets` (`allenai___ai2_arc`).  It holds the files, optionally in one folder per configuration
(`ARC-Easy`).  The name of a file or its folder gives the split, as it does on the hub, in the cache, and for
`validation.jsonl`.  `mirrored` makes the tasks of `lm_eval` look there first.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from datasets.naming import camelcase_to_snakecase

from osdn.hub import hub_answers, no_waiting

MIRROR_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".arrow": "arrow"}
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # metadata
SPLIT = re.compile(r"(?<![a-z])(train|validation|valid|val|dev|test)(?![a-z])")
SPLITS = {"valid": "validation", "val": "validation", "dev": "validation"}
FORMER_NAMES = {"hazyresearch/based-swde-v2": "hazyresearch/based-swde"}  # a mirror may use either name


class MissingDataError(OSError):
    """A data set that is neither in the mirror nor available from the hub."""


def load_data(path: str, name: str | None = None, data_dir: str | Path | None = None) -> DatasetDict:
    """A data set by its name on the hub; from the mirror if it has it."""
    files = find_files(path, name, data_dir)
    if files:
        kind = MIRROR_FORMATS[Path(next(iter(files.values()))[0]).suffix]
        try:
            return load_dataset(kind, data_files=files)
        except (DatasetGenerationError, StopIteration, ValueError) as error:
            reason = str(error.__cause__ or error) or "it has no documents"
            raise ValueError(f"{path} in {data_dir} cannot be read: {reason}") from error
    with dataset_progress(True), no_waiting():
        try:
            return load_dataset(path, name)
        except (OSError, ValueError) as error:  # ValueError: another configuration is cached
            place = f"not in {data_dir}, " if data_dir else ""
            reason = str(error).splitlines()[0] if hub_answers() else "the hub cannot be reached"
            raise MissingDataError(f"{place}not cached, and {reason}") from error


def load_split(path: str, name: str | None, split: str, data_dir: str | Path | None = None) -> Dataset:
    """One split of a data set."""
    data = load_data(path, name, data_dir)
    if split not in data:
        raise MissingDataError(f"{path} exists, but has no split {split}")
    return data[split]


def find_files(path: str, name: str | None, data_dir: str | Path | None) -> dict[str, list[str]]:
    """The files of a data set in the mirror, by split; empty if the mirror does not have it."""
    if data_dir is None:
        return {}
    known = [path, FORMER_NAMES[path]] if path in FORMER_NAMES else [path]
    folders = [Path(data_dir) / folder for own in known for folder in (own, _cache_name(own))]
    root = next((folder for folder in folders if folder.is_dir()), None)
    if root is None:
        return {}
    splits: dict[str, list[str]] = {}
    for file in _files(root, name):
        words = SPLIT.findall(file.as_posix().removeprefix(root.as_posix()).lower())
        split = words[-1] if words else "train"
        splits.setdefault(SPLITS.get(split, split), []).append(str(file))
    formats = {Path(file).suffix for files in splits.values() for file in files}
    if len(formats) > 1:
        raise ValueError(f"{root} has files in several formats, {', '.join(sorted(formats))}; keep only one")
    return splits


def _files(root: Path, name: str | None) -> list[Path]:
    """The data files of a configuration: those in its folder or, if it has none, those in no other's."""
    folders = [root / name, root / name.replace("-", "/")] if name else [root]  # on the hub: sample/10BT
    folder = next((folder for folder in folders if folder.is_dir()), None)
    files = sorted(
        f for f in (folder or root).rglob("*") if f.suffix in MIRROR_FORMATS and f.name not in NOT_DATA
    )
    if folder is None:
        files = [f for f in files if f.parent in (root, root / "data") or SPLIT.fullmatch(f.parent.name)]
    return files


def data_location(path: str, name: str | None, data_dir: str | Path | None) -> str:
    """Where a data set would be loaded from: "mirror", "cache" or "hub"."""
    if find_files(path, name, data_dir):
        return "mirror"
    cached = Path(datasets.config.HF_DATASETS_CACHE) / _cache_name(path)
    return "cache" if cached.is_dir() and (not name or (cached / name).is_dir()) else "hub"


@contextmanager
def dataset_progress(shown: bool) -> Iterator[None]:
    """Show or hide the progress bars of `datasets`: useful for downloads, noise for every small `map`."""
    before = not datasets.are_progress_bars_disabled()
    (datasets.enable_progress_bars if shown else datasets.disable_progress_bars)()
    try:
        yield
    finally:
        (datasets.enable_progress_bars if before else datasets.disable_progress_bars)()


def _use_splits(task: Any) -> None:
    """Require the evaluated split; others, which a task names for few-shot examples, may be missing."""
    config = task.config
    evaluated = config.test_split or config.validation_split or "validation"
    if evaluated not in task.dataset:
        raise MissingDataError(f"{task.DATASET_PATH} exists, but has no split {evaluated}")
    for kind in ("training_split", "validation_split"):
        if getattr(config, kind) not in task.dataset:
            setattr(config, kind, None)


def _cache_name(path: str) -> str:
    """The name of a data set's folder in the cache of `datasets`."""
    owner, _, name = path.rpartition("/")
    return f"{owner}___{camelcase_to_snakecase(name)}" if owner else camelcase_to_snakecase(name)


@contextmanager
def mirrored(data_dir: str | Path | None) -> Iterator[None]:
    """Within this context, `lm_eval` loads the data of its tasks with `load_data`."""
    from lm_eval.api.task import ConfigurableTask

    original = ConfigurableTask.download

    def download(task: Any, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if task.config.custom_dataset is not None or task.DATASET_PATH in set(MIRROR_FORMATS.values()):
            original(task, dataset_kwargs, **kwargs)
        else:
            task.dataset = load_data(task.DATASET_PATH, task.DATASET_NAME, data_dir)
            _use_splits(task)

    with patch.object(ConfigurableTask, "download", download):
        yield
