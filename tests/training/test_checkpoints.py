"""Checkpoints: complete or absent, damage is detected, and no code from them is run."""

import json
import logging
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.training import checkpoints, shards
from osdn.training.data import load_tokenizer
from tests.training.hostile import Evil, poison, save_shards, sign

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODEL = OSDNConfig.from_preset("osdn-apf-tiny", hidden_size=32, intermediate_size=48, num_hidden_layers=1)


def make(run, step, sharded=True):
    """A checkpoint with every kind of file."""
    staged = run / checkpoints.STAGING / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    torch.manual_seed(step)
    model = OSDNForCausalLM(MODEL)
    MODEL.save_pretrained(staged)
    load_tokenizer("bytes").save_pretrained(staged)
    for name in ("trainer_state.json", "position.json"):
        (staged / name).write_text(json.dumps({"step": step}))
    for name in ("scheduler.pt", "optimizer.pt", "rng_state.pth"):
        torch.save({"x": torch.randn(9)}, staged / name)
    if sharded:
        save_shards(staged / checkpoints.SHARDS, {"model": model.state_dict()})
        save_shards(staged / checkpoints.OPTIMIZER_SHARDS, {"optimizer": {"lr": 0.1, "m": torch.ones(3)}})
    else:
        save_file(model.state_dict(), staged / "model.safetensors")
    checkpoints.publish(staged, run / f"checkpoint-{step}")
    return run / f"checkpoint-{step}"


def test_the_newest_checkpoint_is_found_and_old_ones_are_removed(tmp_path):
    assert checkpoints.newest_good(tmp_path) is None
    for step in (9, 10, 100):
        make(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert checkpoints.newest_good(tmp_path).name == "checkpoint-100"
    checkpoints.prune(tmp_path, keep=2)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-10"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer_0/.metadata", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "empty"])
def test_any_damage_is_reported_and_the_previous_checkpoint_is_used(tmp_path, caplog, file, how):
    sharded = "optimizer_0" in file
    make(tmp_path, 1, sharded)
    path = make(tmp_path, 2, sharded) / file
    content = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes({"flip": content, "truncate": content[:-1], "empty": b""}[how])
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest_good(tmp_path).name == "checkpoint-1"
    assert "checkpoint-2 is damaged" in caplog.text
    make(tmp_path, 2, sharded)  # the run reaches this step again
    assert checkpoints.newest_good(tmp_path).name == "checkpoint-2"


@pytest.mark.parametrize("left", [{}, {"config.json"}, [], None])
def test_an_incomplete_manifest_counts_as_damage(tmp_path, left):
    checkpoint = make(tmp_path, 1)
    listed = json.loads((checkpoint / "manifest.json").read_text())
    content = {name: listed[name] for name in left} if isinstance(left, set) else left
    (checkpoint / "manifest.json").write_text(json.dumps(content))
    assert "manifest.json" in checkpoints.damage(checkpoint)


@pytest.mark.parametrize("file", ["config.json", "position.json", "scheduler.pt", "optimizer.pt"])
def test_the_manifest_must_list_every_required_file(tmp_path, file):
    checkpoint = make(tmp_path, 1, sharded=False)
    (checkpoint / file).unlink()
    sign(checkpoint)
    assert f"does not list {file}" in checkpoints.damage(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "pipe"])
def test_a_manifest_cannot_name_files_outside_the_checkpoint(tmp_path, name):
    checkpoint = make(tmp_path, 1)
    (tmp_path / "secret").write_text("x")
    os.mkfifo(checkpoint / "pipe")  # reading it would block forever
    listed = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**listed, name: "0"}))
    assert checkpoints.damage(checkpoint) == f"{name} is missing"


@pytest.mark.parametrize(
    "file",
    [
        "scheduler.pt",
        "optimizer.pt",
        "rng_state.pth",
        f"{checkpoints.SHARDS}/.metadata",
        f"{checkpoints.SHARDS}/__0_0.distcp",  # tensors
        f"{checkpoints.OPTIMIZER_SHARDS}/.metadata",
        f"{checkpoints.OPTIMIZER_SHARDS}/__0_0.distcp",  # tensors and numbers
    ],
)
def test_a_file_that_would_run_code_counts_as_damage_and_is_not_run(tmp_path, file, caplog):
    make(tmp_path, 1)
    checkpoint, proof = make(tmp_path, 2), tmp_path / "proof"
    poison(checkpoint / file, proof)
    sign(checkpoint)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest_good(tmp_path).name == "checkpoint-1"
    assert "checkpoint-2 is damaged" in caplog.text
    with pytest.raises(ValueError, match=r"checkpoint-2 is damaged"):
        checkpoints.convert(checkpoint, tmp_path / "model")
    assert not proof.exists()
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("state", [{"rate": 0.5}, {"m": torch.ones(3)}], ids=["number", "tensor"])
def test_code_in_unchecked_shards_is_not_run_either(tmp_path, file, state):
    save_shards(tmp_path / "shards", state)
    poison(tmp_path / "shards" / file, tmp_path / "proof")
    with pytest.raises(ValueError, match="cannot be read"):
        shards.load_shards(tmp_path / "shards", state, alone=True)
    assert not (tmp_path / "proof").exists()


def test_poison_works_on_a_reader_that_runs_code(tmp_path):
    """Otherwise the tests above would prove nothing."""
    save_shards(tmp_path / "shards", {"rate": 0.5})
    poison(tmp_path / "shards" / "__0_0.distcp", tmp_path / "first")
    torch.distributed.checkpoint.load({"rate": 0.5}, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert (tmp_path / "first").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "second")))
    assert (tmp_path / "second").exists()


def test_an_index_cannot_change_the_classes_it_names(tmp_path):
    save_shards(tmp_path / "shards", {"rate": 0.5})
    before = dict(shards.index.Metadata.__dict__)

    stream = (
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n"  # find the class
        b"N}\x8c\x07versionK\x01s\x86b."  # and set its attribute `version`
    )
    (tmp_path / "shards" / ".metadata").write_bytes(stream)
    with pytest.raises(ValueError, match="not the index"):
        shards.check_shards(tmp_path / "shards")
    assert dict(shards.index.Metadata.__dict__) == before


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/hostname"])
def test_shards_must_be_in_the_folder_of_their_index(tmp_path, path):
    save_shards(tmp_path / "shards", {"rate": 0.5})
    index = pickle.loads((tmp_path / "shards" / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.relative_path = path
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="which is not in the same folder"):
        shards.check_shards(tmp_path / "shards")


@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_is_converted_to_a_model_with_checksums(tmp_path, sharded):
    result = checkpoints.convert(make(tmp_path, 3, sharded), tmp_path / "model")
    torch.manual_seed(3)
    for a, b in zip(
        AutoModelForCausalLM.from_pretrained(result).parameters(), OSDNForCausalLM(MODEL).parameters()
    ):
        assert torch.equal(a, b)
    assert checkpoints.damage(result, checkpoints.MODEL_FILES) is None
    (result / "model.safetensors").write_bytes(b"")
    assert "model.safetensors" in checkpoints.damage(result, checkpoints.MODEL_FILES)


def test_weights_of_another_model_are_rejected(tmp_path):
    checkpoint = make(tmp_path, 1)
    OSDNConfig.from_preset("osdn-tiny", hidden_size=64).save_pretrained(checkpoint)
    sign(checkpoint)
    with pytest.raises(ValueError, match="does not contain a model that can be loaded"):
        checkpoints.convert(checkpoint, tmp_path / "model")


def test_a_tokenizer_with_code_is_rejected_without_asking(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: "y")
    checkpoint = make(tmp_path, 1)
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    (checkpoint / "evil.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'proof')!r})\nclass Evil: pass\n"
    )
    sign(checkpoint)
    with pytest.raises(ValueError, match="does not contain a model that can be loaded"):
        checkpoints.convert(checkpoint, tmp_path / "model")
    assert not (tmp_path / "proof").exists()


def test_damaged_directories_can_be_set_aside_repeatedly(tmp_path):
    for _ in range(3):
        make(tmp_path, 1)
        checkpoints.set_aside(tmp_path / "checkpoint-1")
    names = {path.name for path in tmp_path.glob("damaged-*")}
    assert names == {"damaged-checkpoint-1", "damaged-checkpoint-1-2", "damaged-checkpoint-1-3"}
    assert not checkpoints.checkpoints(tmp_path)


def test_only_intact_checkpoints_are_converted(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a checkpoint"):
        checkpoints.convert(tmp_path, tmp_path / "model")
    damaged = make(tmp_path, 1, sharded=False)
    (damaged / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is damaged: model\.safetensors"):
        checkpoints.convert(damaged, tmp_path / "model")
    whole = make(tmp_path, 2)
    with pytest.raises(FileExistsError, match="choose another name"):
        checkpoints.convert(whole, whole)
    assert not (tmp_path / "model").exists()
