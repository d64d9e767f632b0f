"""`generate` in all its ways, against forwards without a cache."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, pipeline

from tests.models.variants import VARIANTS, make, tokens

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}


@torch.no_grad()
def greedy(model, ids, steps=8):
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_takes_the_likeliest_token_of_a_whole_forward(variant):
    model, ids = make(variant), tokens(2, 5)
    expected = greedy(model, ids)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **GREEDY), expected)


def test_a_left_padded_batch_continues_each_prompt_as_alone():
    model = make("osgdn-apf")
    prompts = [tokens(1, n, seed=n) for n in (3, 9, 1)]
    ids = torch.cat([torch.nn.functional.pad(x, (9 - x.shape[1], 0)) for x in prompts])
    mask = torch.stack([torch.arange(9) >= 9 - x.shape[1] for x in prompts]).long()
    batch = model.generate(ids, attention_mask=mask, **GREEDY)
    for row, prompt in zip(batch, prompts):
        assert torch.equal(row[9:], greedy(model, prompt)[0, -8:])


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_the_prompt_may_be_read_in_pieces(chunk):
    model, ids = make("oskda-apf"), tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, prefill_chunk_size=chunk, **GREEDY), expected)


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 4, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 3, "do_sample": False},
        {"do_sample": True, "top_k": 20, "temperature": 1.3},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 2, "do_sample": True},
    ],
)
def test_beams_and_samples_are_those_of_generation_without_a_cache(how):
    model, ids = make("osdn-apf"), tokens(2, 6)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(model.generate(ids, use_cache=use_cache, **(GREEDY | how)))
    assert torch.equal(*results)


def test_generation_goes_on_from_a_cache():
    model, ids = make("osdn-apf"), tokens(1, 12)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :7], past_key_values=cache)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), greedy(model, ids))
    again = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    assert again.past_key_values.get_seq_length() == 12 + 7  # the last token has not been read


def test_generation_from_embeddings():
    model, ids = make("gdn"), tokens(1, 5)
    continued = model.generate(inputs_embeds=model.model.embeddings(ids), **GREEDY)
    assert torch.equal(continued, greedy(model, ids)[:, 5:])


def test_the_text_generation_pipeline_runs():
    vocabulary = {chr(i): i - 32 for i in range(33, 93)} | {"<pad>": 0}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", padding_side="left")
    model = make("osdn-apf")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
    prompts = ["HELLO", "HI", "A LONGER ONE"]
    answers = generator(prompts, **(GREEDY | {"max_new_tokens": 4}), return_full_text=False)
    assert [len(a[0]["generated_text"].replace(" ", "")) for a in answers] == [4, 4, 4]
    for prompt, answer in zip(prompts, answers):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert answer[0]["generated_text"] == tokenizer.decode(greedy(model, ids, 4)[0, ids.shape[1] :])


def test_a_state_that_cannot_be_rolled_back_is_not_offered_for_speculation():
    model, ids = make("osdn"), tokens(1, 5)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(ids, assistant_model=make("delta_net"), **GREEDY)
