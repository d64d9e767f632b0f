"""Sources and tokenizers."""

import itertools
import json
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from osdn.training.data import load_source, load_tokenizer, stdlib_documents, tokenize, train_tokenizer
from osdn.training.packing import PackedRows, Pieces

TEXTS = ["first", "zwei\nlines", "", "trois"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    data = Dataset.from_dict({"body": TEXTS, "id": list(range(4))})
    data.to_parquet(tmp_path / "a.parquet")
    data.to_json(tmp_path / "a.jsonl")
    for kind in ("parquets", "texts"):
        (tmp_path / kind / "deep").mkdir(parents=True)
    data.select(range(2)).to_parquet(tmp_path / "parquets/a.parquet")
    data.select(range(2, 4)).to_parquet(tmp_path / "parquets/deep/b.parquet")
    for i, text in enumerate(TEXTS):
        (tmp_path / f"texts/{i}.txt").write_text(text)
    return {name: tmp_path / name for name in ("a.parquet", "a.jsonl", "parquets", "texts", "texts/1.txt")}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "parquets"])
def test_files_and_directories_are_read_as_documents(files, name, streaming):
    data = load_source(str(files[name]), text_column="body", streaming=streaming)
    assert [row["text"] for row in data] == TEXTS
    assert list(next(iter(data))) == ["text"]


def test_a_text_file_is_one_document(files):
    assert [row["text"] for row in load_source(str(files["texts/1.txt"]))] == ["zwei\nlines"]
    found = [row["text"] for row in load_source(str(files["texts"]))]
    assert [text for text in found if text] == [text for text in TEXTS if text]


def test_a_source_that_is_missing_or_not_text_is_reported(files, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_source(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_source("missing.parquet")
    with pytest.raises(ValueError, match="has the columns body, id"):
        load_source(str(files["a.parquet"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no files that end in"):
        load_source(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="several formats, json, parquet, text"):
        load_source(str(tmp_path))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", ""), ("a.jsonl", "\n"), ("a.json", "[]"), ("a.parquet", ""), ("a.parquet", None),
])  # fmt: skip
def test_a_source_without_documents_is_reported(tmp_path, name, content, streaming):
    if content is None:
        Dataset.from_dict({"text": []}).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_text(content)

    def read():
        data = load_source(str(tmp_path / name), streaming=streaming)
        return next(iter(PackedRows(Pieces(data, load_tokenizer("bytes"), 9, 0), 4)))

    with pytest.raises(ValueError, match=r"no documents|0 bytes|has the columns"):
        read()


@pytest.mark.parametrize("content", ['{"text": "a"}\n{"te', "3\n4\n"])
def test_an_unreadable_source_is_reported_by_name(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"a\.jsonl, which cannot be read as json: JSON parse error"):
        load_source(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("value", [None, 3, ["a"]])
@pytest.mark.parametrize("other", ["text", None])
def test_a_document_that_is_not_text_is_reported(tmp_path, value, other, streaming):
    rows = [{"text": other if other is not None else value}, {"text": value}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"a document is .*, which is not text"):
        list(
            tokenize(load_source(str(tmp_path / "a.jsonl"), streaming=streaming), load_tokenizer("bytes"), 9)
        )
    with pytest.raises(ValueError, match=r"a document is .*, which is not text"):
        train_tokenizer((row["text"] for row in load_source(str(tmp_path / "a.jsonl"))), 300)


def test_the_standard_library_is_split_by_file_and_reproducibly():
    train, validation = (list(itertools.islice(stdlib_documents(s), 50)) for s in ("train", "validation"))
    assert train == list(itertools.islice(stdlib_documents("train"), 50))
    assert not set(filter(None, train)) & set(filter(None, validation))
    with pytest.raises(ValueError, match="stdlib has"):
        next(stdlib_documents("test"))


@pytest.mark.parametrize("text", ["", "plain", "naïve  \n\ttext 🎈 \x00\x7f", "a<|endoftext|>b"])
def test_the_bytes_tokenizer_has_one_token_per_byte(text):
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    if "<|" not in text:
        assert tokenizer(text).input_ids == list(text.encode())
    assert (len(tokenizer), tokenizer.eos_token_id) == (257, 256)


def test_a_trained_vocabulary_has_the_right_size_is_lossless_and_can_be_saved(tmp_path):
    texts = list(itertools.islice(stdlib_documents(), 5))
    tokenizer = train_tokenizer(texts, 400)
    assert len(tokenizer) == 400
    ids = tokenizer(texts[1] + "🎈").input_ids
    assert tokenizer.decode(ids) == texts[1] + "🎈"
    assert len(ids) < 0.8 * len(texts[1])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    directory = tmp_path / "tokenizer"
    for again in (load_tokenizer(str(directory)), AutoTokenizer.from_pretrained(directory)):
        assert again(texts[1] + "🎈").input_ids == ids
        assert again.eos_token == tokenizer.eos_token
    assert train_tokenizer(texts, 400)(texts[2]).input_ids == tokenizer(texts[2]).input_ids
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer(texts, 256)


def test_a_missing_tokenizer_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such directory"):
        load_tokenizer(str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="could not be loaded"):
        load_tokenizer(str(tmp_path))


def test_documents_are_tokenised_once_per_tokenizer_and_end_with_end_of_text(files):
    data = load_source(str(files["a.jsonl"]), text_column="body")
    first = tokenize(data, load_tokenizer("bytes"), 100)
    assert first["input_ids"][:] == [[*text.encode(), 256] for text in TEXTS]
    again = tokenize(load_source(str(files["a.jsonl"]), text_column="body"), load_tokenizer("bytes"), 100)
    assert again.cache_files == first.cache_files != []
    for other in (
        tokenize(data, train_tokenizer(["x"], 260), 100),
        tokenize(data, load_tokenizer("bytes"), 99),
    ):
        assert other.cache_files != first.cache_files


@given(
    st.lists(st.text(st.characters(max_codepoint=127), max_size=30), min_size=1, max_size=8),
    st.integers(1, 9),
)
def test_documents_are_split_at_the_context_length(texts, context_len):
    data = Dataset.from_dict({"text": texts}).to_iterable_dataset()
    pieces = [row["input_ids"].tolist() for row in tokenize(data, load_tokenizer("bytes"), context_len)]
    assert all(0 < len(piece) <= context_len for piece in pieces)
    for text in texts:  # every piece but the last of a document is full
        document = []
        while not document or document[-1] != 256:
            assert len(document) % context_len == 0
            document += pieces.pop(0)
        assert document == [*text.encode(), 256]
    assert pieces == []
