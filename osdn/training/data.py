"""Loading text and turning it into tokens.

A source is `stdlib` (the sources of Python's standard library, which are always available), `installed`
(those and the sources of all installed packages), a file, a directory, or a data set on the Hugging Face hub.
Each becomes a `datasets` data set of documents. It is tokenised once, by a parallel `map` with a progress
bar, and the result is cached under a fingerprint of the text and the tokenizer.
"""

import os
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from osdn.hub import hub_answers, no_waiting

END_OF_TEXT = "<|endoftext|>"
TEXT_FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".txt": "text",
    ".py": "text",
    ".md": "text",
}
VALIDATION_SHARE = 20  # one in so many source files is held out


class SourceFiles:
    """Python files that are always available: "stdlib", or "installed", which adds all installed packages.

    A file's path decides whether it is held out, so a new version of a package never moves a file between
    splits.  The order of "installed" mixes packages, so that the first files are a fair sample.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        paths = sysconfig.get_paths()
        roots = {"stdlib": [paths["stdlib"]], "installed": [paths["stdlib"], paths["purelib"]]}[source]
        files: dict[str, Path] = {}
        for root in map(Path, dict.fromkeys(roots)):
            for path in root.rglob("*.py"):
                name = path.relative_to(root).as_posix()
                if "-packages" not in name:
                    files.setdefault(name, path)
        names = sorted(files)
        if source == "installed":
            names.sort(key=lambda name: zlib.crc32(name.encode()))
        self.paths = {name: files[name] for name in names}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the files' names and sizes."""
        return Hasher.hash([(name, path.stat().st_size) for name, path in self.paths.items()])

    def texts(self, split: str = "train") -> Iterator[str]:
        """The files of a split, "train" or "validation"."""
        if split not in ("train", "validation"):
            raise ValueError(f'split is {split!r}; {self.source} has "train" and "validation"')
        for name, path in self.paths.items():
            if (zlib.crc32(name.encode()) % VALIDATION_SHARE == 0) == (split == "validation"):
                try:
                    yield path.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):  # a few tests of Python's tokenizer use other encodings
                    continue


def stdlib_documents(split: str = "train") -> Iterator[str]:
    """The source files of the standard library in a fixed order; split is "train" or "validation"."""
    return SourceFiles("stdlib").texts(split)


def load_source(
    source: str,
    *,
    name: str | None = None,
    split: str = "train",
    text_column: str = "text",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """The documents of a source as a data set with a "text" column.

    Args:
        source: "stdlib", "installed" (which adds every installed package), a file or directory of parquet,
            jsonl or text files (a text file is one document), or the name of a data set on the hub.
        name: the configuration of a hub data set, such as "sample-10BT".
        split: as in `datasets.load_dataset`, including slices.
        text_column: the column with the text.
        streaming: read as needed instead of converting everything first.
    """
    path = Path(source).expanduser()
    if source in ("stdlib", "installed"):
        # The fingerprint is part of the cache key, because another Python has other sources.
        arguments = {"source": source, "split": split, "found": SourceFiles(source).fingerprint}
        data = Dataset.from_generator(_source_rows, gen_kwargs=arguments)
        data = data.to_iterable_dataset(num_shards=16) if streaming else data
    elif path.exists():
        kind, files = _local_files(path)
        options = {"sample_by": "document"} if kind == "text" else {}
        try:
            data = load_dataset(kind, data_files=files, split=split, streaming=streaming, **options)
        except (DatasetGenerationError, StopIteration, ValueError) as error:
            reason = str(error.__cause__ or error)
            if not reason or "corresponds to no data" in reason:
                reason = "it has no documents"
            raise ValueError(f"data.source is {source}, which cannot be read as {kind}: {reason}") from error
    elif path.suffix in TEXT_FORMATS or source.startswith((".", "/", "~")):
        raise FileNotFoundError(f"data.source is {source}, but there is no such file or directory")
    else:
        try:
            with no_waiting():
                data = load_dataset(source, name, split=split, streaming=streaming)
        except OSError as error:
            if hub_answers():
                raise
            raise ConnectionError(
                f"data.source is {source}: there is no such file or directory, and the hub cannot be reached "
                f"({error})"
            ) from error
    if data.column_names is not None and text_column not in data.column_names:
        raise ValueError(
            f"data.text_column is {text_column!r}; {source} has the columns {', '.join(data.column_names)}"
        )
    data = data.select_columns([text_column])
    return data if text_column == "text" else data.rename_column(text_column, "text")


def checked(text: Any) -> str:
    """The document, checked to be text: files may contain nulls or numbers instead."""
    if not isinstance(text, str):
        raise ValueError(f"a document is {text!r:.80}, which is not text; fix or remove such documents")
    return text


def tokenize(
    data: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, context_len: int
) -> Dataset | IterableDataset:
    """Replace the documents in "text" by their tokens in "input_ids", in pieces of at most `context_len`.

    Every document ends with the end-of-text token.  Each piece has a "checksum".
    """

    def encode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        ids = tokenizer(list(map(checked, batch["text"])), return_attention_mask=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        documents = [np.array(x + end if x[-1:] != end else x, np.int32) for x in ids]
        pieces = [x[i : i + context_len] for x in documents for i in range(0, len(x), context_len)]
        return {"input_ids": pieces, "checksum": [zlib.crc32(piece.tobytes()) for piece in pieces]}

    if isinstance(data, IterableDataset):
        return data.map(encode, batched=True, remove_columns=["text"])
    if len(data) == 0:
        raise ValueError("the data set has no documents")
    # A tokenizer's hash changes when it is first used; its serialised form does not.
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer)
    return data.map(
        encode,
        batched=True,
        remove_columns=["text"],
        batch_size=100,
        num_proc=min(os.cpu_count() or 1, len(data) // 100) or None,
        new_fingerprint=Hasher.hash(
            (data._fingerprint, state, tokenizer.eos_token_id, context_len, "checksum")
        ),
        desc="tokenising",
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer by name or path; "bytes" has one token per byte and an end-of-text token."""
    if name == "bytes":
        vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
        return _wrap(Tokenizer(models.BPE(vocabulary, [])))
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise FileNotFoundError(f"data.tokenizer is {name}, but there is no such directory")
    try:
        with no_waiting():
            return AutoTokenizer.from_pretrained(Path(name).expanduser() if name.startswith("~") else name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.tokenizer is {name}, which could not be loaded: {error}\n"
            f'It must be "bytes", a directory with a tokenizer, or a name on the Hugging Face hub.'
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair vocabulary of `vocab_size` tokens, including all 256 bytes and end-of-text."""
    if vocab_size < 257:
        raise ValueError(f"vocab_size is {vocab_size}; 256 bytes and the end-of-text token need at least 257")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(map(checked, texts), trainer)
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def _source_rows(source: str, split: str, found: str) -> Iterator[dict[str, str]]:
    for text in SourceFiles(source).texts(split):
        yield {"text": text}


def _local_files(path: Path) -> tuple[str, list[str]]:
    """The files at `path` in a fixed order, and their common format."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in TEXT_FORMATS)
    kinds = {TEXT_FORMATS.get(file.suffix, file.suffix) for file in files}
    if not files or not kinds <= set(TEXT_FORMATS.values()):
        raise ValueError(f"{path} has no files that end in {', '.join(TEXT_FORMATS)}")
    if len(kinds) > 1:
        raise ValueError(
            f"{path} has files in several formats, {', '.join(sorted(kinds))}; keep only one format in it"
        )
    return kinds.pop(), [str(file) for file in files]
