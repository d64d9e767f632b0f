"""The logits are the same however tokens arrive: at once, in pieces, padded, packed or one by one."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

from osdn.layers import convolution
from osdn.ops import checks
from tests.models.variants import VARIANTS, make, tokens

variants = pytest.mark.parametrize("variant", VARIANTS)
precisions = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
LENGTHS = [7, 1, 12]


def close(a, b, tolerance):
    torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=tolerance)


@variants
@precisions
@torch.no_grad()
def test_pieces_and_decoding_match_one_forward(variant, dtype, tolerance):
    model, ids = make(variant).to(dtype), tokens(2, 13)
    expected = model(ids).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=13)):
        pieces = [model(piece, past_key_values=cache).logits for piece in ids.split([5, 1, 1, 2, 1, 3], 1)]
        close(torch.cat(pieces, 1), expected, tolerance)
        assert cache.get_seq_length() == 13


@variants
@precisions
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_padded_batch_matches_its_single_sequences(variant, dtype, tolerance, side):
    model, width = make(variant).to(dtype), max(LENGTHS)
    ids = [tokens(1, n, seed=n) for n in LENGTHS]
    padding = [width - n for n in LENGTHS]
    batch = torch.stack([pad(x[0], p, side, 2) for x, p in zip(ids, padding)])
    mask = torch.stack([pad(torch.ones_like(x[0]), p, side, 0) for x, p in zip(ids, padding)])
    outputs = model(batch, attention_mask=mask, use_cache=True, output_hidden_states=True)
    assert [h.shape for h in outputs.hidden_states] == [(3, width, 30)] * 3
    for i, x in enumerate(ids):
        close(outputs.logits[i, mask[i] == 1], model(x).logits[0], tolerance)
    if "sliding" in variant and side == "right":  # then a window contains padding instead of tokens
        return
    following = tokens(3, 2, seed=9)
    cached = model(
        following,
        attention_mask=torch.cat([mask, mask.new_ones(3, 2)], 1),
        past_key_values=outputs.past_key_values,
    ).logits
    for i, x in enumerate(ids):
        alone = model(torch.cat([x, following[i : i + 1]], 1)).logits[0, -2:]
        close(cached[i], alone, tolerance)


def pad(x, amount, side, value):
    return torch.nn.functional.pad(x, (amount, 0) if side == "left" else (0, amount), value=value)


@variants
@torch.no_grad()
def test_left_padding_may_fill_whole_pieces(variant):
    model, ids = make(variant), tokens(2, 10)
    mask = torch.ones(2, 10)
    mask[1, :7] = 0
    cache = DynamicCache(config=model.config)
    pieces = [
        model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits
        for a, b in [(0, 3), (3, 5), (5, 9), (9, 10)]
    ]
    logits = torch.cat(pieces, 1)
    close(logits[0], model(ids[:1]).logits[0], 1e-4)
    close(logits[1, 7:], model(ids[1:, 7:]).logits[0], 1e-4)


@variants
@precisions
@torch.no_grad()
def test_a_packed_row_matches_its_single_sequences(variant, dtype, tolerance):
    model = make(variant).to(dtype)
    ids = [tokens(1, n, seed=n) for n in LENGTHS]
    expected = torch.cat([model(x).logits for x in ids], 1)
    row, cuts = torch.cat(ids, 1), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    close(model(row, cu_seqlens=cuts).logits, expected, tolerance)
    close(model(row, cu_seq_lens_q=cuts, cu_seq_lens_k=cuts, max_length_q=12).logits, expected, tolerance)
    close(model(row, position_ids=positions).logits, expected, tolerance)


@pytest.mark.parametrize("kwargs", [{}, {"return_flash_attn_kwargs": True, "return_position_ids": False}])
@torch.no_grad()
def test_the_padding_free_collator_of_transformers_works(kwargs):
    model = make("osgdn-apf")
    features = [{"input_ids": tokens(n, seed=n).tolist()} for n in LENGTHS]
    batch = DataCollatorWithFlattening(**kwargs)(features)
    ids = [torch.tensor([f["input_ids"]]) for f in features]
    losses = [model(x, labels=x, num_items_in_batch=1).loss for x in ids if x.shape[1] > 1]
    packed = model(**batch)
    close(packed.logits, torch.cat([model(x).logits for x in ids], 1), 1e-4)
    close(packed.loss, sum(losses) / (sum(LENGTHS) - len(LENGTHS)), 1e-4)


@torch.no_grad()
def test_a_row_can_be_packed_with_seq_idx():
    model = make("osgdn-apf")
    features = [{"input_ids": tokens(n, seed=n).tolist()} for n in LENGTHS]
    batch = DataCollatorWithFlattening(return_position_ids=False, return_seq_idx=True)(features)
    expected = torch.cat([model(torch.tensor([f["input_ids"]])).logits for f in features], 1)
    close(model(**batch).logits, expected, 1e-4)
    ids, seq_idx = tokens(2, 8), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [7, 7, 7, 7, 7, 7, 5, 5]])
    mask = torch.ones(2, 8)
    mask[1, :2] = 0
    logits = model(ids, seq_idx=seq_idx, attention_mask=mask).logits
    for row, (a, b) in [(0, (0, 3)), (0, (3, 8)), (1, (2, 6)), (1, (6, 8))]:
        close(logits[row, a:b], model(ids[row : row + 1, a:b]).logits[0], 1e-4)
    with pytest.raises(ValueError, match=r"seq_idx has shape \[1, 3\]"):
        model(ids, seq_idx=seq_idx[:1, :3])


@pytest.mark.parametrize("inference", [False, True])
def test_boundaries_are_read_once_per_forward(monkeypatch, inference):
    """As on a GPU, where reading them waits for all work that is queued."""
    model, reads, read = make("osdn", num_hidden_layers=3, backend="chunkwise"), [], torch.Tensor.tolist
    monkeypatch.setattr(checks, "_reading_waits", lambda x: True)
    monkeypatch.setattr(convolution, "usable", lambda x: False)
    with torch.inference_mode(inference):
        for how in (
            {"cu_seqlens": torch.tensor([0, 3, 8])},
            {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
        ):
            reads.clear()
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x) or read(x))
                model(tokens(1, 8), use_cache=False, **how)
            assert len([x for x in reads if x.shape == (3,)]) == 1


@torch.no_grad()
def test_positions_may_restart_in_every_row_of_a_batch():
    model, ids = make("osdn-apf"), tokens(2, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
    logits = model(ids, position_ids=positions).logits
    for row, cut in enumerate((3, 6)):
        parts = [model(ids[row : row + 1, :cut]).logits, model(ids[row : row + 1, cut:]).logits]
        close(logits[row], torch.cat(parts, 1)[0], 1e-4)


@torch.no_grad()
def test_a_padded_batch_may_be_packed_as_well():
    model, ids = make("oskda-apf"), tokens(2, 8)
    positions = torch.tensor([[0, 0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]])
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    for row, (a, b) in [(0, (1, 4)), (0, (4, 8)), (1, (0, 6))]:
        close(logits[row, a:b], model(ids[row : row + 1, a:b]).logits[0], 1e-4)


@torch.no_grad()
def test_embeddings_can_replace_tokens():
    model, ids = make("oskda-apf"), tokens(2, 6)
    assert torch.equal(model(inputs_embeds=model.model.embeddings(ids)).logits, model(ids).logits)


@torch.no_grad()
def test_a_reset_cache_starts_over():
    model, ids = make("osdn, D0"), tokens(2, 6)
    cache = DynamicCache(config=model.config)
    first = model(ids, past_key_values=cache).logits
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(ids, past_key_values=cache).logits, first)


@pytest.mark.parametrize(("baseline", "variant"), [("delta_net", "osdn"), ("gdn", "osgdn"), ("kda", "oskda")])
@pytest.mark.parametrize("backend", ["auto", "chunkwise", "reference"])
def test_online_scaling_with_step_size_zero_is_its_baseline_bit_for_bit(baseline, variant, backend):
    ids = tokens(2, 70)
    plain = make(baseline, backend=backend)
    scaled = make(variant, backend=backend, preconditioner={"eta": 0.0})
    scaled.load_state_dict(plain.state_dict())
    assert torch.equal(scaled(ids).logits, plain(ids).logits)
    step, token = tokens(2, 69), tokens(2, 1)
    caches = [model(step).past_key_values for model in (plain, scaled)]
    logits = [model(token, past_key_values=cache).logits for model, cache in zip((plain, scaled), caches)]
    assert torch.equal(*logits)


@variants
def test_backends_agree_and_gradients_reach_every_parameter(variant):
    ids, gradients = tokens(2, 20), {}
    for backend in ("reference", "chunkwise", "auto"):
        model = make(variant, backend=backend).train()
        model(ids, labels=ids).loss.backward()
        gradients[backend] = {name: p.grad for name, p in model.named_parameters()}
    for name, expected in gradients["reference"].items():
        assert expected.abs().max() > 0, name
        for backend in ("chunkwise", "auto"):
            error = (gradients[backend][name] - expected).norm() / expected.norm()
            assert error < 1e-4, (name, backend)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_an_empty_batch_has_empty_logits(shape):
    for kwargs in ({}, {"use_cache": True}, {"attention_mask": torch.ones(shape)}):
        assert make("osgdn-apf")(tokens(*shape), **kwargs).logits.shape == (*shape, 61)


@pytest.mark.parametrize("variant", ["osdn-apf", "osgdn-apf", "kda"])
def test_gradients_start_from_a_warm_cache(variant):
    """Truncated backpropagation: no gradient flows through the cache, and the cache corrupts none."""
    model, ids = make(variant), tokens(2, 12)
    cache = DynamicCache(config=model.config)
    for piece in ids.split(4, 1):
        loss = model(piece, past_key_values=cache, labels=piece).loss
        loss.backward()
    whole = model(ids).logits[:, 8:11].flatten(0, 1)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(whole, ids[:, 9:].flatten()))
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing cannot continue from past_key_values"):
        model(ids, past_key_values=cache)


def test_a_cache_outlives_inference_mode():
    model, ids = make("osgdn-apf"), tokens(1, 12)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :6], past_key_values=cache)
    rest = model(ids[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(rest, model(ids).logits[:, 6:], rtol=1e-4, atol=1e-5)


def test_positions_of_one_row_apply_to_all():
    model, ids = make("osdn"), tokens(2, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    one, all_ = (model(ids, position_ids=p).logits for p in (positions, positions.expand(2, 8)))
    assert torch.equal(one, all_)
    assert not torch.equal(one, model(ids).logits)


def test_impossible_inputs_are_rejected_with_the_reason():
    model, ids = make("osdn"), tokens(1, 8)
    with pytest.raises(ValueError, match=r"input_ids has shape \[8\]; it must be \[B, T\]"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"inputs_embeds has shape \[8, 30\]"):
        model(inputs_embeds=torch.randn(8, 30))
    with pytest.raises(ValueError, match=r"position_ids has shape \[1, 4\]"):
        model(ids, position_ids=torch.arange(4)[None])
    with pytest.raises(ValueError, match="attention_mask must be None or all ones"):
        model(ids, attention_mask=(torch.arange(8) > 1)[None], cu_seqlens=torch.tensor([0, 3, 8]))
    with pytest.raises(ValueError, match=r"past_key_values is a tuple.*pass DynamicCache"):
        model(ids, past_key_values=(1, 2))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values continues 1 sequences; the batch has 2"):
        model(tokens(2, 1), past_key_values=cache)
    model, ids = make("osdn"), tokens(2, 5)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 3\]"):
        model(ids, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"it must be \[2, 5 or more\]"):
        model(ids, attention_mask=torch.ones(2, 1, 5, 5))
    with pytest.raises(ValueError, match="so B must be 1; it is 2"):
        model(ids, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="must end at the number of tokens, 5"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="a packed row cannot be cached"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 2, 5]), use_cache=True)
    with pytest.raises(ValueError, match=r"pass DynamicCache\(config=model.config\)"):
        model(ids, past_key_values=DynamicCache())
