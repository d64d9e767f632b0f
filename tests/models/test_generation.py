"""All modes of `generate`, against forward passes without a cache."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

from tests.models.variants import VARIANTS, make, tokens

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}


@torch.no_grad()
def greedy(model, ids, steps=8):
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_decoding_picks_the_likeliest_token_of_a_full_forward(variant):
    model, ids = make(variant), tokens(2, 5)
    expected = greedy(model, ids)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **GREEDY), expected)


def test_a_left_padded_batch_continues_each_prompt_as_if_alone():
    model = make("osgdn-apf")
    prompts = [tokens(1, n, seed=n) for n in (3, 9, 1)]
    ids = torch.cat([torch.nn.functional.pad(x, (9 - x.shape[1], 0)) for x in prompts])
    mask = torch.stack([torch.arange(9) >= 9 - x.shape[1] for x in prompts]).long()
    batch = model.generate(ids, attention_mask=mask, **GREEDY)
    for row, prompt in zip(batch, prompts):
        assert torch.equal(row[9:], greedy(model, prompt)[0, -8:])


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_the_prompt_can_be_read_in_pieces(chunk):
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
def test_beams_and_samples_match_generation_without_a_cache(how):
    model, ids = make("osdn-apf"), tokens(2, 6)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(model.generate(ids, use_cache=use_cache, **(GREEDY | how)))
    assert torch.equal(*results)


def test_generation_continues_from_a_cache():
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


def llama(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).eval()


@pytest.mark.parametrize("variant", ["osdn-apf", "osgdn-apf", "oskda-newton, blocks"])
def test_assisted_decoding_writes_the_greedy_text(variant):
    model, near, far = make(variant), make(variant), make(variant, seed=5)
    with torch.no_grad():
        for p in near.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    ids = tokens(1, 9)
    expected = greedy(model, ids, 24)
    how = GREEDY | {"max_new_tokens": 24}
    for assistant in (model, near, far, llama()):  # from always right to never right
        assert torch.equal(model.generate(ids, assistant_model=assistant, **how), expected)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **how), expected)
    theirs = llama()
    assert torch.equal(theirs.generate(ids, assistant_model=model, **how), theirs.generate(ids, **how))


def test_assisted_decoding_handles_padding_and_repeated_text():
    model, ids = make("osgdn-apf"), tokens(1, 4).repeat(1, 4)
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = (torch.arange(19) > 2).long()[None]
    for prompt_lookup in (2, 6):
        how = GREEDY | {"max_new_tokens": 20, "prompt_lookup_num_tokens": prompt_lookup}
        assert torch.equal(model.generate(padded, attention_mask=mask, **how)[:, 3:], greedy(model, ids, 20))


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[6, 1, 1, 1], [9], [1] * 9])
@pytest.mark.parametrize("crops", [[0], [-1], [-2, -3], [-5, 0], [-9]])
def test_a_cropped_cache_equals_one_of_the_remaining_tokens(pieces, crops):
    model, ids, following = make("osdn, D0"), tokens(2, 12), tokens(2, 4, seed=3)
    cache = DynamicCache(config=model.config)
    model(ids[:, :3], past_key_values=cache)
    cache.activate_past_recording()
    for piece in ids[:, 3:].split(pieces, 1):
        model(piece, past_key_values=cache)
    for crop in crops:
        cache.crop(crop)
    remaining = ids[:, : 12 + sum(crops)]
    assert cache.get_seq_length() == remaining.shape[1]
    logits = torch.cat(
        [model(piece, past_key_values=cache).logits for piece in following.split([1, 3], 1)], 1
    )
    expected = model(torch.cat([remaining, following], 1)).logits[:, -4:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_an_impossible_crop_is_rejected_with_a_remedy():
    model = make("osdn")
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    with pytest.raises(RuntimeError, match=r"call activate_past_recording\(\) on it before"):
        cache.crop(-1)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="pass minus the number of tokens"):
        cache.crop(3)
    with pytest.raises(ValueError, match="crop\\(-1\\): 0 tokens were recorded"):
        cache.crop(-1)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="a padded batch cannot be rolled back"):
        model(tokens(2, 3), attention_mask=mask, past_key_values=cache)


def test_unsupported_features_are_rejected_with_a_clear_message():
    model, ids = make("osdn"), tokens(1, 5)
    with pytest.raises(ValueError, match="this model has no attention weights"):
        model(ids, output_attentions=True)
    with pytest.raises(NotImplementedError, match="call generate with a left-padded batch instead"):
        model.generate_batch([[3, 4, 5]])
