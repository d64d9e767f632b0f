"""The text of a reproduction: a fair sample of the installed Python files, as much as its runs read.

Some of it consists of exercises in looking things up: an excerpt from a training file, once or twice, and
then some of its lines again, in the form of the questions of `code_recall`.  Plain text hardly teaches small
models to copy (docs/reproduction.md).
"""

import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

from osdn.evaluation.code_recall import KINDS
from osdn.reproduction.profiles import Profile
from osdn.training.data import SourceFiles

SOURCE = "installed"  # the standard library and every installed package, in a fixed mixed order
CHARACTERS = 4  # of a token, more than there are on average: so much text is enough
EXCERPT = (150, 350)  # characters of an exercise's excerpt, about as long as those of the questions
LINES = 4  # most lines that an exercise asks for
POOL = 500  # exercises to choose the next one from


def write_text(profile: Profile, path: Path) -> tuple[int, int]:
    """Write documents to train on, then held-out files to validate on, as JSON lines; how many of each."""
    files = SourceFiles(SOURCE)
    training = with_exercises(files.texts("train"), profile.exercises)
    counts = []
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for texts, tokens in (
            (training, profile.tokens),
            (files.texts("validation"), profile.validation_tokens),
        ):
            counts.append(0)
            for text in _enough(texts, CHARACTERS * tokens):
                file.write(json.dumps({"text": text}) + "\n")
                counts[-1] += 1
    partial.replace(path)
    return counts[0], counts[1]


def with_exercises(texts: Iterator[str], share: float) -> Iterator[str]:
    """Some of the texts as they are, and exercises about others, which make up `share` of all characters.

    No text is used for both, and no part of a text in two exercises: a model that has just been trained on a
    line knows it by heart and need not look it up.  For the same reason exercises about one text are spread.
    """
    rng = random.Random(0)
    pool: list[str] = []
    plain = practised = 0
    for text in texts:
        if len(pool) < POOL and share > 0:
            pool += exercises(text)
            continue
        yield text
        plain += len(text)
        while pool and practised < plain * share / (1 - share):
            exercise = pool.pop(rng.randrange(len(pool)))
            practised += len(exercise)
            yield exercise


def exercises(text: str) -> Iterator[str]:
    """Excerpts from a file, each followed by some of the lines in it that `code_recall` could ask for.

    The lines of an exercise begin differently, so that the beginning of each determines the rest.
    """
    rng = random.Random(zlib.crc32(text.encode()))
    start = 0
    while (end := text.find("\n", start + rng.randint(*EXCERPT))) >= 0:
        excerpt = text[start:end].strip("\n")
        start = end + 1
        matches = [match for pattern in KINDS.values() for match in pattern.finditer(excerpt)]
        lines = [match[0].strip() for match in matches if excerpt.count(match[1]) == 1]
        if lines and len(excerpt) <= 2 * EXCERPT[1]:
            asked = rng.sample(lines, min(LINES, len(lines)))
            yield "\n\n".join([*[excerpt] * rng.choice((1, 2)), *asked])


def _enough(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text
