"""The identity of a model: its name, its digest, its block."""

import shutil

import pytest
import torch

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.models.identity import identify


@pytest.fixture
def saved(tmp_path):
    def save(name, seed=0, **fields):
        torch.manual_seed(seed)
        model = OSDNForCausalLM(OSDNConfig.from_preset("osdn-tiny", **fields))
        model.save_pretrained(tmp_path / name)
        return model, str(tmp_path / name)

    return save


def test_a_name_is_explicit_or_that_of_the_run_the_preset_or_the_folder(saved):
    assert identify(*saved("a", run_name="my run"), "given").model == "given"
    assert identify(*saved("b", run_name="my run")).model == "my run"
    assert identify(*saved("c")).model == "osdn-tiny"
    assert identify(*saved("d", num_hidden_layers=1)).model == "d"


def test_the_same_weights_have_the_same_digest_in_any_place(saved, tmp_path):
    model, path = saved("here")
    shutil.copytree(path, tmp_path / "there")
    there = identify(model, tmp_path / "there")
    assert there.weights == identify(model, path).weights
    assert there.checkpoint != path
    assert identify(*saved("other", seed=1)).weights != there.weights


def test_a_preset_has_no_weights():
    assert identify(OSDNConfig.from_preset("osdn-tiny"), "osdn-tiny").weights is None


def test_a_block_has_one_plain_delta_rule():
    plain = OSDNConfig.from_preset("delta_net-tiny")
    assert identify(plain, "x").baseline
    updates = ({"update_rule": "longhorn"}, {"update_rule": "product-2"})
    for changed in ({"preconditioner": {}}, {"beta_bias": -2.0}, {"write_scale": 0.5}, *updates):
        other = identify(OSDNConfig.from_preset("delta_net-tiny", **changed), "x")
        assert not other.baseline
        assert other.block == identify(plain, "x").block
    for other in ({"num_hidden_layers": 1}, {"vocab_size": 99}, {"num_heads": 1}):
        assert (
            identify(OSDNConfig.from_preset("delta_net-tiny", **other), "x").block
            != identify(plain, "x").block
        )


def test_a_foreign_model_is_named_after_its_folder():
    from transformers import LlamaConfig

    found = identify(LlamaConfig(), "some/llama")
    assert (found.model, found.preset, found.block, found.baseline) == ("llama", None, "llama", True)
