"""What the RULER needle tasks of `lm_eval` need to create their documents: essays and a sentence splitter."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets

from osdn.evaluation.data import MissingDataError, load_split
from osdn.hub import hub_answers

SEED = 0
PUNKT = "tokenizers/punkt_tab"  # nltk's sentence splitter


@contextmanager
def haystacks(data_dir: str | Path | None) -> Iterator[None]:
    """Within this context, tasks create the same documents every time, from the mirror or the hub."""
    if missing := [name for name in ("nltk", "wonderwords") if find_spec(name) is None]:
        raise ValueError(f'the suite ruler needs {" and ".join(missing)}: pip install "osdn[eval]"')
    import nltk

    def essays(path: str, name: str | None = None, split: str = "train", **_: Any) -> Any:
        try:
            nltk.data.find(PUNKT)
        except LookupError as error:
            where = f"{data_dir}/nltk_data" if data_dir else "nltk's folders"
            command = f"python -m nltk.downloader {Path(PUNKT).name}"
            raise MissingDataError(f"nltk's {PUNKT} is not in {where}: {command}") from error
        return load_split(path, name, split, data_dir)

    download = nltk.download if hub_answers() else lambda *args, **kwargs: False
    places = [*([str(Path(data_dir) / "nltk_data")] if data_dir else []), *nltk.data.path]
    with ExitStack() as stack:
        stack.enter_context(patch.object(nltk, "download", download))  # called when the tasks are imported
        stack.enter_context(patch.object(nltk.data, "path", places))
        from lm_eval.tasks.ruler import prepare_niah

        prepare_niah.get_haystack.cache_clear()  # it may come from another mirror
        stack.enter_context(patch.object(prepare_niah, "tqdm", lambda items, **_: items))
        stack.enter_context(patch.object(datasets, "load_dataset", essays))
        random.seed(SEED)
        yield
