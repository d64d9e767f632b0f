"""Recall prompts that contain their document twice, as in "Just read twice" (Arora et al., arXiv:2407.05483).

The question comes first, then the document twice, then the question as a cue to complete.  Two readings must
fit into the context, so a document is first truncated to a window of tokens around its answer.  The functions
named after data sets create the data for the task files in `tasks/`, for both `lm_eval` and `osdn diagnose`.
"""

from functools import partial
from pathlib import Path
from typing import Any

from osdn.evaluation.data import load_split
from osdn.models.checkpoints import load_tokenizer

WINDOW = 1000  # tokens per reading
ROOM = 50  # tokens of the window that are reserved for the question and the answer
SUMMARY = "Summary of information above..."  # starts the tail that SWDE appends to its documents


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the answer occurs in the continuation, ignoring case; the process_results of `lm_eval`.

    An empty answer, which every text contains, does not count.
    """
    answer = doc["value"].lower()
    return {"contains": float(answer != "" and answer in results[0].lower())}


def cut(text: str, answer: str, tokenizer: Any, length: int) -> str:
    """A contiguous excerpt of at most `length` tokens around the first occurrence of the answer.

    Without an occurrence it is the beginning of the text.
    """
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) <= length:
        return text
    place = max(text.lower().find(answer.lower()), 0)
    inside = [i for i, (start, end) in enumerate(offsets) if end > place and start < place + len(answer)]
    before = (length - len(inside)) // 2
    first = min(max(inside[0] - before if inside else 0, 0), len(offsets) - length)
    return text[offsets[first][0] : offsets[first + length - 1][1]]


def without_cue(text: str, key: str) -> str:
    """A document without the question at its end, ending in one full stop.

    >>> without_cue("Device: pump. Maker: Acme\\nMaker:", "maker")
    'Device: pump. Maker: Acme.'
    """
    text = text.partition(SUMMARY)[0].strip()
    while text.lower().endswith(f"{key}:".lower()):
        text = text[: -len(key) - 1].rstrip()
    return text.rstrip(".") + "."


def read_twice(doc: dict[str, Any], tokenizer: Any, length: int) -> dict[str, Any]:
    """A prompt from a row of FDA or SWDE: "text", "key", "value"."""
    key, value = doc["key"].strip(), doc["value"].strip()
    full = without_cue(doc["text"], key)
    text = cut(full, value, tokenizer, length)
    Key = key[:1].upper() + key[1:]
    return {
        "prompt": f"Information about {Key}. {text}\n{text} {Key}:",
        "value": value,
        "cut": len(text) < len(full),
    }


def read_twice_and_complete(doc: dict[str, Any], tokenizer: Any, length: int) -> dict[str, Any]:
    """A prompt from a row of SQuAD completion: "context", "question", "text" ending in a cue, "value"."""
    value = doc["value"].strip()
    full = doc["context"].partition("Question:")[0].strip()
    context = cut(full, value, tokenizer, length)
    # The text is the context plus the cue, so truncate the context there as well.
    text = doc["text"].strip().replace(full, context)
    return {
        "prompt": f"{doc['question'].strip()} {context}\n{text}",
        "value": value,
        "cut": len(context) < len(full),
    }


def fast_tokenizer(task: str, place: Any, window: int) -> Any:
    """The tokenizer that truncates documents: given as an object, or as the name or path to load it from."""
    if place is None:
        raise ValueError(
            f"{task} truncates documents by tokens: name a tokenizer, --metadata '{{\"tokenizer\": ...}}'"
        )
    if isinstance(place, (str, Path)):
        place = load_tokenizer(place)
    if not place.is_fast:
        raise ValueError(f"{task} truncates documents by tokens, which needs a fast tokenizer")
    if window <= ROOM:
        raise ValueError(f"the window is {window} tokens; it must be more than {ROOM}, which are reserved")
    return place


def _twice(
    path: str,
    prompt: Any,
    *,
    tokenizer: Any = None,
    pretrained: Any = None,
    window: int = WINDOW,
    data_dir: str | Path | None = None,
    **_: Any,
) -> dict[str, Any]:
    """The data set of a task; the keyword arguments are the metadata that `lm_eval` passes to every task."""
    place = fast_tokenizer(path, pretrained if tokenizer is None else tokenizer, window)
    data = load_split(path, "default", "validation", data_dir)
    arguments = {"tokenizer": place, "length": window - ROOM}
    rows = []
    for i, row in enumerate(data):
        try:
            rows.append(prompt(row, **arguments))
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{path}: document {i} has a field that is not text ({error}); fix or remove it"
            ) from error
    return {"validation": type(data).from_list(rows)}


fda = partial(_twice, "hazyresearch/based-fda", read_twice)
swde = partial(_twice, "hazyresearch/based-swde-v2", read_twice)
squad = partial(_twice, "hazyresearch/based-squad", read_twice_and_complete)
