"""Hybrid models: attention against its definition for every kernel, and everything that uses a cache.

That pieces, padding and packing match one forward is tested together with all other variants.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from osdn import PRESETS, OSDNConfig, OSDNForCausalLM, describe
from osdn.models.attention import Attention
from tests.models.test_generation import GREEDY, greedy
from tests.models.variants import HYBRIDS, make, make_config, tokens

hybrids = pytest.mark.parametrize("variant", HYBRIDS)


def attention_by_hand(layer, x):  # [T, D], in float64
    """The definition, for one head and one query at a time."""
    chosen, D = layer.config.attention, layer.head_dim
    weights = {name: w.double() for name, w in layer.state_dict().items()}

    def project(name):
        y = x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)
        return y.view(len(x), -1, D)

    def turn(y, t):
        if chosen["rope_theta"] is None:
            return y
        pairs = y.view(2, D // 2)  # channel i is paired with channel i + D / 2
        angle = t * chosen["rope_theta"] ** (-torch.arange(D // 2).double() * 2 / D)
        first, second = pairs
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
        )

    def normalized(y, name):
        if not chosen["qk_norm"]:
            return y
        return y / (y.square().mean() + chosen["qk_norm_eps"]).sqrt() * weights[f"{name}.weight"]

    q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
    out = torch.zeros(len(x), q.shape[1], D, dtype=torch.float64)
    for t in range(len(x)):
        first = 0 if layer.window is None else max(0, t + 1 - layer.window)
        for h in range(q.shape[1]):
            shared = h * k.shape[1] // q.shape[1]
            query = turn(normalized(q[t, h], "q_norm"), t)
            seen = range(first, t + 1)
            keys = torch.stack([turn(normalized(k[s, shared], "k_norm"), s) for s in seen])
            out[t, h] = (keys @ query / D**0.5).softmax(0) @ v[first : t + 1, shared]
    out = out.flatten(1)
    if chosen["output_gate"]:
        out = out * (x @ weights["g_proj.weight"].T).sigmoid()
    return out @ weights["o_proj.weight"].T


@hybrids
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_attention_matches_its_definition(variant, implementation):
    model, ids = make(variant, attn_implementation=implementation), tokens(2, 9)
    (layer,) = [m for m in model.modules() if isinstance(m, Attention)]
    seen = {}
    layer.register_forward_hook(lambda m, args, y: seen.update(x=args[0], y=y))
    model(ids)
    for x, y in zip(seen["x"], seen["y"]):
        torch.testing.assert_close(y.double(), attention_by_hand(layer, x.double()), rtol=1e-4, atol=1e-5)


def varlen_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """What a flash kernel computes for packed sequences, given their boundaries and no mask."""
    assert attention_mask is None
    cuts = kwargs.get("cu_seq_lens_q", torch.tensor([0, query.shape[2]])).tolist()
    assert kwargs.get("max_length_q", query.shape[2]) == max(b - a for a, b in pairwise(cuts))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    parts = []
    for a, b in pairwise(cuts):
        mask = torch.ones(b - a, b - a, dtype=torch.bool).tril()
        if kwargs["sliding_window"] is not None:
            mask = mask.triu(1 - kwargs["sliding_window"])
        parts.append(F.scaled_dot_product_attention(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], mask))
    return torch.cat(parts, 2).transpose(1, 2), None


@hybrids
@torch.no_grad()
def test_packed_sequences_reach_a_flash_kernel_as_boundaries(variant, monkeypatch):
    model, ids = make(variant), tokens(1, 20)
    positions = torch.cat([torch.arange(n) for n in (7, 1, 12)])[None]
    expected = model(ids, position_ids=positions).logits
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", varlen_attention)
    model.config._attn_implementation = "flash_attention_2"
    torch.testing.assert_close(model(ids, position_ids=positions).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="flash attention needs packed rows without padding"):
        model(ids, position_ids=positions, attention_mask=(torch.arange(20) > 1)[None])


@hybrids
@torch.no_grad()
def test_attention_weights_are_returned_if_there_are_any(variant):
    model, ids = make(variant, attn_implementation="eager"), tokens(2, 7)
    outputs = model(ids, output_attentions=True)
    (weights,) = outputs.attentions
    assert weights.shape == (2, model.config.attention["num_heads"], 7, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert torch.equal(outputs.logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"output_attentions=True needs set_attn_implementation"):
        make(variant)(ids, output_attentions=True)


@hybrids
def test_beams_drafts_and_lookup_match_generation_without_a_cache(variant):
    model, ids = make(variant), tokens(1, 6)
    beams = [model.generate(ids, use_cache=c, num_beams=3, **GREEDY) for c in (True, False)]
    assert torch.equal(*beams)
    expected = greedy(model, ids, 16)
    for how in ({"assistant_model": make(variant, seed=3)}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(ids, **(GREEDY | {"max_new_tokens": 16} | how)), expected)


@torch.no_grad()
def test_a_hybrid_is_one_graph():
    model, ids = make("osgdn-apf, sliding hybrid"), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for how in ({"attention_mask": mask}, {"position_ids": positions}):
        torch.testing.assert_close(
            compiled(ids, **how).logits, model(ids, **how).logits, rtol=1e-4, atol=1e-4
        )


@given(
    kinds=st.lists(
        st.sampled_from(["linear_attention", "full_attention", "sliding_attention"]), min_size=2, max_size=3
    ),
    window=st.integers(1, 6),
    theta=st.sampled_from([None, 30.0]),
    lengths=st.lists(st.integers(1, 11), min_size=2, max_size=3),
    cuts=st.lists(st.integers(1, 10), max_size=3),
    half=st.booleans(),
)
@settings(max_examples=25)
@torch.no_grad()
def test_any_hybrid_gives_the_same_logits_however_tokens_arrive(kinds, window, theta, lengths, cuts, half):
    assume("linear_attention" in kinds)
    attention = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "window": window, "rope_theta": theta}
    if set(kinds) == {"linear_attention"}:
        attention = None
    model = make("osgdn-apf", num_hidden_layers=len(kinds), layer_types=kinds, attention=attention)
    model, close = (
        model.to(torch.bfloat16 if half else torch.float32),
        {"rtol": 0, "atol": 0.06 if half else 1e-4},
    )
    rows = [tokens(1, n, seed=n + i) for i, n in enumerate(lengths)]
    alone = [model(row).logits[0] for row in rows]
    packed = model(torch.cat(rows, 1), cu_seqlens=torch.tensor([0, *lengths]).cumsum(0)).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone), **close)
    width = max(lengths)
    ids = torch.cat([F.pad(row, (width - row.shape[1], 0), value=2) for row in rows])
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    cache, pieces = DynamicCache(config=model.config), []
    for a, b in pairwise(sorted({0, width, *(cut for cut in cuts if cut < width)})):
        pieces.append(model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits)
    for row, expected in zip(torch.cat(pieces, 1), alone):
        torch.testing.assert_close(row[width - len(expected) :], expected, **close)


@torch.no_grad()
def test_a_mask_without_the_cached_tokens_is_rejected():
    model, ids = make("osdn-apf, hybrid"), tokens(2, 5)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="one for each of the 5 cached tokens and 1 new ones"):
        model(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 1))


def test_caches_of_transformers_store_the_states_of_linear_layers():
    config = make_config("osgdn-apf, sliding hybrid")
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=8)):
        assert [type(layer).__name__ for layer in cache.layers][1] == "LinearAttentionLayer"
        make("osgdn-apf, sliding hybrid")(tokens(1, 6), past_key_values=cache)
        assert [type(layer).__name__ for layer in cache.layers][1] == "DeltaRuleCacheLayer"
        assert cache.get_seq_length() == 6
    with pytest.raises(ValueError, match=r"pass DynamicCache\(config=model.config\)"):
        make("osdn-apf, hybrid")(tokens(1, 6), past_key_values=DynamicCache(config=config))


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("hybrid-tiny")])
def test_hybrid_presets_are_three_to_one_and_survive_saving(preset, tmp_path):
    torch.manual_seed(0)
    model, ids = OSDNForCausalLM(OSDNConfig.from_preset(preset)).eval(), tokens(1, 9)
    assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert OSDNConfig.from_preset(preset, num_hidden_layers=9).layer_types.count("full_attention") == 2
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.layer_types == model.config.layer_types
    assert loaded.config.attention == model.config.attention
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert describe(tmp_path).preset == describe(preset).preset == preset


@pytest.mark.parametrize(
    ("preset", "plain", "layers"),
    [
        ("osdn-hybrid-340m", "osdn-340m", 6),
        ("osgdn-hybrid-340m", "osgdn-340m", 5),
        ("kda-hybrid-340m", "kda-340m", 5),
    ],
)
def test_the_memory_and_flops_of_a_hybrid_are_counted(preset, plain, layers):
    hybrid, other = describe(preset), describe(plain)
    share = (other.layers - layers) / other.layers
    assert hybrid.attention_layers == layers
    assert hybrid.state_mib == pytest.approx(other.state_mib * share)
    assert hybrid.scale_mib == pytest.approx(other.scale_mib * share)
    assert (
        hybrid.cache_kib_per_token == layers * 2 * 4 * 64 * 2 / 1024
    )  # keys and values, 4 heads of 64, 2 bytes
    assert hybrid.flops_per_earlier_token == layers * 2 * 2 * 1024
    assert abs(hybrid.parameters / other.parameters - 1) < 0.06
    assert "KiB per token" in str(hybrid)
    windowed = describe(make_config("osgdn-apf, sliding hybrid"))
    assert windowed.cache_kib_per_token == 0
    assert (
        windowed.window_mib == 4 * 2 * 2 * 6 * 2 / 2**20
    )  # 4 tokens, keys and values, 2 heads of 6, 2 bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries; num_hidden_layers is 2"),
        ({"layer_types": ["linear_attention", "moe"]}, "layer_types has moe; choose from linear_attention"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types has no linear_attention"),
        (
            {"layer_types": ["linear_attention", "full_attention"], "attention": None},
            "hybrid models need attention=",
        ),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "needs attention.window"),
        ({"attention": {}}, "attention needs num_heads"),
        ({"attention": {"num_heads": 3, "size": 1}}, "attention has no setting size; it has num_heads"),
        ({"attention": {"num_heads": 4}}, "does not divide hidden_size, 30"),
        ({"attention": {"num_heads": 3, "num_kv_heads": 2}}, "it must divide num_heads, 3"),
        ({"attention": {"num_heads": 3, "head_dim": 5}}, "a rotary embedding needs an even number"),
        (
            {"attention": {"num_heads": 3, "window": 0}},
            "attention.window is 0; it must be a positive whole number",
        ),
    ],
)
def test_an_impossible_hybrid_is_rejected_with_the_reason(fields, message):
    with pytest.raises(ValueError, match=message):
        make_config("osdn-apf, hybrid", **fields)


def test_a_configuration_without_layer_types_is_saved_as_before():
    content = make_config("osdn").to_dict()
    assert "layer_types" not in content
    assert "attention" not in content
    with pytest.raises(ValueError, match="set layer_types to choose the layers with it"):
        make_config("osdn", attention={"num_heads": 3})
