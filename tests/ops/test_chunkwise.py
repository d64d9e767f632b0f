"""How `chunkwise` lays sequences out; that its results are right is tested with those of all backends."""

import pytest
import torch

from osdn.ops.chunkwise import Chunks

LENGTHS = [5, 0, 17, 1, 4, 16, 0]


@pytest.mark.parametrize("size", [1, 4, 16])
def test_uneven_sequences_come_back_as_they_went(size):
    cuts = torch.tensor([0, *LENGTHS]).cumsum(0)
    x = torch.randn(1, sum(LENGTHS), 3, 2)
    chunks = Chunks(x, cuts, heads=3, size=size)
    assert chunks.count == sum(-(-length // size) for length in LENGTHS), "no chunk but those needed"
    assert torch.equal(chunks.merge(chunks.split(x)), x)
    assert chunks.split(torch.ones_like(x)).sum() == x.numel(), "whatever is not a token is zero"


def test_a_step_holds_the_next_chunk_of_every_sequence_that_has_one():
    cuts = torch.tensor([0, *LENGTHS]).cumsum(0)
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    tokens = torch.stack([sequence, position], -1)[None, :, None].float()  # [1, T, 1, 2]
    chunks = Chunks(tokens, cuts, heads=1, size=4)
    order = chunks.enter(torch.arange(len(LENGTHS))[:, None])
    for step, part in enumerate(chunks.by_step(chunks.split(tokens))):
        assert part[:, 0, 0].tolist() == order[: len(part)].tolist()
        assert (part[:, 0, 1] == 4 * step).all()


def test_states_leave_in_the_order_they_entered():
    x = torch.randn(1, sum(LENGTHS), 2, 1)
    chunks = Chunks(x, torch.tensor([0, *LENGTHS]).cumsum(0), heads=2, size=4)
    states = torch.arange(2 * len(LENGTHS)).view(-1, 2)
    running, finished = chunks.enter(states), []
    for part in chunks.by_step(chunks.split(x)):
        running = chunks.running(running, len(part), finished)
        assert len(running) == len(part)
    assert torch.equal(chunks.leave(running, finished), states)


@pytest.mark.parametrize("cuts", [None, torch.tensor([0, 8, 16])])
def test_equal_lengths_are_not_gathered(cuts):
    x = torch.randn(1 if cuts is not None else 2, 16 if cuts is not None else 8, 1, 3)
    chunks = Chunks(x, cuts, heads=1, size=4)
    assert chunks.even
    assert torch.equal(chunks.split(x), x.view(2, 2, 4, 3).transpose(0, 1).reshape(4, 4, 3))
