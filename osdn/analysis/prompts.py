"""Prompts to replay, and where a repeated context starts for the second time.

Prompts come from a file, from an evaluation task, or from the documentation of the running Python, which is
always available.  Repetition needs no annotation: the distance between two copies of a passage gives the
start of the second copy.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from platform import python_version
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

TOPICS = "topics_twice"
PROBE = 48  # characters to search for: too many to repeat by chance, fewer than a context has


@dataclass(frozen=True)
class Prompt:
    task: str
    ids: Tensor  # [T]
    second_reading: int | None = None  # the token where the second reading of the context starts
    text: str = ""  # the whole text, even if `ids` is truncated
    cut: int = 0  # tokens cut off at the beginning
    source: str = ""  # where it comes from


def encode(task: str, text: str, tokenizer: Any, length: int, source: str | None = None) -> Prompt:
    """A prompt of at most `length` tokens; a longer text loses its beginning, as in an evaluation.

    The source defaults to the task.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    if len(ids) < 2:
        raise ValueError(f"a prompt of {task} has {len(ids)} tokens; it needs at least 2: {text[:60]!r}")
    character = find_second_reading(text)
    token = 0 if character is None else len(tokenizer(text[:character]).input_ids)
    cut = max(0, len(ids) - length)
    second_reading = token - cut if 0 < token - cut < len(ids) - cut else None
    return Prompt(task, ids[cut:], second_reading, text, cut, source or task)


def find_second_reading(text: str) -> int | None:
    """The position of the character at which a text starts to repeat itself; None if it does not.

    >>> find_second_reading("Name? " + 40 * "a1" + 30 * "b-c" + "." + 40 * "a1" + 30 * "b-c" + ". Name:")
    177
    """
    start = len(text) // 4  # inside the first reading, past whatever introduces it
    probe = text[start : start + PROBE]
    again = text.find(probe, start + 1)
    if len(probe) < PROBE or again < len(text) // 3:
        return None
    lag = again - start
    while start > 0 and text[start - 1] == text[start - 1 + lag]:
        start -= 1
    return start + lag


def topics_twice(tokenizer: Any, count: int, length: int) -> Iterator[Prompt]:
    """Passages of Python's documentation, each repeated once, `length` tokens in total."""
    text = " ".join(" ".join(topics.topics.values()).split())
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    half = length // 2
    if half < 1 or len(ids) < count * half:
        raise ValueError(
            f"{TOPICS} has {len(ids)} tokens, too few for {count} passages of {half}: ask for less"
        )
    for i in range(count):
        passage = ids[i * (len(ids) // count) :][:half]
        both, text = torch.cat([passage, passage]), tokenizer.decode(passage)
        yield Prompt(TOPICS, both, half, text, source=f"documentation of Python {python_version()}")


def file_prompts(path: Path, tokenizer: Any, length: int) -> Iterator[Prompt]:
    """The prompts of a file: a `.txt` is one prompt, a `.jsonl` has one per line ("text", maybe "task")."""
    if path.suffix != ".jsonl":
        yield encode(path.stem, path.read_text(encoding="utf-8"), tokenizer, length, str(path))
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise ValueError(f'{path}, line {number}: a prompt must be an object with a string "text"')
            yield encode(row.get("task", path.stem), row["text"], tokenizer, length, str(path))


def task_prompts(
    name: str, tokenizer: Any, count: int, length: int, data_dir: Path | None, window: int | None = None
) -> Iterator[Prompt]:
    for text in task_texts(name, tokenizer, count, data_dir, window):
        yield encode(name, text, tokenizer, length)


def task_texts(
    name: str, tokenizer: Any, count: int, data_dir: Path | None = None, window: int | None = None
) -> list[str]:
    """The first prompts of a task, such as `fda_twice` or any lm_eval task, as `osdn eval` reads them."""
    if find_spec("lm_eval") is None:
        raise ValueError(f'{name} needs lm_eval: pip install "osdn[eval]"; or read prompts from a file')
    from osdn.evaluation.harness import load_task, prompt_texts
    from osdn.evaluation.recall import WINDOW

    return prompt_texts(load_task(name, tokenizer, window or WINDOW, data_dir), count)


def select(
    tokenizer: Any,
    file: Path | None,
    tasks: list[str],
    count: int,
    length: int,
    data_dir: Path | None = None,
    window: int | None = None,
) -> tuple[int | None, Iterator[Prompt]]:
    """The largest possible number of prompts, if known, and the prompts.

    `count` limits each task; a file is read completely.  `window` is that of `osdn eval`.
    """
    if file is not None and tasks:
        raise ValueError("prompts come from a file or from tasks, not from both: drop one of the two")
    if file is not None:
        if not file.exists():
            raise FileNotFoundError(f"{file} does not exist")
        return None, file_prompts(file, tokenizer, length)
    tasks = tasks or [TOPICS]
    sources = [
        topics_twice(tokenizer, count, length)
        if task == TOPICS
        else task_prompts(task, tokenizer, count, length, data_dir, window)
        for task in tasks
    ]
    return count * len(tasks), chain.from_iterable(sources)
