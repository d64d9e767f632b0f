"""Two processes over gloo match one, sharded or not, and their checkpoints can be loaded anywhere."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from osdn.training.checkpoints import convert, is_sharded
from osdn.training.monitor import Metrics
from osdn.training.settings import load_settings
from osdn.training.trainer import train
from tests.training import hostile
from tests.training.conftest import start

pytestmark = pytest.mark.slow


def run_in_two_processes(config):
    process = start(config, processes=2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
@pytest.mark.parametrize("preset", ["osdn-apf-tiny", "osgdn-apf-tiny", "oskda-tiny"])
def test_two_processes_follow_the_loss_curve_of_one(write_config, tmp_path, parallelism, preset):
    changes = {
        "training": {"parallelism": parallelism},
        "model": {"preset": preset},
        "data": {"split": "train[:80%]"},
        "validation": {"split": "train[80%:]", "every": 5, "tokens": 250},  # three rows, shared by two
    }
    one, two = write_config("one", **changes), write_config("two", **changes)
    train(load_settings(one))
    run_in_two_processes(two)
    a, b = Metrics.read(tmp_path / "one"), Metrics.read(tmp_path / "two")
    assert len(a) == len(b) == 12
    for x, y in zip(a, b):
        assert x["loss"] == pytest.approx(y["loss"], rel=2e-5)
        assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=2e-3)
        assert x["tokens"] == y["tokens"]
    one, two = (
        {x["step"]: x["validation_loss"] for x in lines if "validation_loss" in x} for lines in (a, b)
    )
    assert list(one) == [5, 10, 12]
    assert one == pytest.approx(two, rel=2e-5)

    checkpoint = tmp_path / "two" / "checkpoint-8"
    assert is_sharded(checkpoint) == (parallelism == "fsdp2")
    model = AutoModelForCausalLM.from_pretrained(convert(checkpoint, tmp_path / "converted"))
    expected = load_file(tmp_path / "one" / "checkpoint-8" / "model.safetensors")
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-3, atol=3e-4, msg=name)


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_two_processes_resume(write_config, tmp_path, parallelism):
    config = write_config("two", training={"parallelism": parallelism})
    run_in_two_processes(config)
    run = tmp_path / "two"
    before = load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoint-12")
    run_in_two_processes(config)
    after = load_file(run / "model" / "model.safetensors")
    for name in before:
        assert torch.equal(before[name], after[name]), name


def test_code_in_shards_is_not_run_and_the_previous_checkpoint_is_used(write_config, tmp_path):
    config = write_config("two", training={"parallelism": "fsdp2"})
    run_in_two_processes(config)
    run, proof = tmp_path / "two", tmp_path / "proof"
    before = load_file(run / "model" / "model.safetensors")
    for file in ("pytorch_model_fsdp_0/.metadata", "optimizer_0/__1_0.distcp", "rng_state_1.pth"):
        shutil.rmtree(run / "model")
        hostile.poison(run / "checkpoint-12" / file, proof)
        hostile.sign(run / "checkpoint-12")
        assert "checkpoint-12 is damaged" in run_in_two_processes(config)
        assert not proof.exists()
        after = load_file(run / "model" / "model.safetensors")
        for name in before:
            assert torch.equal(before[name], after[name]), name


def test_one_process_continues_a_run_of_two(write_config, tmp_path):
    config = write_config("two")
    run_in_two_processes(config)
    run = tmp_path / "two"
    before = load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoint-12")
    train(load_settings(config))
    after = load_file(run / "model" / "model.safetensors")
    for name in before:
        torch.testing.assert_close(before[name], after[name], rtol=1e-3, atol=3e-4)


def test_one_process_does_not_continue_a_sharded_checkpoint(write_config, tmp_path):
    config = write_config("two", training={"parallelism": "fsdp2"})
    run_in_two_processes(config)
    shutil.rmtree(Path(tmp_path / "two" / "model"))
    shutil.rmtree(tmp_path / "two" / "checkpoint-12")
    with pytest.raises(ValueError, match=r"was written by several processes.*osdn convert"):
        train(load_settings(config))
