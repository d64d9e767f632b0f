"""The text of a reproduction: a fair sample of the installed Python files, as much as its runs read."""

import json
from collections.abc import Iterator
from pathlib import Path

from osdn.reproduction.profiles import Profile
from osdn.training.data import SourceFiles

SOURCE = "installed"  # the standard library and every installed package, in a fixed mixed order
CHARACTERS = 4  # per token; the average is lower, so this much text is enough


def write_text(profile: Profile, path: Path) -> tuple[int, int]:
    """Write training files, then held-out files for validation, as JSON lines; return how many of each."""
    tokens_of_split = {"train": profile.tokens, "validation": profile.validation_tokens}
    counts = []
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for split, tokens in tokens_of_split.items():
            counts.append(0)
            for text in _enough(SourceFiles(SOURCE).texts(split), CHARACTERS * tokens):
                file.write(json.dumps({"text": text}) + "\n")
                counts[-1] += 1
    partial.replace(path)
    return counts[0], counts[1]


def _enough(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text
