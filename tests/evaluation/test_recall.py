"""Prompts that are read twice: hand-written examples, the window against brute force, and task settings."""

import pytest

from osdn.evaluation.harness import load_task
from osdn.evaluation.recall import contains, cut, read_twice, read_twice_and_complete, without_cue
from osdn.training.data import load_tokenizer, train_tokenizer
from tests.evaluation.mirror import TEXT, prose

BYTES = load_tokenizer("bytes")


def row(text: str, key: str, value: str) -> dict:
    return {"text": text, "key": key, "value": value}


def test_fda_has_its_document_twice_between_question_and_cue():
    doc = row("Purpose for submission: clearance. Analyte: glucose\nanalyte:", "analyte", "glucose")
    text = "Purpose for submission: clearance. Analyte: glucose."
    prompt = read_twice(doc, BYTES, 950)
    assert prompt["prompt"] == f"Information about Analyte. {text}\n{text} Analyte:"
    assert prompt["value"] == "glucose"
    assert not prompt["cut"]


def test_the_summary_of_swde_is_removed():
    body = "Corpse Bride | director: Tim Burton | year: 2005"
    doc = row(f"{body}\n\nSummary of information above...\n\ndirector: Tim Burton\nyear:", "year", " 2005 ")
    prompt = read_twice(doc, BYTES, 950)
    assert prompt["prompt"] == f"Information about Year. {body}.\n{body}. Year:"
    assert prompt["value"] == "2005"


def test_squad_repeats_its_context_after_the_question():
    context = "Broncos won 24–10. The game was at Levi's Stadium."
    doc = {
        "context": context,
        "question": "Where was the game?",
        "text": f"{context} The game was played at ",
        "value": "Levi's Stadium",
    }
    prompt = read_twice_and_complete(doc, BYTES, 950)
    assert prompt["prompt"] == f"Where was the game? {context}\n{context} The game was played at"
    assert not prompt["cut"]


def test_squad_is_truncated_in_both_readings():
    context = f"{prose(0, 600)} The answer is FORTY-TWO. {prose(9, 600)}"
    doc = {"context": context, "question": "What?", "text": f"{context}\nIt is", "value": "forty-two"}
    prompt = read_twice_and_complete(doc, BYTES, 100)
    first, second = prompt["prompt"].removeprefix("What? ").removesuffix("\nIt is").split("\n")
    assert first == second
    assert len(first) <= 100
    assert "FORTY-TWO" in first
    assert prompt["cut"]


@pytest.mark.parametrize(("text", "clean"), [
    ("Maker: A. maker:", "Maker: A."),
    ("Maker: A\nMAKER: maker:", "Maker: A."),
    ("Maker: A...", "Maker: A."),
    ("The maker: of it", "The maker: of it."),
])  # fmt: skip
def test_only_a_cue_at_the_end_is_removed(text, clean):
    assert without_cue(text, "maker") == clean


@pytest.mark.parametrize("tokenizer", ["bytes", "pairs"])
@pytest.mark.parametrize("place", [0, 3, 700, 1800, 2990])
@pytest.mark.parametrize("length", [1, 40, 199, 500])
def test_the_window_is_a_contiguous_excerpt_with_the_answer(tokenizer, place, length):
    answer = "Zebra-Quagga 77"
    tokenizer = BYTES if tokenizer == "bytes" else train_tokenizer([TEXT[:50_000]], 400)
    text = f"{prose(0, place)}{answer}{prose(5, 3000 - place)}"
    piece = cut(text, answer.upper(), tokenizer, length)
    tokens = len(tokenizer(text).input_ids)
    assert piece in text
    assert len(tokenizer(piece).input_ids) <= length + 1  # an excerpt may start inside a token
    assert abs(len(tokenizer(piece).input_ids) - min(length, tokens)) <= 1
    if length >= 40:
        assert answer in piece


def test_a_text_that_fits_is_unchanged_and_one_without_the_answer_keeps_its_beginning():
    assert cut("abc def", "def", BYTES, 7) == "abc def"
    assert cut("abcdefgh", "xyz", BYTES, 5) == "abcde"


@pytest.mark.parametrize(("continuation", "found"), [
    (" Tim BURTON, 2005", 1.0),
    ("tim  burton", 0.0),
    ("Tim Burto", 0.0),
    ("", 0.0),
])  # fmt: skip
def test_contains_looks_for_the_whole_answer_ignoring_case(continuation, found):
    assert contains({"value": "Tim Burton"}, [continuation]) == {"contains": found}
    assert contains({"value": ""}, [continuation]) == {"contains": 0.0}


@pytest.mark.parametrize(
    "task", ["fda", "swde", "squad_completion", "fda_twice", "swde_twice", "squad_twice"]
)
def test_recall_asks_for_48_greedy_tokens_up_to_a_newline(task, mirror):
    loaded = load_task(task, BYTES, data_dir=mirror)
    loaded.build_all_requests(limit=1, rank=0, world_size=1)
    _, options = loaded.instances[0].args
    assert options["until"] == ["\n"]
    assert options["max_gen_toks"] == 48
    assert not options.get("do_sample")
    assert loaded.instances[0].request_type == "generate_until"


def test_fifty_tokens_of_the_window_are_reserved(mirror):
    text = load_task("fda_twice", BYTES, 130, mirror).eval_docs[0]["prompt"]
    reading = text.removeprefix("Information about Device name. ").split("\n")[0]
    assert len(reading) == 80
    assert "Pump 0" in reading


def test_bad_windows_and_tokenizers_are_rejected(mirror):
    with pytest.raises(ValueError, match="more than 50"):
        load_task("fda_twice", BYTES, 50, mirror)
    with pytest.raises(ValueError, match="name a tokenizer"):
        load_task("fda_twice", None, 1000, mirror)
