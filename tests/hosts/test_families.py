"""The eight families on our operators against their own functions in float64."""

from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import DataCollatorWithFlattening

import osdn
from osdn.analysis.capture import recurrent_layers
from osdn.hosts import functions
from tests.hosts.families import FAMILIES, make, module, tokens

families = pytest.mark.parametrize("family", FAMILIES)


@contextmanager
def double(family):
    """Within this context, the family's module computes in float64 where it asks for float32."""

    class Torch(SimpleNamespace):
        float32 = float = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module(family), "torch", Torch())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def gradients(module, outputs, leaves=()):
    """The outputs, and the gradients of a random weighted sum of them, by parameter name."""
    module.zero_grad()
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (outputs.double() * weights).sum().backward()
    leaves = {
        name: x.grad.double() for name, x in (*module.named_parameters(), *leaves) if x.grad is not None
    }
    return {"outputs": outputs.detach().double(), **leaves}


def results(model, ids=None, **inputs):
    ids = tokens(2, 70) if ids is None else ids
    return gradients(model, model(ids, use_cache=False, **inputs).logits)


def layer_results(layer, x):
    x = x.clone().requires_grad_()
    return gradients(layer, layer(hidden_states=x), [("x", x)])


def errors(got, expected):
    """The relative RMS errors of the outputs and of the gradients, which all have equal weight."""
    all_errors = {name: (got[name] - x).norm() / x.norm() for name, x in expected.items() if x.norm() > 0}
    outputs = all_errors.pop("outputs")
    return torch.stack([outputs, torch.stack(list(all_errors.values())).square().mean().sqrt()])


def ratio(family, compute, wide, cases):
    """The ratios of our errors to the originals', for outputs and gradients, averaged over several inputs."""
    ratios = []
    for case in cases:
        osdn.accelerate(undo=True)
        with double(family):
            truth = wide(case)
        theirs = errors(compute(case), truth)
        osdn.accelerate()
        ratios.append(errors(compute(case), truth) / theirs)
    return torch.stack(ratios).log().mean(0).exp().tolist()


@families
def test_in_float64_logits_and_gradients_are_the_originals(family):
    with double(family):
        expected = results(make(family).double())
        osdn.accelerate()
        ours = results(make(family).double())
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@families
def test_layers_are_as_close_to_the_truth_as_the_originals(family, dtype):
    layer = next(iter(recurrent_layers(make(family)).values())).to(dtype)
    wide = next(iter(recurrent_layers(make(family)).values())).to(dtype).double()
    inputs = [torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    outputs, grads = ratio(
        family, lambda x: layer_results(layer, x), lambda x: layer_results(wide, x.double()), inputs
    )
    assert outputs < 1.0
    assert grads < (1.0 if dtype == torch.float32 else 1.25)  # mostly the final rounding to 8 bits


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_models_are_as_close_to_the_truth_as_the_originals(dtype, count):
    ratios = {}
    for family in FAMILIES:
        model, wide = make(family).to(dtype), make(family).to(dtype).double()
        inputs = [tokens(8, 70, seed=i) for i in range(count)]
        ratios[family] = ratio(family, partial(results, model), partial(results, wide), inputs)
    # most of both errors comes from the rest of the model, so the ratio of a single family is noisy
    assert all(max(each) < 1.25 for each in ratios.values()), ratios
    outputs, grads = torch.tensor(list(ratios.values())).log().mean(0).exp()
    assert max(outputs, grads) < (1.0 if dtype == torch.float32 else 1.05)


@families
def test_every_delta_rule_layer_calls_our_operators(family, monkeypatch):
    calls = Counter()

    def count(name):
        function = getattr(functions, name)

        def counted(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(functions, name, counted)

    for name in ("delta_rule", "short_convolution", "convolution_step", "gated_rms_norm", "log_decay"):
        count(name)
    osdn.accelerate()
    model = make(family)
    every = ["delta_rule", "gated_rms_norm"]  # twice for two layers
    if family in ("kimi_linear", "bailing_hybrid", "glm5_next"):
        every.append("log_decay")
    with torch.no_grad():
        cache = model(tokens(1, 7), use_cache=True).past_key_values
        assert calls == dict.fromkeys([*every, "short_convolution"], 2)
        model(tokens(1, 1), past_key_values=cache)
    assert calls == dict.fromkeys(every, 4) | {"short_convolution": 2, "convolution_step": 2}
    results(model)
    assert calls == dict.fromkeys(every, 6) | {"short_convolution": 4, "convolution_step": 2}


@families
@torch.no_grad()
def test_pieces_and_single_tokens_give_what_one_forward_gives(family):
    osdn.accelerate()
    model, ids = make(family), tokens(2, 21)
    whole = model(ids, use_cache=False).logits
    cache, pieces = None, []
    for piece in ids.split([9, 7, 1, 1, 1, 2], 1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


@families
def test_generated_text_is_the_originals(family):
    model, ids = make(family), tokens(3, 11)
    mask = torch.ones_like(ids)
    ids[1, :4] = mask[1, :4] = 0  # padded on the left
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    expected = [model.generate(ids, num_beams=beams, **settings) for beams in (1, 3)]
    osdn.accelerate()
    for beams, text in zip((1, 3), expected):
        assert torch.equal(model.generate(ids, num_beams=beams, **settings), text)


@pytest.mark.parametrize("given", ["cu_seq_lens", "seq_idx", "position_ids"])
@families
def test_packed_sequences_are_each_alone(family, given):
    lengths = [5, 1, 9, 3]
    attends = family != "glm5_next"  # its attention mixes packed sequences, on any device
    if not attends and given == "position_ids":
        pytest.skip("glm5_next does not show its layers the position ids")
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    cuts = torch.tensor([0, *lengths]).cumsum(0).int()
    packing = {
        "cu_seq_lens": {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": 9, "max_length_k": 9},
        "seq_idx": {"seq_idx": torch.arange(4).repeat_interleave(torch.tensor(lengths))[None].int()},
        "position_ids": {},
    }[given]
    osdn.accelerate()
    model, ids = make(family, attention=attends).double(), tokens(1, sum(lengths))

    def run(pieces, **inputs):
        model.zero_grad()
        logits = torch.cat([model(piece, use_cache=False, **inputs).logits for piece in pieces], 1)
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        return {"logits": logits} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    with double(family):
        alone = run(ids.split(lengths, 1))
        packed = run([ids], position_ids=position_ids, **packing)
    torch.testing.assert_close(packed, alone, rtol=1e-8, atol=1e-9)


def test_several_rows_of_several_sequences():
    osdn.accelerate()
    model, ids = make("qwen3_5"), tokens(2, 12)
    position_ids = torch.stack([torch.cat([torch.arange(5), torch.arange(7)]), torch.arange(12)])
    packed = model(ids, position_ids=position_ids, use_cache=False).logits
    alone = [model(ids[:1, :5]).logits, model(ids[:1, 5:]).logits]
    torch.testing.assert_close(packed[:1], torch.cat(alone, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[1:], model(ids[1:]).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_float16(family):
    layer = next(iter(recurrent_layers(make(family)).values()))
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    expected = layer(hidden_states=x)
    osdn.accelerate()
    half = layer.half()(hidden_states=x.half())
    assert half.dtype == torch.float16
    assert (half - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("everything", [False, True])
@families
def test_sequences_packed_by_the_collator_of_transformers_are_independent(family, everything):
    if family == "glm5_next" and not everything:
        pytest.skip("glm5_next does not show its layers the position ids")
    pieces = [tokens(n, seed=n) for n in (5, 1, 7)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=everything, return_seq_idx=everything)
    batch = collate([{"input_ids": x.tolist()} for x in pieces])
    batch.pop("labels")
    model = make(family, attention=family != "glm5_next")  # its attention mixes packed sequences
    alone = torch.cat([model(x[None], use_cache=False).logits for x in pieces], 1)
    if everything:
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            model(**batch, use_cache=False)
    else:
        leaking = model(**batch, use_cache=False).logits
        assert not torch.allclose(leaking, alone, rtol=0.1, atol=0.1)
    osdn.accelerate()
    torch.testing.assert_close(model(**batch, use_cache=False).logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_gradient_checkpointing_of_a_packed_batch(family):
    osdn.accelerate()
    model, ids = make(family), tokens(1, 12)
    position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
    expected = results(model, ids, position_ids=position_ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ours = results(model, ids, position_ids=position_ids)
    assert (errors(ours, expected) < torch.tensor([1e-5, 1e-4])).all()
