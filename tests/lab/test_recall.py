"""The generator against the published definition, checked token by token."""

from dataclasses import replace

import pytest
import torch

from osdn.lab.recall import IGNORED, RecallTask

TASKS = [
    RecallTask(vocab_size=64, pairs=5, length=41, passes=1),
    RecallTask(vocab_size=97, pairs=7, length=60, passes=2),
    RecallTask(vocab_size=128, pairs=6, length=90, passes=3, overwrites=2),
    RecallTask(vocab_size=40, pairs=1, length=4, passes=1),
]


def sample(task, n=200, seed=0):
    return task.sample(n, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_pass_has_each_key_once_and_passes_repeat(task):
    inputs, _ = sample(replace(task, overwrites=0))
    keys, values = inputs[:, : 2 * task.pairs : 2], inputs[:, 1 : 2 * task.pairs : 2]
    for row in keys.tolist():
        assert len(set(row)) == task.pairs
        assert all(1 <= key < task.vocab_size // 2 for key in row)
    for row in values.tolist():
        assert len(set(row)) == task.pairs
        assert all(task.vocab_size // 2 <= value < task.vocab_size for value in row)
    for i in range(task.passes):
        again = inputs[:, 2 * task.pairs * i : 2 * task.pairs * (i + 1)]
        assert torch.equal(again, inputs[:, : 2 * task.pairs])


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_only_queries_have_labels_and_each_is_the_last_value_of_its_key(task):
    inputs, labels = sample(task)
    for tokens, answers in zip(inputs.tolist(), labels.tolist()):
        last = dict(zip(tokens[: task.context : 2], tokens[1 : task.context : 2]))
        asked = [t for t, answer in enumerate(answers) if answer != IGNORED]
        assert len(asked) == task.pairs == len(last)
        assert {tokens[t] for t in asked} == set(last)  # every key is asked for once
        assert all(answers[t] == last[tokens[t]] for t in asked)
        assert all(t >= task.context and (t - task.context) % 2 == 0 for t in asked)


def test_overwritten_keys_change_their_value_within_a_pass():
    task = RecallTask(vocab_size=64, pairs=6, length=60, passes=2, overwrites=4)
    inputs, _ = sample(task)
    for tokens in inputs[:, : task.context // 2].tolist():
        keys, values = tokens[::2], tokens[1::2]
        assert len(set(keys)) == 6
        assert len(set(keys[6:])) == 4
        assert all(values[keys.index(key)] != value for key, value in zip(keys[6:], values[6:]))


@pytest.mark.parametrize("key", [0, 2])
def test_gaps_follow_the_power_law(key):
    # The first gap follows p(i) ~ i ** (a - 1), i = 1 .. space; the third is drawn from what the others
    # leave.
    task = RecallTask(vocab_size=64, pairs=3, length=46, passes=1, power=0.01)
    inputs, labels = sample(task, n=40_000)
    asked = (labels != IGNORED) & (inputs == inputs[:, 2 * key, None])
    gaps = (asked.nonzero()[:, 1] - task.context) // 2
    assert len(gaps) == 40_000
    seen = torch.bincount(gaps, minlength=20).double() / len(gaps)
    law = torch.arange(1, 21).double() ** (0.01 - 1)
    law /= law.sum()
    if key == 2:
        left = 1 - law[:, None] - law  # after draws i and j
        third = law[:, None] * (law / (1 - law[:, None])) / left  # [i, j]
        third.fill_diagonal_(0)
        law = law * (third.sum() - third.sum(0) - third.sum(1))
    error = (law * (1 - law) / len(gaps)).sqrt()
    assert len(seen) == 20
    assert ((seen - law).abs() < 5 * error).all()


def test_filler_is_uniform_over_the_vocabulary():
    task = RecallTask(vocab_size=32, pairs=2, length=64, passes=1)
    inputs, labels = sample(task, n=4000)
    filler = inputs[:, task.context :][labels[:, task.context :] == IGNORED]
    seen = torch.bincount(filler, minlength=32).double() / len(filler)
    assert ((seen - 1 / 32).abs() < 5 * (1 / 32 / len(filler)) ** 0.5).all()


def test_batches_depend_only_on_the_seed():
    task = TASKS[1]
    first, again, other = (next(iter(task.batches(seed, 8))) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_the_grid_covers_passes_and_more_pairs_than_were_trained():
    task = RecallTask(vocab_size=60, pairs=8, length=64, passes=2, overwrites=1)
    found = {(t.pairs, t.passes): t for t in task.grid()}
    assert list(found) == [
        (4, 1),
        (4, 2),
        (8, 1),
        (8, 2),
        (16, 1),
        (16, 2),
        (24, 1),
        (24, 2),
    ]  # 32 do not fit
    assert found[8, 2] == task
    assert found[24, 1].overwrites == 3
    assert found[24, 1].length == 3 * 64


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"length": 30}, "length"), ({"overwrites": 9}, "overwrites"), ({"vocab_size": 16}, "vocab_size"),
     ({"passes": 0}, "passes")],
)  # fmt: skip
def test_impossible_sizes_are_rejected_by_name(settings, name):
    with pytest.raises(ValueError, match=f"^{name} is"):
        RecallTask(**{"vocab_size": 64, "pairs": 8, "length": 64, **settings})
