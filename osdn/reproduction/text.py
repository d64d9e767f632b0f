"""The text of a reproduction: a fair sample of the installed Python files, as much as its runs read.

Plain text hardly teaches small models to copy (docs/reproduction.md).  So it begins with a primer, random
words that are listed twice, and some of the rest consists of exercises in looking things up: an excerpt from
a training file, once or twice, and then some of its lines again, in the form of the questions of
`code_recall`.
"""

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from osdn.evaluation.code_recall import KINDS
from osdn.reproduction.profiles import Profile
from osdn.training.data import SourceFiles

VOCABULARY = "stdlib"  # what the tokenizer is trained on
SOURCE = "installed"  # the standard library and every installed package, in a fixed mixed order
CHARACTERS = 4  # of a token, more than there are on average: so much text is enough
EXCERPT = (150, 350)  # characters of an exercise's excerpt, about as long as those of the questions
LINES = 4  # most lines that an exercise asks for
POOL = 500  # exercises to choose the next one from
PRIMER_WORDS = (32, 256)  # different words at the beginning and at the end of the primer
PRIMER_LENGTH = (12, 60)  # words of a list, at most
PRIMER_START = 0.3  # the part of the primer before it gets harder


def write_text(profile: Profile, path: Path) -> tuple[int, int]:
    """Write documents to train on, then held-out files to validate on, as JSON lines; how many of each."""
    files = SourceFiles(SOURCE)
    words = frequent_words(SourceFiles(VOCABULARY).texts("train"), PRIMER_WORDS[-1])
    training = chain(
        primer(words, profile.primer_tokens), with_exercises(files.texts("train"), profile.exercises)
    )
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


def frequent_words(texts: Iterator[str], count: int) -> list[str]:
    """The most frequent words of some texts, most of which are one token."""
    counter = Counter(word for text in texts for word in re.findall(r" ([a-z]{2,})\b", text))
    return [word for word, _ in counter.most_common(count)]


def primer(words: Sequence[str], tokens: int) -> Iterator[str]:
    """Lists of random words, each list twice, with about so many tokens in all.

    It begins with short lists of few words, from which all models learn to copy.  Then the lists get longer,
    and words are added one by one: a model that meets many new ones at once unlearns it.
    """
    rng = random.Random(0)
    count = 0
    while count < tokens:
        hardness = max(0.0, (count / tokens - PRIMER_START) / (1 - PRIMER_START))
        different, longest = (
            round(first * (last / first) ** hardness) for first, last in (PRIMER_WORDS, PRIMER_LENGTH)
        )
        listed = rng.choices(words[:different], k=rng.randint(3, longest))
        count += 2 * len(listed) + 1  # and the end of the text
        yield "".join(f" {word}" for word in 2 * listed)


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
