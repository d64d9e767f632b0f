"""A small mirror of every data set in its real format, and small checkpoints to evaluate on it."""

import json
from pathlib import Path
from pydoc_data import topics

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.training.data import load_tokenizer
from tests.models.variants import scatter

# ASCII, so that one byte is one token
TEXT = " ".join(" ".join(topics.topics.values()).split()).encode("ascii", "ignore").decode()


def prose(i: int, characters: int) -> str:
    """A passage of Python's documentation."""
    start = 997 * i % (len(TEXT) - characters)
    return TEXT[start : start + characters]


def fda(i: int) -> dict:
    text = f"{prose(i, 200)} Device name: Pump {i}. {prose(i + 1, 120)}\ndevice name:"
    return {
        "doc_id": str(i),
        "file_name": f"K{i}.txt",
        "key": "device name",
        "value": f"Pump {i}",
        "text": text,
    }


def swde(i: int) -> dict:
    body = f"{prose(i, 180)} director: Jane Doe {i} {prose(i + 1, 90)}"
    text = f"{body}\n\nSummary of information above...\n\ndirector:"
    return {
        "doc_id": str(i),
        "file_name": f"{i}.html",
        "key": "director",
        "value": f"Jane Doe {i}",
        "text": text,
    }


def squad(i: int) -> dict:
    context = f"{prose(i, 150)} The tower is {i + 10} metres high. {prose(i + 2, 60)}"
    return {
        "doc_id": str(i), "title": "Towers", "context": context, "question": "How high is the tower?",
        "value": f"{i + 10} metres", "text": f"{context}\nThe height of the tower is",
    }  # fmt: skip


def hellaswag(i: int) -> dict:
    endings = [prose(4 * i + j, 30 + j) for j in range(4)]
    return {
        "ind": i, "activity_label": "Reading", "ctx_a": prose(i, 60), "ctx_b": "then she", "endings": endings,
        "source_id": "a", "split": "val", "split_type": "indomain", "label": str(i % 4),
    }  # fmt: skip


def piqa(i: int) -> dict:
    return {"goal": prose(i, 40), "sol1": prose(i + 1, 30), "sol2": prose(i + 2, 20), "label": i % 2}


def winogrande(i: int) -> dict:
    sentence = f"{prose(i, 30)} _ went home."
    return {"sentence": sentence, "option1": "Ann", "option2": "Bob", "answer": str(1 + i % 2)}


def siqa(i: int) -> dict:
    answers = {"answerA": "a b", "answerB": prose(i, 9), "answerC": "so"}
    return {"context": prose(i, 50), "question": "What next?", **answers, "label": str(1 + i % 3)}


def boolq(i: int) -> dict:
    return {"question": prose(i, 30), "passage": prose(i, 90), "idx": i, "label": i % 2}


def arc(i: int) -> dict:
    choices = {"text": [prose(3 * i + j, 12 + j) for j in range(3)], "label": ["A", "B", "C"]}
    return {"id": str(i), "question": prose(i, 50), "choices": choices, "answerKey": "ABC"[i % 3]}


def sciq(i: int) -> dict:
    wrong = {f"distractor{j}": prose(i + j, 8) for j in (1, 2, 3)}
    return {"question": prose(i, 40), **wrong, "correct_answer": prose(i, 9), "support": prose(i, 80)}


def openbookqa(i: int) -> dict:
    choices = {"text": [prose(4 * i + j, 9 + j) for j in range(4)], "label": ["A", "B", "C", "D"]}
    return {"id": str(i), "question_stem": prose(i, 40), "choices": choices, "answerKey": "ABCD"[i % 4]}


def drop(i: int) -> dict:
    empty = {"day": "", "month": "", "year": ""}
    answer = {"number": str(i), "date": empty, "spans": [], "hit_id": "", "worker_id": ""}
    validated = {"number": [str(i + 1)], "date": [empty], "spans": [[]], "hit_id": [""], "worker_id": [""]}
    return {
        "section_id": "s", "query_id": str(i), "passage": prose(i, 150), "question": "How many?",
        "answer": answer, "validated_answers": validated,
    }  # fmt: skip


def triviaqa(i: int) -> dict:
    answer = {"aliases": [f"Answer {i}", "e"], "value": f"Answer {i}", "normalized_aliases": [f"answer {i}"]}
    return {"question": prose(i, 40), "question_id": str(i), "answer": answer}


def longbench(task: str):
    answers = {"passage_retrieval_en": ["Paragraph 3"], "passage_count": ["4"], "trec": ["Date"]}
    return lambda i: {
        "_id": str(i), "context": prose(i, 300), "question": prose(i + 1, 30), "input": prose(i + 1, 30),
        "answers": answers.get(task, ["one answer", prose(i, 20)]), "length": 60, "dataset": task,
        "language": "en", "all_classes": ["Date", "Place"] if task == "trec" else None,
    }  # fmt: skip


LONGBENCH = (
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum",
    "multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en",
)  # fmt: skip
FILES = {  # files of the mirror, in every possible layout, and the rows in them
    "EleutherAI/wikitext_document_level/wikitext-2-raw-v1/test.parquet": lambda i: {
        "page": f" = Title {i} = \n {prose(i, 300)}"
    },
    "EleutherAI/lambada_openai/default/test.jsonl": lambda i: {"text": f"{prose(i, 90)} the word"},
    "HuggingFaceFW/fineweb-edu/sample/10BT/013_00000.parquet": lambda i: {"text": prose(i, 250 + 9 * i)},
    "hazyresearch/based-fda/data/validation-00000-of-00001.parquet": fda,
    "hazyresearch/based-swde-v2/validation.jsonl": swde,
    "hazyresearch___based-squad/default/0.0.0/0a1b/based-squad-validation.arrow": squad,
    "baber/piqa/validation.jsonl": piqa,
    "Rowan/hellaswag/validation.jsonl": hellaswag,
    "allenai/winogrande/winogrande_xl/validation.jsonl": winogrande,
    "allenai/ai2_arc/ARC-Easy/test-00000-of-00001.parquet": arc,
    "allenai/ai2_arc/ARC-Challenge/test-00000-of-00001.parquet": lambda i: arc(i + 50),
    "lighteval/siqa/validation.jsonl": siqa,
    "aps/super_glue/boolq/validation.jsonl": boolq,
    "EleutherAI/drop/validation.jsonl": drop,
    "google-research-datasets/nq_open/validation.jsonl": lambda i: {
        "question": prose(i, 40),
        "answer": ["e", f"answer {i}"],
    },
    "mandarjoshi/trivia_qa/rc.nocontext/validation.jsonl": triviaqa,
    "allenai/sciq/test.jsonl": sciq,
    "allenai/openbookqa/main/test-00000-of-00001.parquet": openbookqa,
    "baber/paul_graham_essays/train.jsonl": lambda i: {"text": prose(i, 9000)},
    "emozilla/pg19-test/test.jsonl": lambda i: {"short_book_title": f"{i}", "text": prose(i, 20_600)},
    **{f"Xnhyacinth/LongBench/{task}/test.jsonl": longbench(task) for task in LONGBENCH},
}


def write_mirror(root: Path, rows: int = 3) -> Path:
    for name, row in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = [row(i) for i in range(1 if "pg19" in name else rows)]
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(line) + "\n" for line in content))
        elif path.suffix == ".parquet":
            Dataset.from_list(content).to_parquet(path)
        else:
            write_arrow(path, content)
    write_punkt(root / "nltk_data" / "tokenizers" / "punkt_tab" / "english")
    return root


def write_punkt(folder: Path) -> None:
    """An untrained sentence splitter for nltk: every full stop ends a sentence."""
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).write_text("")


def write_arrow(path: Path, rows: list[dict]) -> None:
    """Write rows as in the cache of `datasets`."""
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(path=str(path)) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()


def save_osdn(folder: Path, variant: str = "osdn", seed: int = 0, **fields: object) -> str:
    """A small byte-level model whose weights all matter, saved with its tokenizer."""
    tokens = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 256}
    config = OSDNConfig.from_preset(f"{variant}-tiny", **tokens, **fields)
    scatter(OSDNForCausalLM(config), seed).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return str(folder)


def save_llama(folder: Path) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    scatter(LlamaForCausalLM(config)).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return str(folder)
