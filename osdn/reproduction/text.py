"""The text of a reproduction: a fair sample of the installed Python files, as much as its runs read."""

import json
from collections.abc import Iterator
from pathlib import Path

from osdn.reproduction.profiles import Profile
from osdn.training.data import SourceFiles

SOURCE = "installed"  # the standard library and every installed package, in a fixed mixed order
CHARACTERS = 4  # of a token, more than there are on average: so much text is enough


def write_text(profile: Profile, path: Path) -> tuple[int, int]:
    """Write files to train on, then held-out ones to validate on, as JSON lines; how many of each."""
    wanted = {"train": profile.tokens, "validation": profile.validation_tokens}
    counts = []
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for split, tokens in wanted.items():
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
