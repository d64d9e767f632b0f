"""Saving, loading, moving and splitting models."""

import json

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM

from osdn import OSDNForCausalLM, OSDNModel
from tests.models.variants import VARIANTS, make, make_config, scatter, tokens


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_model_loads_by_its_auto_class(variant, tmp_path):
    model, ids = make(variant), tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is OSDNForCausalLM
    assert not loaded.training
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is OSDNModel
    assert torch.equal(body(ids, use_cache=False).last_hidden_state, model.model(ids, use_cache=False)[0])


def test_a_model_is_saved_in_shards_of_safetensors(tmp_path):
    model, ids = make("oskda-apf"), tokens(2, 7)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    names = set()
    for shard in shards:
        with safe_open(shard, "pt") as file:
            names |= set(file.keys())
    assert names == set(model.state_dict())
    assert torch.equal(logits(OSDNForCausalLM.from_pretrained(tmp_path), ids), logits(model, ids))


def test_a_model_loads_in_the_requested_precision(tmp_path):
    model = make("osgdn-apf")
    model.save_pretrained(tmp_path)
    half = OSDNForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    for p, q in zip(half.parameters(), model.parameters()):
        assert torch.equal(p, q.bfloat16())
    half.save_pretrained(tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert OSDNForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_tied_embeddings_are_one_tensor_and_saved_once(tmp_path):
    model, ids = make("osdn", tie_word_embeddings=True), tokens(2, 7)
    assert model.lm_head.weight is model.model.embeddings.weight
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = OSDNForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embeddings.weight
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_only_missing_parameters_are_initialised(tmp_path):
    """A baseline's weights are unchanged when loaded into a model with a learned retention."""
    plain = make("gdn")
    plain.save_pretrained(tmp_path)
    config = make_config("osgdn, learned retention")
    loaded, report = OSDNForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert {name.split("preconditioner.")[1] for name in report["missing_keys"]} == {
        "retention.weight",
        "retention.bias",
    }
    assert not report["unexpected_keys"]
    for name, p in plain.named_parameters():
        assert torch.equal(loaded.get_parameter(name), p), name
    bias = loaded.model.layers[1].attn.preconditioner.retention.bias
    torch.testing.assert_close(bias.sigmoid(), torch.full((3,), 0.999))


@pytest.mark.parametrize("variant", ["osdn, D0", "osgdn-apf", "oskda-apf"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_accelerate_dispatches_a_saved_checkpoint(variant, place, tmp_path):
    model, ids = make(variant), tokens(2, 9)
    model.save_pretrained(tmp_path)
    device_map = {"model.embeddings": "cpu", "model.layers.0": "cpu", "model.layers.1": place}
    device_map |= {"model.norm": "cpu", "lm_head": place}
    with torch.device("meta"):
        empty = OSDNForCausalLM(model.config)
    dispatched = load_checkpoint_and_dispatch(
        empty, str(tmp_path / "model.safetensors"), device_map=device_map, offload_folder=tmp_path / "offload"
    ).eval()
    assert dispatched.lm_head.weight.is_meta == (place == "disk")
    assert torch.equal(logits(dispatched, ids), logits(model, ids))
    with torch.no_grad():
        expected = model(ids, labels=ids).loss
        torch.testing.assert_close(dispatched(ids, labels=ids).loss, expected, rtol=1e-6, atol=0)
    greedy = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(dispatched.generate(ids, **greedy), model.generate(ids, **greedy))


def test_from_pretrained_accepts_a_device_map(tmp_path):
    model, ids = make("osdn-apf"), tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert torch.equal(logits(loaded, ids.to(loaded.device)).cpu(), logits(model, ids))


def test_a_model_built_on_the_meta_device_can_be_filled():
    model, ids = make("kda"), tokens(2, 7)
    with torch.device("meta"):
        empty = OSDNForCausalLM(model.config)
    filled = scatter(empty.to_empty(device="cpu")).eval()
    assert torch.equal(logits(filled, ids), logits(model, ids))


@pytest.mark.parametrize("variant", ["osgdn-apf", "oskda-newton", "pkda"])
def test_a_model_is_built_without_memory_and_filled_later(variant):
    model, ids = make(variant), tokens(2, 7)
    with init_empty_weights():
        empty = OSDNForCausalLM(make_config(variant))
    assert all(p.is_meta for p in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(logits(empty.eval(), ids), logits(model, ids))
