"""Every task's generator against its published definition, checked token by token."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from osdn.cli.task_options import collect, field_docs, load
from osdn.lab.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopying
from osdn.lab.needle import NeedleTask
from osdn.lab.recall import RecallTask
from osdn.lab.synthetic import IGNORED, answers
from osdn.lab.tasks import EXPERIMENTS
from osdn.lab.tracking import TrackingTask, products
from osdn.lab.training import Run, build, execute
from osdn.lab.variants import Variant

SYNTHETIC = {name: x.task for name, x in EXPERIMENTS.items() if name != "text"}


def sample(task, n=100, seed=0):
    return task.sample(n, torch.Generator().manual_seed(seed))


def rows(task, n=100):
    return zip(*(x.tolist() for x in sample(task, n)))


# -------------------------------------------------------------------------------------------- every task


@pytest.mark.parametrize("name", SYNTHETIC)
def test_batches_depend_only_on_the_seed_and_use_the_vocabulary(name):
    task = SYNTHETIC[name]
    first, again, other = (next(iter(task.batches(seed, 8))) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    inputs, labels = sample(task)
    assert inputs.shape == labels.shape
    assert 0 <= inputs.min() <= inputs.max() < task.vocab_size
    assert ((labels == IGNORED) | ((labels >= 0) & (labels < task.vocab_size))).all()
    assert (labels != IGNORED).any(1).all()  # every sequence asks for something


@pytest.mark.parametrize("name", SYNTHETIC)
def test_every_task_trains_and_reports_its_metrics(name):
    experiment = EXPERIMENTS[name]
    task = replace(experiment.task, evaluation=2)
    result = execute(Run(task, Variant("osdn-newton", beta_bias=-1.0), 0, width=16, steps=1, batch=2))
    assert all(0 <= result[metric] <= 1 for metric in experiment.metrics)
    assert math.isfinite(result["curve"][-1]["loss"])


def test_the_base_settings_are_the_published_ones():
    sizes = {name: (SYNTHETIC[name].vocab_size, SYNTHETIC[name].length) for name in SYNTHETIC}
    assert sizes["in-context-recall"] == (16, 128)
    assert sizes["noisy-recall"] == (32, 128)
    assert (SYNTHETIC["noisy-recall"].noise_vocab_size, SYNTHETIC["noisy-recall"].noise) == (16, 0.2)
    assert sizes["fuzzy-recall"] == (16, 128)
    assert SYNTHETIC["fuzzy-recall"].motif == 3
    assert sizes["selective-copying"] == (16, 256)
    assert SYNTHETIC["selective-copying"].tokens == 16
    assert sizes["compression"] == (16, 32)
    assert sizes["memorization"] == (256, 32)


def test_every_option_of_a_task_has_help():
    for experiment in EXPERIMENTS.values():
        names = set(experiment.task.__dataclass_fields__)
        assert names == set(field_docs(type(experiment.task)))


def test_the_command_line_knows_the_options_of_every_task():
    assert load() == collect(), "run python -m osdn.cli.task_options"


@pytest.mark.parametrize(
    ("task", "settings", "name"),
    [
        (RecallTask, {"noise": 1.0}, "noise"),
        (InContextRecall, {"length": 5}, "length"),
        (InContextRecall, {"noise": 0.5}, "noise_vocab_size"),
        (InContextRecall, {"vocab_size": 17, "noise_vocab_size": 16}, "vocab_size"),
        (FuzzyRecall, {"vocab_size": 6}, "vocab_size"),
        (SelectiveCopying, {"length": 32}, "length"),
        (TrackingTask, {"group": "s4"}, "group"),
        (NeedleTask, {"needles": 30}, "vocab_size"),
    ],
)
def test_impossible_sizes_are_rejected_by_name(task, settings, name):
    with pytest.raises(ValueError, match=f"^{name} is"):
        task(**settings)


# ------------------------------------------------------------------------------------------------- recall


def test_noise_replaces_presented_values_but_not_the_answers():
    task = RecallTask(vocab_size=64, pairs=6, length=60, passes=3, noise=0.3)
    wrong = total = 0
    for tokens, labels in rows(task, 500):
        answer = {tokens[t]: label for t, label in enumerate(labels) if label != IGNORED}
        assert len(answer) == 6
        shown = list(zip(tokens[: task.context : 2], tokens[1 : task.context : 2]))
        assert all(32 <= value < 64 for _, value in shown)
        wrong += sum(value != answer[key] for key, value in shown)
        total += len(shown)
    expected = 0.3 * (1 - 1 / 32)  # a random value is correct once in 32
    assert abs(wrong / total - expected) < 5 * math.sqrt(expected / total)


# ---------------------------------------------------------------------------------------------------- MAD


def by_first_sight(tokens, keys):
    """The labels of in-context recall: the value of every key that occurred earlier."""
    value_of, asked = {}, []
    for t in range(0, len(tokens) - 1, 2):
        if tokens[t] in keys:
            known = tokens[t] in value_of
            asked.append(value_of[tokens[t]] if known else IGNORED)
            assert value_of.setdefault(tokens[t], tokens[t + 1]) == tokens[t + 1]
        else:
            asked.append(IGNORED)
        asked.append(IGNORED)
    return asked


@pytest.mark.parametrize(
    "task",
    [InContextRecall(), InContextRecall(32, 128, 16, 0.2), InContextRecall(13, 20, 3, 0.8)],
    ids=str,
)
def test_in_context_recall_asks_for_the_values_of_known_keys(task):
    words = task.vocab_size - task.noise_vocab_size
    noise = pairs = 0
    for tokens, labels in rows(task, 300):
        assert len(tokens) == task.length - 1
        assert labels[-1] != IGNORED  # the last key occurred before
        expected = by_first_sight([*tokens, labels[-1]], range(words // 2))
        assert labels == expected[: len(labels)]
        for key, value in zip(tokens[::2], tokens[1::2]):
            assert (key < words // 2 and words // 2 <= value < words) or min(key, value) >= words
            noise += key >= words
            pairs += 1
    share = task.noise * (1 - 1 / (task.length // 2 - 1))  # one pair per sequence is never noise
    assert abs(noise / pairs - share) < 0.02
    inputs, labels = task.training_sample(2, torch.Generator().manual_seed(0))
    assert torch.equal(inputs[:, 1:], labels[:, :-1])  # training predicts every token


def test_fuzzy_recall_tests_keys_of_three_tokens_and_repeats_their_values():
    task = FuzzyRecall(vocab_size=16, length=64)
    for tokens, labels in rows(task, 200):
        assert len(tokens) == 63
        whole = [*tokens, labels[-1]]
        start = next(t for t, token in enumerate(whole) if token != 15)  # 15 is the padding on the left
        runs = [list(run) for _, run in itertools.groupby(whole[start:], key=lambda token: token < 7)]
        assert len(runs) % 2 == 0
        expected, value_of = [IGNORED] * start, {}
        for key, value in zip(runs[::2], runs[1::2]):
            assert len(key) == len(set(key)) == 3
            assert len(value) == len(set(value)) <= 3
            known = tuple(key) in value_of
            expected += [IGNORED] * 3 + (value if known else [IGNORED] * len(value))
            assert value_of.setdefault(tuple(key), value) == value
        assert known  # the last key always occurred before
        assert labels == expected[1:]
        assert start < 64 - 6  # the padding leaves no room for another pair


def test_fuzzy_training_has_keys_of_one_to_three_tokens():
    inputs, labels = FuzzyRecall().training_sample(50, torch.Generator().manual_seed(0))
    sizes = set()
    for tokens in inputs.tolist():
        groups = itertools.groupby(tokens, key=lambda token: (token < 7) - (token == 15))
        sizes |= {len(list(run)) for kind, run in groups if kind == 1}
    assert sizes == {1, 2, 3}
    assert torch.equal(inputs[:, 1:], labels[:, :-1])


def test_selective_copying_repeats_the_tokens_that_are_not_blank_in_order():
    task = SelectiveCopying(vocab_size=11, length=40, tokens=7)
    for tokens, labels in rows(task):
        content = [token for token in tokens[: 40 - 8] if token != 9]
        assert len(content) == 7
        assert max(content) < 9
        assert tokens[32] == 10  # the marker
        assert tokens[33:] == [9] * 7
        assert labels == [IGNORED] * 33 + content


def test_memorized_facts_are_one_to_one_and_the_same_for_every_seed():
    task, facts = Memorization(vocab_size=64, length=12), {}
    for seed in range(20):
        inputs, labels = sample(task, seed=seed)
        for tokens, answers_ in zip(inputs.tolist(), labels.tolist()):
            assert tokens[1::2] == [63] * 6
            assert answers_[::2] == [IGNORED] * 6
            for key, value in zip(tokens[::2], answers_[1::2]):
                assert facts.setdefault(key, value) == value
    assert len(facts) == len(set(facts.values())) == 31
    assert all(31 <= value < 63 for value in facts.values())


def test_compression_reads_every_token_from_the_last_output():
    task = Compression(vocab_size=9, length=7, evaluation=4)
    model = build(Run(task, Variant("delta_net"), 0, width=16)).eval()
    inputs, labels = sample(task, 3)
    assert (inputs[:, -1] == 8).all()
    assert torch.equal(labels[:, :-1], inputs[:, :-1])
    seen = []
    model.model.register_forward_hook(lambda _, __, out: seen.append(out.last_hidden_state))
    logits = task.logits(model, inputs, labels)
    assert logits.shape == (3 * 6, 9)
    hidden = seen[0].detach()[:, -1:].requires_grad_()
    angle = torch.tensor(4.0)  # position 4, first and last wavelength
    position = torch.zeros(16)
    rates = [10_000 ** (-i / 7) for i in range(8)]
    position[:8] = torch.tensor([math.sin(angle * r) for r in rates])
    position[8:] = torch.tensor([math.cos(angle * r) for r in rates])
    expected = model.decoder(hidden[1, 0] + position)
    torch.testing.assert_close(logits[6 + 4], expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------ state tracking


@pytest.mark.parametrize(("group", "size"), [("parity", 2), ("s3", 6), ("s5", 120)])
def test_labels_are_the_running_product_of_permutations(group, size):
    task = TrackingTask(group, length=9)
    assert task.vocab_size == size
    elements = list(itertools.permutations(range({"parity": 2, "s3": 3, "s5": 5}[group])))
    for tokens, labels in rows(task, 20):
        held = list(elements[0])  # where each item is
        assert held == sorted(held)
        for token, label in zip(tokens, labels):
            held = [elements[token][place] for place in held]
            assert elements[label] == tuple(held)


def test_parity_counts_ones_modulo_two():
    inputs, labels = sample(TrackingTask("parity", length=50))
    assert torch.equal(labels, inputs.cumsum(1) % 2)


@pytest.mark.parametrize("points", [2, 3, 5])
def test_products_form_a_group(points):
    table = products(points)
    n = math.factorial(points)
    a, b, c = torch.randint(n, (3, 200), generator=torch.Generator().manual_seed(0))
    assert torch.equal(table[table[a, b], c], table[a, table[b, c]])
    assert torch.equal(table[0], torch.arange(n))  # the identity
    assert all(sorted(row) == list(range(n)) for row in table.tolist())
    assert torch.equal(table, table.T) == (points == 2)  # S3 and S5 do not commute


# ------------------------------------------------------------------------------------------------- needle


def test_every_needle_occurs_once_and_is_queried_at_the_end():
    task = NeedleTask(vocab_size=65, length=60, needles=5)
    places = []
    for tokens, labels in rows(task, 300):
        facts = {}
        for t in range(50):
            if tokens[t] == 0:
                facts[tokens[t + 1]] = tokens[t + 2]
                places.append(t)
        assert len(facts) == 5
        filler = [x for x in tokens[:50] if x > 32]
        assert len(filler) == 35  # everything that is not a needle
        assert tokens[50::2] == [0] * 5
        assert {*tokens[51::2]} == {*facts}
        assert labels[:50] == [IGNORED] * 50
        assert labels[50::2] == [IGNORED] * 5
        assert labels[51::2] == [facts[key] for key in tokens[51::2]]
    assert min(places) == 0
    assert max(places) == 47  # needles can be anywhere


class Knows:
    """Answers correctly if the needle is in the first half of the haystack."""

    def __init__(self, task):
        self.task = task
        self.model, self.lm_head = self, lambda x: x

    def __call__(self, inputs, use_cache=False):
        hay = self.task.length - 2 * self.task.needles
        logits = torch.zeros(*inputs.shape, self.task.vocab_size)
        for row, out in zip(inputs.tolist(), logits):
            value_of = {row[t + 1]: row[t + 2] for t in range(hay // 2) if row[t] == 0}
            for t in range(hay, len(row)):
                out[t, value_of.get(row[t], 0)] = 1
        self.last_hidden_state = logits
        return self


def test_accuracy_is_attributed_to_the_depth_of_the_needle():
    task = NeedleTask(vocab_size=65, length=110, needles=5, evaluation=40)
    found = {row["depth"]: row["accuracy"] for row in task.by_depth(Knows(task))}
    assert list(found) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert found[0.1] == found[0.3] == 1
    assert 0 < found[0.5] < 1
    assert found[0.7] == found[0.9] == 0
    assert len(answers(task, Knows(task))) == 40 * 5
