"""Checkpoints: whole or not there, and damage is found."""

import logging

import pytest

from osdn.training import checkpoints


def make(run, step, content=b"weights"):
    staged = run / checkpoints.STAGING / f"checkpoint-{step}"
    (staged / "shards").mkdir(parents=True)
    (staged / "shards" / ".metadata").write_bytes(content)
    (staged / "model.safetensors").write_bytes(content * 1000)
    checkpoints.publish(staged, run / f"checkpoint-{step}")
    return run / f"checkpoint-{step}"


def test_the_newest_checkpoint_is_found_and_old_ones_go(tmp_path):
    assert checkpoints.newest_good(tmp_path) is None
    for step in (9, 10, 100):
        make(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert checkpoints.newest_good(tmp_path).name == "checkpoint-100"
    checkpoints.prune(tmp_path, keep=2)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-10"]


@pytest.mark.parametrize("file", ["model.safetensors", "shards/.metadata", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "empty"])
def test_any_damage_is_found_told_and_the_one_before_is_used(tmp_path, caplog, file, how):
    make(tmp_path, 1)
    path = make(tmp_path, 2) / file
    content = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes({"flip": content, "truncate": content[:-1], "empty": b""}[how])
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest_good(tmp_path).name == "checkpoint-1"
    assert "checkpoint-2 is damaged" in caplog.text
    make(tmp_path, 2)  # the run comes to this step again
    assert checkpoints.newest_good(tmp_path).name == "checkpoint-2"


def test_what_is_not_a_checkpoint_is_not_converted(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a checkpoint"):
        checkpoints.convert(tmp_path, tmp_path / "model")
    damaged = make(tmp_path, 1)
    (damaged / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is damaged: model\.safetensors"):
        checkpoints.convert(damaged, tmp_path / "model")
    whole = make(tmp_path, 2)
    with pytest.raises(FileExistsError, match="choose another name"):
        checkpoints.convert(whole, whole)
    assert not (tmp_path / "model").exists()
