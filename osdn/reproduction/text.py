"""The text of a reproduction: a fair sample of the installed Python files, as much as its runs read.

Copying is rare in plain text, and the few million tokens that a laptop affords do not teach it.  So some of
the files are cut into stretches, each followed by a part of itself: a model that looks back is rewarded
early.  The held-out files are plain.
"""

import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

from osdn.reproduction.profiles import Profile
from osdn.training.data import SourceFiles

SOURCE = "installed"  # the standard library and every installed package, in a fixed mixed order
CHARACTERS = 4  # of a token, more than there are on average: so much text is enough
SHORTEST, LONGEST = 200, 700  # characters of a stretch, up to a whole line


def write_text(profile: Profile, path: Path) -> tuple[int, int]:
    """Write documents to train on, then those to validate on, as JSON lines; how many of each."""
    parts = (
        _enough(_training(profile.echoed), CHARACTERS * profile.tokens),
        _enough(SourceFiles(SOURCE).texts("validation"), CHARACTERS * profile.validation_tokens),
    )
    counts = []
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for texts in parts:
            counts.append(0)
            for text in texts:
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


def _training(echoed: float) -> Iterator[str]:
    """The files; of a share of them, stretches that are followed by a part of themselves."""
    for text in SourceFiles(SOURCE).texts("train"):
        draw = random.Random(zlib.crc32(text.encode()))
        if draw.random() < echoed:
            yield from echoes(text, draw)
        else:
            yield text


def echoes(text: str, draw: random.Random) -> Iterator[str]:
    """Stretches of whole lines, and after each, from a line of its first half on, itself again."""
    lines: list[str] = []
    size = draw.randint(SHORTEST, LONGEST)
    for line in text.splitlines(keepends=True):
        lines.append(line)
        length = sum(map(len, lines))
        if length >= size:
            if length <= LONGEST + SHORTEST:  # a very long line makes a stretch that no context holds
                yield "".join([*lines, "\n\n", *lines[draw.randrange((len(lines) + 1) // 2) :]])
            lines, size = [], draw.randint(SHORTEST, LONGEST)
