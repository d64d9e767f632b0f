"""Packing: every token once, the same rows for any number of devices, no state across boundaries."""

from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.training.data import load_tokenizer
from osdn.training.packing import PackedRows, Pieces, Position, held_out_rows, pack


class Fixed(Pieces):
    """Pieces whose tokens are all different, in a new order every epoch."""

    def __init__(self, lengths: list[int]) -> None:
        starts = np.cumsum([0, *lengths])
        self.tokens = [np.arange(a, b) for a, b in pairwise(starts)]

    def read(self, epoch, start):
        order = np.random.default_rng(epoch).permutation(len(self.tokens))
        yield from (self.tokens[i] for i in order[start:])


lengths = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)
sizes = st.integers(1, 17)


@given(lengths, sizes)
def test_every_token_is_used_once_per_epoch_and_no_sequence_spans_two_pieces(lengths, seq_len):
    pieces = Fixed(lengths)
    epoch = np.concatenate(list(pieces.read(0, 0)))
    rows = list(islice(PackedRows(pieces, seq_len), len(epoch) // seq_len))
    read = np.concatenate([row["input_ids"][0].numpy() for row in rows]) if rows else epoch[:0]
    np.testing.assert_array_equal(read, epoch[: len(read)])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for row in rows:
        ids, cuts = row["input_ids"][0].numpy(), row["cu_seqlens"].tolist()
        assert ids.shape == (seq_len,)
        assert cuts[0] == 0
        assert cuts[-1] == seq_len
        for a, b in pairwise(cuts):
            assert b > a
            assert (np.diff(ids[a:b]) == 1).all()
            assert len(set(owner[ids[a:b]])) == 1
        assert all(owner[ids[cut - 1]] != owner[ids[cut]] for cut in cuts[1:-1])  # none is cut within a row


@given(lengths, sizes, st.integers(2, 5))
def test_a_step_reads_the_same_rows_on_any_number_of_devices(lengths, seq_len, ranks):
    pieces = Fixed(lengths)
    one = list(islice(PackedRows(pieces, seq_len), 2 * ranks))
    shards = [list(islice(PackedRows(pieces, seq_len, rank, ranks), 2)) for rank in range(ranks)]
    many = [shards[i % ranks][i // ranks] for i in range(2 * ranks)]
    for a, b in zip(one, many):
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert torch.equal(a["cu_seqlens"], b["cu_seqlens"])
        assert torch.equal(a["labels"], b["labels"])
    for shard in shards:  # after a round, every device would continue from the same position
        assert [row["position"] for row in shard] == [one[ranks - 1]["position"], one[-1]["position"]]


@given(lengths, sizes, st.integers(1, 20), st.integers(1, 3))
def test_rows_continue_from_a_saved_position(lengths, seq_len, done, ranks):
    pieces = Fixed(lengths)
    rows = list(islice(PackedRows(pieces, seq_len, ranks - 1, ranks), done + 3))
    position = Position(*rows[done - 1]["position"])
    later = islice(PackedRows(pieces, seq_len, ranks - 1, ranks, position), 3)
    for a, b in zip(rows[done:], later):
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert torch.equal(a["cu_seqlens"], b["cu_seqlens"])
        assert a["position"] == b["position"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_order_of_pieces_depends_on_seed_and_epoch_and_pieces_can_be_skipped(streaming):
    data = Dataset.from_dict({"text": [f"document {i}" * (i % 5) for i in range(700)]})
    data = data.to_iterable_dataset(num_shards=3) if streaming else data
    tokenizer = load_tokenizer("bytes")

    def read(seed: int, epoch: int, start: int = 0) -> list[str]:
        found = Pieces(data, tokenizer, 1000, seed).read(epoch, start)
        return [tokenizer.decode(tokens) for tokens in found]

    first = read(1, 0)
    assert read(1, 0) == first
    assert read(1, 0, 451) == first[451:]
    for other in (read(1, 1), read(2, 0)):
        assert other != first
        assert sorted(other) == sorted(first)
    assert all(text.endswith("<|endoftext|>") for text in first)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_short_shuffle_keeps_the_order_of_the_data_roughly(streaming):
    data = Dataset.from_dict({"text": [f"{i:03}" for i in range(300)]})
    data = data.to_iterable_dataset() if streaming else data
    tokenizer = load_tokenizer("bytes")

    def read(seed: int, shuffle: int) -> list[int]:
        pieces = Pieces(data, tokenizer, 1000, seed, shuffle).read(0, 0)
        return [int(tokenizer.decode(tokens)[:3]) for tokens in pieces]

    assert read(0, 1) == list(range(300))
    first = read(0, 20)
    assert first == read(0, 20)
    assert first != read(1, 20)
    assert sorted(first) == list(range(300)) != first
    # A buffer never lets a piece out early; one that it forgets for long may come late.
    late = [place - piece for place, piece in enumerate(first)]
    assert min(late) > -20
    if not streaming:
        assert max(late) < 20


@given(lengths, sizes, st.integers(1, 200))
def test_held_out_rows_are_the_first_tokens_of_one_epoch(lengths, seq_len, tokens):
    pieces = Fixed(lengths)
    epoch = np.concatenate(list(pieces.read(0, 0)))
    rows = held_out_rows(pieces, seq_len, tokens)
    read = np.concatenate([row["input_ids"][0].numpy() for row in rows])
    np.testing.assert_array_equal(read, epoch[: -(-tokens // seq_len) * seq_len])
    assert all(row["input_ids"].shape == (1, seq_len) for row in rows[:-1])


def test_tokens_are_counted_for_a_data_set_but_not_for_a_stream():
    data = Dataset.from_dict({"text": ["abc", "", "de"]})
    pieces = Pieces(data, load_tokenizer("bytes"), 2, 0)
    assert (pieces.documents, pieces.count_tokens()) == (3, 8)  # each with an end-of-text token
    stream = Pieces(data.to_iterable_dataset(), load_tokenizer("bytes"), 2, 0)
    assert (stream.documents, stream.count_tokens()) == (None, None)


def test_an_empty_data_set_is_an_error_and_not_an_endless_loop():
    with pytest.raises(ValueError, match="no documents"):
        next(iter(PackedRows(Fixed([]), 4)))
    with pytest.raises(ValueError, match="no documents"):
        Pieces(Dataset.from_dict({"text": []}), load_tokenizer("bytes"), 4, 0)


@pytest.mark.parametrize("variant", ["osdn-apf", "osgdn-apf", "oskda"])
def test_a_packed_loss_and_its_gradient_match_the_separate_pieces(variant):
    torch.manual_seed(0)
    model = OSDNForCausalLM(OSDNConfig.from_preset(f"{variant}-tiny")).double()
    generator = np.random.default_rng(0)
    pieces = [generator.integers(0, 512, n) for n in (7, 1, 33, 2, 64)]
    row = pack(pieces)
    targets = sum(len(piece) - 1 for piece in pieces)
    assert (row["labels"] != -100).sum() == targets
    model.train()
    loss = model(**row, num_items_in_batch=targets).loss
    loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.zero_grad()
    own = torch.zeros((), dtype=torch.float64)
    for piece in pieces:
        ids = torch.from_numpy(piece)[None]
        if ids.shape[1] > 1:
            logits = model(ids).logits[0, :-1]
            own = own + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    (own / targets).backward()
    torch.testing.assert_close(loss, own / targets, rtol=1e-9, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-6, atol=1e-9, msg=name)
