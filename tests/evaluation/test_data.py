"""The mirror: its layouts, what is found in it, and the errors if something is missing."""

import json

import pytest
from datasets import Dataset

from osdn.evaluation import data
from osdn.evaluation.data import MissingDataError, data_location, find_files, load_data
from osdn.evaluation.suites import SUITES
from tests.evaluation.mirror import write_arrow

ROWS = [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize("place", [
    "owner/My-Set/validation.jsonl",
    "owner/My-Set/config/validation.json",
    "owner/My-Set/data/validation-00000-of-00001.parquet",
    "owner/My-Set/config/val.parquet",
    "owner/My-Set/config/dev-0.parquet",
    "owner___my-set/config/0.0.0/0a1b2c/my-set-validation.arrow",
    "owner/My-Set/validation/data-00000-of-00001.arrow",
])  # fmt: skip
def test_every_layout_is_read(tmp_path, place):
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    (path.parent / "dataset_info.json").write_text("{}")  # the cache has this file next to the data
    if path.suffix == ".arrow":
        write_arrow(path, ROWS)
    elif path.suffix == ".parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)))
    loaded = load_data("owner/My-Set", "config", tmp_path)
    assert list(loaded) == ["validation"]
    assert loaded["validation"].to_list() == ROWS
    assert data_location("owner/My-Set", "config", tmp_path) == "mirror"


def test_splits_and_parts_are_distinguished(tmp_path):
    folder = tmp_path / "a/contest-b"
    folder.mkdir(parents=True)
    for name in ("train-0", "train-1", "test", "attestation"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"from": name}))
    found = find_files("a/contest-b", None, tmp_path)
    assert {split: len(files) for split, files in found.items()} == {"train": 3, "test": 1}
    (folder / "extra.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="several formats"):
        find_files("a/contest-b", None, tmp_path)


def test_a_mirror_may_have_the_first_version_of_swde(tmp_path):
    file = tmp_path / "hazyresearch/based-swde/validation.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"text": "a", "key": "b", "value": "c"}\n')
    assert load_data("hazyresearch/based-swde-v2", "default", tmp_path)["validation"][0]["value"] == "c"


def test_another_configuration_does_not_stand_in_for_a_missing_one(tmp_path):
    folder = tmp_path / "allenai/ai2_arc/ARC-Easy"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text(json.dumps(ROWS[0]))
    assert find_files("allenai/ai2_arc", "ARC-Easy", tmp_path)
    assert not find_files("allenai/ai2_arc", "ARC-Challenge", tmp_path)


def test_a_missing_data_set_is_reported_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(MissingDataError, match="not cached, and the hub cannot be reached") as error:
        load_data("nobody/nothing", None, tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert data_location("nobody/nothing", None, None) == "hub"


@pytest.mark.parametrize("content", ["", "\n", "[]", '{"text": '])
def test_a_file_without_documents_is_reported(tmp_path, content):
    folder = tmp_path / "owner/empty"
    folder.mkdir(parents=True)
    (folder / "test.json").write_text(content)
    with pytest.raises(ValueError, match=f"owner/empty in {tmp_path}.*"):
        load_data("owner/empty", None, tmp_path)["test"]


def test_cached_data_sets_are_recognised(tmp_path, monkeypatch):
    monkeypatch.setattr(data.datasets.config, "HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "Xnhyacinth___long_bench/qasper").mkdir(parents=True)
    assert data_location("Xnhyacinth/LongBench", "qasper", None) == "cache"
    assert data_location("Xnhyacinth/LongBench", "trec", None) == "hub"


def test_the_listed_data_matches_the_tasks_of_lm_eval(mirror):
    """Path, configuration and split must match `lm_eval` for `--list` to be correct."""
    from osdn.evaluation.harness import load_task
    from osdn.training.data import load_tokenizer

    for tasks in SUITES.values():
        for task in tasks:
            if task.folder is not None and not task.makes_its_data:
                loaded = load_task(task.name, load_tokenizer("bytes"), data_dir=mirror)
                assert (task.data, task.config) == (loaded.DATASET_PATH, loaded.DATASET_NAME), task.name
                split = loaded.config.test_split or loaded.config.validation_split or "validation"
                assert split == task.split, task.name


def test_a_mirror_without_the_split_is_reported(tmp_path):
    from osdn.evaluation.harness import load_task

    folder = tmp_path / "baber/piqa"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(json.dumps({"goal": "a", "sol1": "b", "sol2": "c", "label": 0}))
    with pytest.raises(MissingDataError, match="no split validation"):
        load_task("piqa", None, data_dir=tmp_path)
