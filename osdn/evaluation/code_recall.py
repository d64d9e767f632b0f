"""Recall on Python's sources: a "Just read twice" task that needs no download.

A document is an excerpt from a file that is not in the training splits of `stdlib` and `installed`.  It is
followed by a cue whose answer occurs once in the excerpt: the arguments of a function, or the value of a
variable or attribute.  Answers that occur after any such cue in the training split are excluded, so a model
that sees only the cue cannot know the answer.  The task `code_alone` checks that.
"""

import random
import re
import zlib
from collections.abc import Iterator
from functools import cache, partial
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from datasets import Dataset

from osdn.evaluation.data import dataset_progress
from osdn.evaluation.recall import ROOM, WINDOW, fast_tokenizer
from osdn.training.data import SourceFiles

QUESTIONS = 300  # per kind
SHORTEST, LONGEST = 6, 24  # characters in an answer
PER_FILE = 5  # most questions about one file
CHARACTERS = 8  # upper bound on the average characters per token
SEED = 0
KINDS = {  # the cue, and the answer after it
    "arguments": re.compile(
        r"^[ \t]*(def \w+\((?:self,|cls,)?) ?([^()\n]+)\)(?: ->[^\n]*)?:[ \t]*$", re.MULTILINE
    ),
    "variables": re.compile(r"^((?!__)\w{4,} =) (\S[^\n#]*?)[ \t]*$", re.MULTILINE),
    "attributes": re.compile(r"^[ \t]+(self\.\w+ =) (\S[^\n#]*?)[ \t]*$", re.MULTILINE),
}


class Question(NamedTuple):
    text: str  # of the file
    start: int  # of the line with the answer
    cue: str
    answer: str


def code_documents(
    *kinds: str,
    readings: int,
    tokenizer: Any = None,
    pretrained: Any = None,
    window: int = WINDOW,
    source: str = "installed",
    **_: Any,
) -> dict[str, Dataset]:
    """The data set of a task: cues that follow so many readings of their documents.

    The keyword arguments are the metadata that `lm_eval` passes to every task.
    """
    place = fast_tokenizer("code_recall", pretrained if tokenizer is None else tokenizer, window)
    by_kind: list[list[dict[str, str]]] = []
    for kind in kinds:
        questions = (Question(**row) for row in _questions(kind, source))
        documents = ((question, _stretch(question, place, window - ROOM)) for question in questions)
        by_kind.append([])
        for question, text in islice(((q, text) for q, text in documents if text is not None), QUESTIONS):
            parts = [*[text] * readings, question.cue]
            by_kind[-1].append({"prompt": "\n\n".join(parts), "value": question.answer})
    # Kind after kind in turns, so that a limit leaves some of each.
    rows = [row for turn in zip_longest(*by_kind) for row in turn if row is not None]
    return {"validation": Dataset.from_list(rows)}


@cache
def _questions(kind: str, source: str) -> Dataset:
    """Shuffled questions about the held-out files, more than are needed; collected once and cached."""
    files = SourceFiles(source)
    key = f"{files.fingerprint} {SHORTEST} {LONGEST} {PER_FILE} {QUESTIONS} {SEED}"  # of the cache
    arguments = {"source": source, "pattern": KINDS[kind].pattern, "key": key}
    with dataset_progress(False):
        return Dataset.from_generator(_find, gen_kwargs=arguments, split="validation")


def _find(source: str, pattern: str, key: str) -> Iterator[dict[str, Any]]:
    files, compiled = SourceFiles(source), re.compile(pattern, re.MULTILINE)
    known = {match[2].strip() for text in files.texts("train") for match in compiled.finditer(text)}
    questions = [
        question
        for text in files.texts("validation")
        for question in _ask(text, compiled)
        if question.answer not in known
    ]
    random.Random(SEED).shuffle(questions)
    for question in questions[: 2 * QUESTIONS]:
        yield question._asdict()


def _ask(text: str, pattern: re.Pattern[str]) -> Iterator[Question]:
    """Some questions about a file; cue and answer occur once, and the cue does not hint at the answer."""
    questions = []
    for match in pattern.finditer(text):
        cue, answer = match[1], match[2].strip()
        hints = [word for word in re.findall(r"[^\W_]{4,}", answer.lower()) if word in _letters(cue)]
        if SHORTEST <= len(answer) <= LONGEST and text.count(cue) == text.count(answer) == 1 and not hints:
            questions.append(Question(text, match.start(), cue, answer))
    return iter(random.Random(zlib.crc32(text.encode())).sample(questions, min(PER_FILE, len(questions))))


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower())


def _stretch(question: Question, tokenizer: Any, length: int) -> str | None:
    """Whole lines with the answer somewhere among them, at most `length` tokens.

    None if the answer's line does not fit, or if the excerpt would have less than half of `length` tokens.
    """
    reach = CHARACTERS * length  # far enough on either side without tokenising a long file
    begin = max(0, question.start - reach)
    text, place = question.text[begin : question.start + reach], question.start - begin
    question = question._replace(start=place)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    end = text.find("\n", question.start + 1 if text[question.start] == "\n" else question.start)
    end = len(text) if end < 0 else end
    inside = [i for i, (a, b) in enumerate(offsets) if b > question.start and a < end]
    spare = length - len(inside)
    if spare < 0:
        return None
    before = random.Random(zlib.crc32(question.cue.encode())).randint(0, spare)
    first = max(0, min(inside[0] - before, len(offsets) - length))
    last = min(len(offsets) - 1, first + length - 1)
    start, stop = offsets[first][0], offsets[last][1]
    if start > 0 and text[start - 1] != "\n":  # start and end with a whole line
        start = min(text.find("\n", start, question.start) + 1 or question.start, question.start)
    if stop < len(text):
        stop = max(text.rfind("\n", end, stop), end)
    tokens = sum(a >= start and b <= stop for a, b in offsets[first : last + 1])
    return text[start:stop].strip("\n") if tokens >= length / 2 else None


arguments = partial(code_documents, "arguments", readings=1)
variables = partial(code_documents, "variables", readings=1)
attributes = partial(code_documents, "attributes", readings=1)
arguments_twice = partial(code_documents, "arguments", readings=2)
variables_twice = partial(code_documents, "variables", readings=2)
attributes_twice = partial(code_documents, "attributes", readings=2)
alone = partial(code_documents, *KINDS, readings=0)
