"""Recall prompts that read their document twice, after "Just read twice" (Arora et al., arXiv:2407.05483).

The question comes first, then the document two times, then the question as a cue to complete.  Two readings
must fit the context, so a document is first cut to a window of tokens around its answer.  The functions
named after data sets make those of the task files in `tasks/`, for `lm_eval` and for `osdn diagnose` alike.
"""

from functools import partial
from pathlib import Path
from typing import Any

from osdn.evaluation.data import load_split
from osdn.models.checkpoints import load_tokenizer

WINDOW = 1000  # tokens of a reading
ROOM = 50  # of which are kept free for what is asked and answered
SUMMARY = "Summary of information above..."  # begins the tail that SWDE appends to its documents


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the answer occurs in the continuation, in any case: `lm_eval`'s process_results.

    An empty answer, which is in every text, is never found.
    """
    answer = doc["value"].lower()
    return {"contains": float(answer != "" and answer in results[0].lower())}


def cut(text: str, answer: str, tokenizer: Any, length: int) -> str:
    """At most `length` tokens of a text in one piece, around the first place where the answer stands.

    A text without the answer keeps its beginning.
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
    """A document without the question at its end, closed by one full stop.

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
    whole = without_cue(doc["text"], key)
    text = cut(whole, value, tokenizer, length)
    Key = key[:1].upper() + key[1:]
    return {
        "prompt": f"Information about {Key}. {text}\n{text} {Key}:",
        "value": value,
        "cut": len(text) < len(whole),
    }


def read_twice_and_complete(doc: dict[str, Any], tokenizer: Any, length: int) -> dict[str, Any]:
    """A prompt from a row of SQuAD completion: "context", "question", "text" that ends in a cue, "value"."""
    value = doc["value"].strip()
    whole = doc["context"].partition("Question:")[0].strip()
    context = cut(whole, value, tokenizer, length)
    # The text is the context and the cue: what is cut from the one is cut from the other.
    text = doc["text"].strip().replace(whole, context)
    return {
        "prompt": f"{doc['question'].strip()} {context}\n{text}",
        "value": value,
        "cut": len(context) < len(whole),
    }


def fast_tokenizer(task: str, place: Any, window: int) -> Any:
    """The tokenizer that cuts documents: an object, or where to load one from (the model's own place)."""
    if place is None:
        raise ValueError(f"{task} is cut by tokens: name a tokenizer, --metadata '{{\"tokenizer\": ...}}'")
    if isinstance(place, (str, Path)):
        place = load_tokenizer(place)
    if not place.is_fast:
        raise ValueError(f"{task} is cut by tokens, for which the tokenizer must be a fast one")
    if window <= ROOM:
        raise ValueError(f"the window is {window} tokens; it must be more than {ROOM}, which are kept free")
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
    """The data set of a task; the arguments are the metadata that `lm_eval` hands to every task."""
    place = fast_tokenizer(path, pretrained if tokenizer is None else tokenizer, window)
    data = load_split(path, "default", "validation", data_dir)
    arguments = {"tokenizer": place, "length": window - ROOM}
    rows = []
    for i, row in enumerate(data):
        try:
            rows.append(prompt(row, **arguments))
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{path}: document {i} has something else for text ({error}); mend it"
            ) from error
    return {"validation": type(data).from_list(rows)}


fda = partial(_twice, "hazyresearch/based-fda", read_twice)
swde = partial(_twice, "hazyresearch/based-swde-v2", read_twice)
squad = partial(_twice, "hazyresearch/based-squad", read_twice_and_complete)
