"""Scores against the model's own logits and greedy text, and against `lm_eval --model hf`."""

import json
import math
import re
from pathlib import Path

import lm_eval
import lm_eval.tasks
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing
from transformers import MambaConfig, Qwen3NextConfig

from osdn import OSDNConfig
from osdn.analysis.prompts import select
from osdn.evaluation import harness
from osdn.evaluation.harness import (
    OWN_TASKS,
    TokenBatchedLM,
    language_model,
    load_task,
    position_limit,
    prompt_texts,
    run_task,
)
from osdn.evaluation.suites import SUITES
from osdn.models.checkpoints import load_model, load_tokenizer
from tests.evaluation.mirror import arc, boolq, fda, piqa, prose, save_osdn, swde, write_mirror

TASKS = {task.name: task for tasks in SUITES.values() for task in tasks}
ROWS = 13


@pytest.fixture(scope="module")
def big_mirror(tmp_path_factory):
    return write_mirror(tmp_path_factory.mktemp("big"), ROWS)


class Checkpoint:
    def __init__(self, path: str) -> None:
        self.path, self.model, self.tokenizer = path, load_model(path), load_tokenizer(path)

    def run(self, task: str, mirror: Path, tokens_at_once: int = 2048, **options) -> dict:
        lm = language_model(self.model, self.tokenizer, tokens_at_once, **options)
        loaded = load_task(task, self.tokenizer, data_dir=mirror)
        return run_task(lm, TASKS[task], loaded, None, lambda done, total: None)

    def scores(self, task: str, mirror: Path, **options) -> dict:
        return self.run(task, mirror, **options)["scores"]

    @torch.no_grad()
    def loglikelihood(self, context: str, continuation: str) -> float:
        """log p(continuation | context), with one token per byte."""
        ids = self.tokenizer(context + continuation).input_ids
        start = len(self.tokenizer(context).input_ids)
        logits = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return sum(logits[i - 1, ids[i]].item() for i in range(start, len(ids)))

    @torch.no_grad()
    def continuation(self, prompt: str, count: int) -> str:
        """Greedy text, recomputing the prefix for every token."""
        ids = self.tokenizer(prompt).input_ids
        start = len(ids)
        while len(ids) - start < count:
            ids.append(self.model(torch.tensor([ids])).logits[0, -1].argmax().item())
        return self.tokenizer.decode(ids[start:])


@pytest.fixture(scope="module", params=["osdn", "llama"])
def checkpoint(request):
    return Checkpoint(request.getfixturevalue(request.param))


def best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def test_normalised_accuracy_divides_by_the_choices_length(checkpoint, big_mirror):
    right = {"piqa": 0, "arc_easy": 0}
    for i in range(ROWS):
        row = piqa(i)
        context = f"Question: {row['goal']}\nAnswer:"
        choices = [row["sol1"], row["sol2"]]
        values = [checkpoint.loglikelihood(context, f" {c}") / len(c) for c in choices]
        right["piqa"] += best(values) == row["label"]
        row = arc(i)
        values = [
            checkpoint.loglikelihood(f"Question: {row['question']}\nAnswer:", f" {c}") / len(c)
            for c in row["choices"]["text"]
        ]
        right["arc_easy"] += "ABC"[best(values)] == row["answerKey"]
    for task, count in right.items():
        score = checkpoint.scores(task, big_mirror)[task]
        assert score.value == pytest.approx(count / ROWS)
        assert score.error == pytest.approx(math.sqrt(score.value * (1 - score.value) / (ROWS - 1)))


def test_plain_accuracy_does_not_divide_by_length(checkpoint, big_mirror):
    right = 0
    for i in range(ROWS):
        row = boolq(i)
        context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
        values = [checkpoint.loglikelihood(context, f" {word}") for word in ("no", "yes")]
        right += best(values) == row["label"]
    assert checkpoint.scores("boolq", big_mirror)["boolq"].value == pytest.approx(right / ROWS)


def test_lambada_scores_the_last_word_and_wikitext_all_words(checkpoint, big_mirror):
    last = [checkpoint.loglikelihood(*split_last(f"{prose(i, 90)} the word")) for i in range(ROWS)]
    scores = checkpoint.scores("lambada_openai", big_mirror)
    assert scores["lambada_ppl"].value == pytest.approx(math.exp(-sum(last) / ROWS), rel=1e-3)
    assert scores["lambada_ppl"].error > 0
    loaded = load_task("wikitext", checkpoint.tokenizer, data_dir=big_mirror)
    total = sum(
        checkpoint.loglikelihood("<|endoftext|>", loaded.doc_to_target(doc)) for doc in loaded.eval_docs
    )
    words = sum(len(re.split(r"\s+", f" = Title {i} = \n {prose(i, 300)}")) for i in range(ROWS))
    score = checkpoint.scores("wikitext", big_mirror)["wikitext_ppl"]
    assert math.log(score.value) == pytest.approx(-total / words, rel=1e-5)
    assert score.error > 0


def split_last(text: str) -> tuple[str, str]:
    before, _, last = text.rpartition(" ")
    return before, f" {last}"


def write_rows(mirror: Path, place: str, rows: list[dict]) -> None:
    path = mirror / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize(("task", "row", "place"), [
    ("fda", fda, "hazyresearch/based-fda/validation.jsonl"),
    ("fda_twice", fda, "hazyresearch/based-fda/validation.jsonl"),
    ("swde_twice", swde, "hazyresearch/based-swde-v2/validation.jsonl"),
])  # fmt: skip
def test_recall_counts_the_answers_that_greedy_text_contains(checkpoint, tmp_path, task, row, place):
    """Every second answer is the model's own continuation; padding and the cache must not change it."""
    rows = [{**row(i), "text": row(i)["text"][17 * i :]} for i in range(5)]
    write_rows(tmp_path, place, rows)
    loaded = load_task(task, checkpoint.tokenizer, data_dir=tmp_path)
    for i, doc in enumerate(loaded.eval_docs):
        said = checkpoint.continuation(loaded.doc_to_text(doc), 6).split("\n")[0]
        said = said.strip().rstrip("\ufffd")  # possibly an incomplete character
        said = said.upper() if said.isascii() else said
        rows[i]["value"] = said if i % 2 == 0 and said else "not what it says"
    expected = sum(row["value"] != "not what it says" for row in rows) / 5
    write_rows(tmp_path, place, rows)
    result = checkpoint.run(task, tmp_path)
    assert expected >= 0.2
    assert result["scores"][task].value == pytest.approx(expected)
    assert result["scores"][task].error > 0
    assert result["documents"] == 5


def test_exact_match_requires_the_whole_answer(checkpoint, tmp_path):
    place = "google-research-datasets/nq_open/validation.jsonl"
    rows = [{"question": prose(i, 40), "answer": [""]} for i in range(2)]
    write_rows(tmp_path, place, rows)
    loaded = load_task("nq_open", checkpoint.tokenizer, data_dir=tmp_path)
    for i, doc in enumerate(loaded.eval_docs):
        prompt = f"Answer these questions:\n\n{loaded.doc_to_text(doc)}"
        said = checkpoint.continuation(prompt, 256)
        for stop in ("\n", ".", ",", "<|endoftext|>"):
            said = said.split(stop)[0]
        rows[i]["answer"] = [said.strip() if i < 1 else f"{said} and more"]
    write_rows(tmp_path, place, rows)
    assert checkpoint.scores("nq_open", tmp_path)["nq_open"].value == 0.5


@pytest.mark.parametrize(("task", "doc", "text", "metric", "value"), [
    # "answer is 5" shares one of its three words with "5": precision 1/3, recall 1.
    ("drop", {"answers": [("5",)]}, "The answer is 5", "f1", 0.5),
    ("drop", {"answers": [("5",), ("Ann Lee",)]}, "ann lee", "f1", 1.0),
    ("longbench_qasper", {"answers": ["a blue sky", "no"]}, "green, blue", "score", 0.5),
    ("longbench_passage_count", {"answers": ["4"]}, "4 or 5", "score", 0.5),
    ("longbench_passage_retrieval_en", {"answers": ["Paragraph 3"]}, "Paragraph 3", "score", 1.0),
    ("longbench_trec", {"answers": ["Date"], "all_classes": ["Date", "Place"]}, "Date, Place", "score", 0.5),
    # The longest common subsequence of "a b c d" and "a c d x" has three of four words.
    ("longbench_gov_report", {"answers": ["a c d x"]}, "a b c d", "score", 0.75),
])  # fmt: skip
def test_scores_of_generated_answers_match_hand_calculation(mirror, task, doc, text, metric, value):
    loaded = load_task(task, None, data_dir=mirror)
    assert loaded.process_results(doc, [text])[metric] == pytest.approx(value, abs=1e-6)
    assert TASKS[task].columns[task] == f"{metric},none"


def test_the_number_of_tokens_at_once_does_not_matter(checkpoint, big_mirror):
    for task in ("hellaswag", "wikitext", "squad_twice", "longbench_trec"):
        few = checkpoint.run(task, big_mirror, tokens_at_once=40)["metrics"]
        many = checkpoint.run(task, big_mirror, tokens_at_once=4096)["metrics"]
        one = checkpoint.run(task, big_mirror, batch_size=1)["metrics"]
        assert few == pytest.approx(many, rel=1e-3), task
        assert few == pytest.approx(one, rel=1e-3), task


def test_only_models_with_positions_have_a_maximum_length(llama):
    short = OSDNConfig.from_preset("osdn-tiny", max_position_embeddings=16)
    assert position_limit(short) is None
    assert position_limit(MambaConfig()) is None
    assert position_limit(load_model(llama).config) == 2048
    assert position_limit(Qwen3NextConfig(max_position_embeddings=4096)) == 4096  # it has attention layers


@pytest.mark.parametrize("bos", [False, True])
def test_evaluation_and_diagnosis_read_the_same_prompts(mirror, tmp_path, monkeypatch, bos):
    """Prompts are not truncated, although the configuration says that the model was trained on 16 tokens."""
    checkpoint = Checkpoint(save_osdn(tmp_path, max_position_embeddings=16))
    if bos:
        template = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
        checkpoint.tokenizer.backend_tokenizer.post_processor = template
    seen = []
    original = TokenBatchedLM._model_generate

    def spy(self, context, *args, **kwargs):
        mask = kwargs["attention_mask"]
        seen.extend(tuple(row[real.bool()].tolist()) for row, real in zip(context, mask))
        return original(self, context, *args, **kwargs)

    monkeypatch.setattr(TokenBatchedLM, "_model_generate", spy)
    for task in ("fda", "fda_twice", "swde_twice", "squad_twice", "nq_open"):
        seen.clear()
        result = checkpoint.run(task, mirror)
        _, prompts = select(checkpoint.tokenizer, None, [task], 3, 2048, mirror)
        assert set(seen) == {tuple(prompt.ids.tolist()) for prompt in prompts}, task
        assert len(seen) == 3
        assert result["truncated"] == {"prompts": 0, "tokens": 0}


def test_truncation_to_a_maximum_length_is_counted(checkpoint, mirror):
    texts = prompt_texts(load_task("fda_twice", checkpoint.tokenizer, data_dir=mirror))
    excess = [len(checkpoint.tokenizer(text).input_ids) - (640 - 48) for text in texts]
    assert min(excess) > 0
    cut = checkpoint.run("fda_twice", mirror, max_length=640)["truncated"]
    assert cut == {"prompts": 3, "tokens": sum(excess)}
    pairs = [
        (f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", row) for row in map(boolq, range(3))
    ]
    excess = [len(context + choice) - 101 for context, _ in pairs for choice in (" no", " yes")]
    cut = checkpoint.run("boolq", mirror, max_length=100)["truncated"]
    assert cut == {"prompts": 6, "tokens": sum(excess)}
    assert checkpoint.run("wikitext", mirror, max_length=100)["truncated"] == {"prompts": 3, "tokens": 0}
    assert checkpoint.run("wikitext", mirror)["truncated"] == {"prompts": 0, "tokens": 0}


def test_a_prompt_longer_than_a_batch_is_read_in_pieces(checkpoint, monkeypatch):
    contexts = [prose(i, 130 + 20 * i) for i in range(3)]
    ids = [checkpoint.tokenizer(c).input_ids for c in contexts]
    greedy = [
        checkpoint.model.generate(torch.tensor([x]), max_new_tokens=5)[0, len(x) :].tolist() for x in ids
    ]
    scored = [(None, x, after) for x, g in zip(ids, greedy) for after in ([7, 8, 9], g)]
    scored.append(
        (None, ids[0], ids[1][:140])
    )  # a continuation longer than a piece, with a truncated context
    continued = [Instance("generate_until", {}, (c, {"until": [], "max_gen_toks": 6}), 0) for c in contexts]

    def answers(tokens_at_once: int) -> tuple:
        lm = language_model(checkpoint.model, checkpoint.tokenizer, tokens_at_once, max_length=240)
        return lm._loglikelihood_tokens(scored), lm.generate_until(continued)

    (scores, texts), lengths = answers(4096), []
    read = harness.read_in_pieces
    for name, value in (("SEGMENT", 64), ("GENERATED_TOKENS", 64)):
        monkeypatch.setattr(harness, name, value)
    monkeypatch.setattr(harness, "read_in_pieces", lambda model, ids: read(model, ids, 64))
    with checkpoint.model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(args[0].shape[1] if args else kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    ):
        in_pieces, texts_in_pieces = answers(100)
    assert texts_in_pieces == texts
    assert [greedy for _, greedy in in_pieces] == [False, True] * 3 + [False]
    assert [x for x, _ in in_pieces] == pytest.approx([x for x, _ in scores], rel=1e-4)
    assert max(lengths) == 64


def test_prompts_are_continued_in_batches_sized_by_tokens(osdn, monkeypatch):
    monkeypatch.setattr(harness, "GENERATED_TOKENS", 100)
    checkpoint = Checkpoint(osdn)
    lm = language_model(checkpoint.model, checkpoint.tokenizer, 100)
    shapes = []
    monkeypatch.setattr(
        lm, "_model_generate", lambda context, **_: shapes.append(tuple(context.shape)) or context
    )
    lengths = [20, 150, 30, 45, 20, 50]
    requests = [
        Instance("generate_until", {}, ("a" * n, {"until": ["\n"], "max_gen_toks": 4}), i)
        for i, n in enumerate(lengths)
    ]
    assert len(lm.generate_until(requests)) == 6
    assert shapes == [(1, 150), (2, 50), (3, 30)]


def test_a_batch_has_at_most_the_requested_number_of_tokens(osdn):
    checkpoint = Checkpoint(osdn)
    lm = language_model(checkpoint.model, checkpoint.tokenizer, 100)
    assert isinstance(lm, TokenBatchedLM)
    lengths = [90, 60, 34, 33, 33, 20, 20, 20, 20, 20, 1]
    requests = [(None, [0] * (n - 1), [0]) for n in lengths]
    batches: list[list[int]] = [[]]
    for i, n in enumerate(lengths):  # as lm_eval asks
        batches[-1].append(n)
        if len(batches[-1]) == lm._batch_scheduler(i, requests):
            batches.append([])
    assert batches == [[90], [60], [34, 33], [33, 20, 20], [20, 20, 20, 1]]
    assert all(len(batch) * batch[0] <= 100 for batch in batches)


LOCAL = {  # tasks that lm_eval can read local files for
    "wikitext": ("wikitext/wikitext.yaml", "parquet", "test"),
    "lambada_openai": ("lambada/lambada_openai.yaml", "json", "test"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "json", "validation"),
    "nq_open": ("nq_open/nq_open.yaml", "json", "validation"),
}


@pytest.mark.parametrize("name", ["osdn", "llama"])
def test_lm_evals_own_hf_model_gives_the_same_numbers(name, request, big_mirror, tmp_path, monkeypatch):
    path = request.getfixturevalue(name)
    root = Path(lm_eval.tasks.__file__).parent
    for task, (file, kind, split) in LOCAL.items():
        files = [str(f) for f in (big_mirror / TASKS[task].data).rglob("*") if f.is_file()]
        (tmp_path / f"{task}.yaml").write_text(
            f"include: {root / file}\ntask: {task}\ndataset_path: {kind}\ndataset_name: null\n"
            f"training_split: null\ndataset_kwargs: {{data_files: {{{split}: {json.dumps(files)}}}}}\n"
            + ("validation_split: null\n" if split == "test" else "")
        )
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # seconds of subprocesses
    manager = TaskManager(
        include_path=[tmp_path, OWN_TASKS],
        include_defaults=False,
        metadata={"pretrained": path, "data_dir": str(big_mirror)},
    )
    tasks = [*LOCAL, "fda_twice"]
    theirs = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": path, "dtype": "float32"}, tasks=tasks, batch_size=3,
        device="cpu", task_manager=manager, bootstrap_iters=0,
    )["results"]  # fmt: skip
    checkpoint = Checkpoint(path)
    for task in tasks:
        for column, score in checkpoint.scores(task, big_mirror).items():
            assert score.value == pytest.approx(theirs[task][TASKS[task].columns[column]], rel=1e-4), column
