"""The text task: its corpus, its windows and its loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from osdn.lab.text import PROMPT, TextTask, corpus, prepare
from osdn.lab.training import Run, build
from osdn.lab.variants import Variant
from osdn.training.data import load_tokenizer


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    task = TextTask(
        str(tmp_path_factory.mktemp("corpus")), vocab_size=300, length=33, megabytes=0.2, evaluation=5
    )
    prepare(task)
    return task


def test_the_corpus_is_reproducible_and_split_by_file():
    train, validation = corpus("train", 0.3), corpus("validation", 0.3)
    assert train == corpus("train", 0.3)
    assert not set(train) & set(validation)
    assert 0.2e6 < sum(map(len, train)) < 1.5e6


def test_labels_are_the_next_tokens_of_the_training_files(task):
    inputs, labels = next(iter(task.batches(0, 4)))
    assert inputs.shape == labels.shape == (4, 33)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    text = "".join(corpus("train", task.megabytes))
    words = load_tokenizer(task.folder).decode(inputs[0]).split("<|endoftext|>")[0]
    assert words.strip("�") in text


def test_batches_depend_only_on_the_seed(task):
    first, again, other = (next(iter(task.batches(seed, 3)))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_evaluation_reports_the_models_own_loss(task):
    model = build(Run(task, Variant("osdn"), 0, width=16)).eval()
    found = task.evaluate(model, 0)
    assert len(found["loss_by_position"]) == task.length
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["loss"] == pytest.approx(math.log(300), rel=0.02)  # an untrained model knows nothing
    with torch.no_grad():
        torch.nn.init.zeros_(model.lm_head.weight)
    flat = task.evaluate(model, 0)["loss_by_position"]
    assert flat == pytest.approx([F.cross_entropy(torch.zeros(1, 300), torch.tensor([0])).item()] * 33)
    assert found["sample"].startswith(PROMPT)
    assert found["sample"] == task.generate(build(Run(task, Variant("osdn"), 0, width=16)).eval(), 0)


def test_a_zoo_row_can_be_evaluated_on_text(task):
    found = task.evaluate(build(Run(task, Variant("gla"), 0, width=16)).eval(), 0)
    assert found["sample"].startswith(PROMPT)
    assert found["loss"] == pytest.approx(math.log(300), rel=0.02)


def test_preparing_again_changes_nothing(task, monkeypatch):
    monkeypatch.setattr("osdn.lab.text.corpus", lambda *_: pytest.fail("the corpus already exists"))
    prepare(task)
