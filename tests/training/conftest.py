"""A small run: a model with 150,000 parameters and documents of made-up words."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

CONFIG: dict[str, Any] = {
    "name": "small",
    "model": {"preset": "osdn-apf-tiny", "hidden_size": 32, "intermediate_size": 48},
    "data": {
        "name": None,
        "split": "train",
        "text_column": "text",
        "streaming": False,
        "tokenizer": "bytes",
        "seq_len": 96,
        "context_len": 40,
        "shuffle": None,
    },
    "optimizer": {
        "learning_rate": 0.003,
        "min_lr_ratio": 0.1,
        "warmup_steps": 3,
        "betas": [0.9, 0.95],
        "eps": 1e-15,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    },
    "training": {
        "steps": 12,
        "tokens_per_step": 192,
        "seed": 42,
        "precision": "float32",
        "parallelism": "ddp",
        "gradient_checkpointing": False,
        "max_skipped_steps": 3,
    },
    "validation": {"split": None, "every": 0, "tokens": 200},
    "checkpoints": {"every": 4, "keep": 3},
    "logging": {"every": 1, "diagnostics_every": 0},
}


@pytest.fixture(autouse=True, scope="session")
def dataset_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache data sets with the other temporary files, and make arithmetic deterministic."""
    import datasets

    cache = tmp_path_factory.mktemp("datasets")
    before, threads = datasets.config.HF_DATASETS_CACHE, torch.get_num_threads()
    datasets.config.HF_DATASETS_CACHE = cache
    os.environ["HF_DATASETS_CACHE"] = str(cache)  # for the processes that tests start
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    datasets.config.HF_DATASETS_CACHE = before
    del os.environ["HF_DATASETS_CACHE"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents of 1 to 400 bytes."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(1, 7))) for _ in range(40)]
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    with path.open("w") as file:
        for _ in range(60):
            text = " ".join(generator.choices(words, k=generator.randint(1, 80)))
            file.write(json.dumps({"text": text[:400]}) + "\n")
    return path


@pytest.fixture
def write_config(tmp_path: Path, corpus: Path) -> Callable[..., Path]:
    """Writes the config of the small run to a file; keyword arguments replace keys of its sections."""

    def write(run: str = "run", **sections: Any) -> Path:
        content = {"output_dir": str(tmp_path / run)} | {
            key: value | sections.get(key, {}) if isinstance(value, dict) else sections.get(key, value)
            for key, value in CONFIG.items()
        }
        content["data"] = {"source": str(corpus)} | content["data"]
        path = tmp_path / f"{run}.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


def start(config: Path, *replacements: str, processes: int = 1) -> subprocess.Popen[str]:
    """Start `osdn train` in separate processes with one thread each, like the tests."""
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return subprocess.Popen(
        [*launcher, "osdn", "train", str(config), *replacements],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "400"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
