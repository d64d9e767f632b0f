"""A token of the whole model as one compiled call is what its layers give."""

import copy
import gc
import threading

import pytest
import torch
from transformers import DynamicCache

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.models import decoder
from osdn.models.modeling_osdn import OSDNMLP
from osdn.models.quantization import quantize
from osdn.ops import available_backends
from tests.ops.problems import relative_error, threads

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="no C++ compiler here")

VARIANTS = (
    *("delta_net", "osdn", "osdn-apf", "gdn", "osgdn", "osgdn-apf", "kda", "oskda", "oskda-apf"),
    "osdn-newton-block-8",
)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
BATCH, PROMPT, STEPS = 3, 7, 4


def build(variant="osgdn-apf", dtype=torch.float32, **overrides):
    torch.manual_seed(0)
    model = OSDNForCausalLM(OSDNConfig.from_preset(f"{variant}-tiny", **overrides))
    with torch.no_grad():
        for parameter in model.parameters():  # nothing may hide behind a zero or a one
            parameter.add_(torch.randn(parameter.shape).mul(0.05))
    return model.to(dtype).eval()


@pytest.fixture
def runs(monkeypatch):
    """The number of tokens that the compiled step has computed."""
    seen, original = [], decoder.Decoder.run

    def count(self, x, states):
        seen.append(len(x))
        return original(self, x, states)

    monkeypatch.setattr(decoder.Decoder, "run", count)
    return seen


@torch.no_grad()
def decode(model, monkeypatch=None, batch=BATCH, cache=None):
    """Logits of some tokens one by one, and the cache after them."""
    ids = torch.arange(batch * (PROMPT + STEPS), device="cpu").view(batch, -1) % model.config.vocab_size
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(ids[:, :PROMPT], past_key_values=cache)
    if monkeypatch is not None:  # layer by layer
        monkeypatch.setattr("osdn.models.modeling_osdn.decode", lambda *_: None)
    logits = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(PROMPT, PROMPT + STEPS)]
    return torch.cat(logits, 1), cache


def states(cache):
    return [x for layer in cache.layers for x in layer.load() if x is not None]


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_are_those_of_the_layers(variant, dtype, runs, monkeypatch):
    model = build(variant, dtype)
    got, cache = decode(model)
    assert runs == [BATCH] * STEPS
    exact, other = decode(copy.deepcopy(model).double(), monkeypatch)
    bound = 3e-6 if dtype == torch.float32 else 1e-13
    assert relative_error(got, exact) < bound
    for a, b in zip(states(cache), states(other), strict=True):
        assert relative_error(a, b) < bound
    assert cache.get_seq_length() == PROMPT + STEPS


@every_variant
def test_16_bits_are_rounded_where_the_layers_round(variant, runs, monkeypatch):
    model = build(variant, torch.bfloat16)
    got, _ = decode(model)
    assert runs
    layers, _ = decode(model, monkeypatch)
    exact, _ = decode(copy.deepcopy(model).double())
    assert relative_error(got, exact) < 1.1 * relative_error(layers, exact)
    assert relative_error(got, layers) < 2 * torch.finfo(torch.bfloat16).eps


def test_threads_change_nothing(runs):
    model = build(hidden_size=256, intermediate_size=1024)
    alone, _ = decode(model)
    with threads(2):
        together, _ = decode(model)
    assert torch.equal(alone, together)
    assert len(runs) == 2 * STEPS


def test_one_model_serves_several_caches_and_batches(runs):
    model = build()
    want = {batch: decode(copy.deepcopy(model), batch=batch)[0] for batch in (1, 2)}
    for batch in (1, 2, 1):
        assert torch.equal(decode(model, batch=batch)[0], want[batch])
    assert len(runs) == 5 * STEPS


@pytest.mark.parametrize("batch", [1, 5, 8])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_weights_are_read_by_the_program(weights, dtype, batch, runs, monkeypatch):
    model = quantize(build("oskda", dtype, hidden_size=128, intermediate_size=192), weights)
    got, _ = decode(model, batch=batch)
    assert runs == [batch] * STEPS
    want, _ = decode(model, monkeypatch, batch=batch)
    assert relative_error(got, want) < (1e-5 if dtype == torch.float32 else 0.02)


def replace_weight(model):
    model.model.layers[0].attn.q_proj.weight = torch.nn.Parameter(
        torch.zeros_like(model.model.layers[0].attn.q_proj.weight)
    )


def move_weight(model):
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = 2 * weight.data


def change_in_place(model):
    with torch.no_grad():
        model.model.layers[1].mlp_norm.weight.mul_(3)


def replace_layer(model):
    model.model.layers[0] = copy.deepcopy(model.model.layers[1])
    model.model.layers[0].layer_idx = 0


def change_setting(model):
    model.model.layers[0].attn.write_scale = 0.3


def drop_layer(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    model.config.layer_types = model.config.layer_types[:1]


@pytest.mark.parametrize(
    "change", [replace_weight, move_weight, change_in_place, replace_layer, change_setting, drop_layer]
)
def test_a_changed_model_decodes_as_it_is_now(change, runs, monkeypatch):
    model = build()
    before, _ = decode(model)
    change(model)
    got, _ = decode(model)
    assert len(runs) == 2 * STEPS
    want, _ = decode(model, monkeypatch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, before, rtol=1e-2)


def hook(model):
    model.model.layers[1].attn.o_proj.register_forward_hook(lambda module, args, y: 2 * y)


def hook_block(model):
    model.model.layers[1].register_forward_hook(lambda module, args, y: 2 * y)


def hook_mixer(model):
    model.model.layers[0].attn.register_forward_pre_hook(lambda module, args: None)


def hook_mlp(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, y: 2 * y)


def other_mlp(model):
    class Doubled(OSDNMLP):
        def forward(self, x):
            return 2 * super().forward(x)

    weights = model.model.layers[0].mlp.state_dict()
    model.model.layers[0].mlp = Doubled(model.config)
    model.model.layers[0].mlp.load_state_dict(weights)


def other_forward(model):
    norm = model.model.layers[0].attn_norm
    model.model.layers[0].attn_norm = torch.nn.Sequential(norm)


def other_backend(model):
    model.model.layers[0].attn.recurrence.backend = "chunkwise"


@pytest.mark.parametrize(
    "change", [hook, hook_block, hook_mixer, hook_mlp, other_mlp, other_forward, other_backend]
)
def test_whoever_needs_the_layers_gets_them(change, runs, monkeypatch):
    model = build()
    decode(model)
    runs.clear()
    change(model)
    got, _ = decode(model)
    assert runs == []
    assert torch.equal(got, decode(model, monkeypatch)[0])


def test_a_hook_that_is_removed_leaves_no_trace(runs):
    model = build()
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    decode(model)
    assert runs == []
    handle.remove()
    decode(model)
    assert len(runs) == STEPS


def test_the_default_device_does_not_matter(runs):
    want, _ = decode(build())
    model = build()
    with torch.device("meta"):
        got, _ = decode(model)
    assert len(runs) == 2 * STEPS
    assert torch.equal(got, want)


@torch.no_grad()
def test_caches_that_must_not_change_in_place_are_left_to_the_layers(runs):
    model = build()
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.activate_past_recording()
    decode(model, cache=cache)
    assert runs == []
    with torch.inference_mode():
        cache = decode(model)[1]
    count = len(runs)
    model(torch.ones(BATCH, 1, dtype=torch.int64), past_key_values=cache)  # its tensors are frozen here
    assert count == STEPS
    assert len(runs) == STEPS


def test_hidden_states_gradients_and_many_rows_take_the_layers(runs):
    model = build()
    with torch.no_grad():
        cache = decode(model)[1]
        runs.clear()
        token = torch.ones(BATCH, 1, dtype=torch.int64)
        hidden = model(token, past_key_values=cache, output_hidden_states=True).hidden_states
        assert len(hidden) == model.config.num_hidden_layers + 1
        decode(model, batch=9)
        with torch.autocast("cpu", torch.bfloat16):
            model(token, past_key_values=cache)
    model(token, past_key_values=cache).logits.sum().backward()
    assert model.model.layers[0].attn.q_proj.weight.grad is not None
    assert runs == []


def test_two_threads_may_decode_at_once():
    model = build()
    want, _ = decode(model, batch=1)
    outputs = []
    workers = [threading.Thread(target=lambda: outputs.append(decode(model, batch=1)[0])) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(outputs) == 4
    for got in outputs:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_program_made_in_inference_mode_serves_outside_of_it(runs):
    model = build()
    with torch.inference_mode():
        want, _ = decode(model)
    got, _ = decode(model)
    assert torch.equal(got, want)
    assert len(runs) == 2 * STEPS


def test_outputs_are_not_written_over_by_the_next_token():
    model = build()
    with torch.no_grad():
        cache = decode(model)[1]
        token = torch.ones(BATCH, 1, dtype=torch.int64)
        first = model.model(token, past_key_values=cache).last_hidden_state
        before = first.clone()
        model.model(token + 1, past_key_values=cache)
    assert torch.equal(first, before)


def test_a_model_is_freed_with_its_program():
    model = build()
    decode(model)
    count = len(decoder._decoders)
    del model
    gc.collect()
    assert len(decoder._decoders) == count - 1
