"""Perplexity: packed and padded against single documents, streaming against one forward pass, and memory."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, DynamicCache, Mamba2Config, Mamba2ForCausalLM

from osdn.evaluation.perplexity import (
    blocks,
    document_losses,
    document_perplexity,
    perplexity,
    position_perplexity,
    stream,
)
from osdn.results.paper import BUCKETS
from osdn.training.data import load_tokenizer
from tests.evaluation.mirror import prose
from tests.models.variants import make, tokens

BYTES = load_tokenizer("bytes")


@torch.no_grad()
def plain_losses(model, ids: torch.Tensor) -> torch.Tensor:
    """-log p of every token but the first, from one forward pass; float64 after the logits."""
    logits = model(ids[None]).logits[0, :-1].double()
    return -logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@pytest.fixture(scope="module")
def models(llama):
    names = ("delta_net", "osdn", "osgdn-apf", "oskda-apf", "osgdn-apf, sliding hybrid")
    ours = {name: make(name, vocab_size=260) for name in names}
    return {**ours, "llama": AutoModelForCausalLM.from_pretrained(llama).eval()}


@pytest.mark.parametrize(
    "name", ["delta_net", "osdn", "osgdn-apf", "oskda-apf", "osgdn-apf, sliding hybrid", "llama"]
)
def test_a_packed_batch_gives_the_losses_of_single_documents(models, name):
    documents = [tokens(T, seed=T) for T in (17, 2, 130, 65, 1, 64)]
    with torch.no_grad():
        together = document_losses(models[name], documents)
    alone = torch.tensor([plain_losses(models[name], d).sum().item() for d in documents])
    torch.testing.assert_close(together, alone.double(), rtol=1e-4, atol=1e-6)
    assert together[4] == 0  # nothing to predict


@pytest.mark.parametrize("name", ["osdn", "llama"])
@pytest.mark.parametrize("tokens_at_once", [100, 300, 5000])
def test_documents_are_scored_as_in_training_and_up_to_a_number_of_labels(models, name, tokens_at_once):
    texts = [prose(i, n) for i, n in enumerate((90, 250, 1, 120, 280))]
    data = Dataset.from_dict({"text": texts})
    losses: list[float] = []
    for text in texts:  # each ends with the end-of-text token
        losses += plain_losses(models[name], torch.tensor([*BYTES(text).input_ids, 256])).tolist()
    for cap in (10_000, 400):
        counted = losses[:cap]
        score = document_perplexity(models[name], BYTES, data, tokens_at_once, max_labels=cap)
        assert score.value == pytest.approx(math.exp(sum(counted) / len(counted)), rel=1e-4)
        assert score.error > 0


@pytest.mark.parametrize("name", ["osdn", "osgdn-apf", "oskda-apf", "osgdn-apf, sliding hybrid", "llama"])
@pytest.mark.parametrize("segment", [7, 100, 512])
def test_streaming_matches_one_long_forward(models, name, segment):
    ids = tokens(2, 1001)
    streamed = torch.cat(list(stream(models[name], ids, segment)), 1)
    whole = torch.stack([plain_losses(models[name], row) for row in ids])
    assert streamed.shape == (2, 1000)
    assert (streamed - whole).abs().max() < 1e-4


def test_a_model_without_such_a_cache_reads_everything_at_once():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "head_dim": 16, "num_heads": 4}
    model = Mamba2ForCausalLM(Mamba2Config(vocab_size=260, n_groups=1, **sizes)).eval()
    ids = tokens(1, 101)
    streamed = torch.cat(list(stream(model, ids, 30)), 1)[0]
    assert (streamed - plain_losses(model, ids[0])).abs().max() < 1e-5


def test_streaming_a_whole_block_matches_one_forward(models):
    ids = tokens(1, 20_480)
    streamed = torch.cat(list(stream(models["osgdn-apf"], ids)), 1)[0]
    assert (streamed - plain_losses(models["osgdn-apf"], ids[0])).abs().max() < 1e-4


def test_perplexity_by_position_is_assigned_by_label(models):
    """Blocks of 3,000 tokens have buckets of 300, whose boundaries never coincide with a segment's."""
    texts = [prose(1, 6100), prose(2, 2999), prose(3, 3000)]
    scores = position_perplexity(models["osdn"], BYTES, texts, 3, tokens_at_once=2048, block=3000)
    rows = []
    for start, text in ((0, texts[0]), (3000, texts[0]), (0, texts[2])):
        rows.append(plain_losses(models["osdn"], torch.tensor(BYTES(text).input_ids[start : start + 3000])))
    losses = torch.nn.functional.pad(torch.stack(rows), (1, 0))  # by the position of the label
    for i, name in enumerate(BUCKETS):
        first = 1 if i == 0 else 0
        mean = losses[:, 300 * i + first : 300 * (i + 1)].mean()
        assert scores[name].value == pytest.approx(mean.exp().item(), rel=1e-4), name
    assert scores["pg19_ppl"].value == pytest.approx(losses[:, 1:].mean().exp().item(), rel=1e-4)
    assert set(scores) == {*BUCKETS, "pg19_ppl"}


def test_only_complete_blocks_are_read_and_having_none_is_an_error(models):
    assert [len(ids) for ids in blocks(["ab", "abc", "abcdefg"], BYTES, 3)] == [0, 1, 2]
    one, among = (
        position_perplexity(models["osdn"], BYTES, texts, 1, 2048, block=100)
        for texts in (["b" * 100], ["short", "a" * 99, "b" * 100, "c" * 100])
    )
    assert one == among  # texts without a block do not count
    with pytest.raises(ValueError, match="none of the texts has 20,480 tokens"):
        position_perplexity(models["osdn"], BYTES, ["too short"], 1, 4096)


def test_the_standard_error_matches_a_bootstrap():
    generator = np.random.default_rng(0)
    labels = generator.integers(5, 400, 300)
    losses = labels * generator.normal(3.0, 0.4, 300)
    score = perplexity(losses, labels)
    draws = generator.integers(0, 300, (4000, 300))
    values = np.exp(losses[draws].sum(1) / labels[draws].sum(1))
    assert score.value == pytest.approx(math.exp(losses.sum() / labels.sum()))
    assert score.error == pytest.approx(values.std(), rel=0.1)
    assert perplexity(losses[:1], labels[:1]).error is None


def test_the_cache_does_not_grow_with_the_text(models):
    caches = []
    model = models["oskda-apf"]
    forward = model.forward

    def spy(*args, past_key_values=None, **kwargs):
        if past_key_values is None:
            past_key_values = DynamicCache(config=model.config)
        caches.append(past_key_values)
        return forward(*args, past_key_values=past_key_values, **kwargs)

    model.forward = spy
    try:
        sizes = []
        for _ in stream(model, tokens(1, 900), 50):
            states = [d for layer in caches[-1].layers for d in (layer.recurrent_states, layer.conv_states)]
            sizes.append(
                sum(x.untyped_storage().nbytes() for d in states for x in d.values() if x is not None)
            )
    finally:
        model.forward = forward
    assert len(sizes) == 18
    assert len(set(sizes)) == 1
    assert sizes[0] > 0


MEMORY = """
import resource, torch
from osdn import OSDNConfig, OSDNForCausalLM
from osdn.evaluation.perplexity import _bucket_sums
torch.manual_seed(0)
model = OSDNForCausalLM(OSDNConfig.from_preset("osdn-tiny")).eval()
ids = torch.randint(0, 512, (1, 204_800))
peaks = []
for length in (20_480, 204_800):
    _bucket_sums(model, ids[:, :length], length // 10)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(*peaks)
"""


def test_memory_at_200k_tokens_is_the_same_as_at_20k():
    """Peak resident memory of a process, in MiB; the logits of 200K tokens alone would take 400."""
    output = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout
    short, long = map(float, output.split())
    assert long - short < 16
