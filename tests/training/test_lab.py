"""The trainer learns as much as the lab's plain loop from equally many tokens of the same text."""

import json

import pytest
from transformers import AutoModelForCausalLM

from osdn.lab import training as lab
from osdn.lab.text import TextTask, corpus, prepare
from osdn.lab.variants import Variant
from osdn.training.settings import load_settings
from osdn.training.trainer import train


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["osdn", "osgdn-apf"])
def test_a_tiny_run_on_the_standard_library_reaches_the_loss_of_the_lab(write_config, tmp_path, variant):
    task = TextTask(str(tmp_path / "text"), megabytes=1.0, length=128)
    prepare(task)
    run = lab.Run(task, Variant(variant), seed=0, steps=150, batch=16, learning_rate=3e-3)
    model, _ = lab.train(run)
    expected = task.evaluate(model, 0)["loss"]

    documents = tmp_path / "corpus.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus("train", 1.0)))
    tokens = run.batch * task.length
    config = write_config(
        model={"preset": f"{variant}-tiny", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128},
        data={
            "source": str(documents),
            "tokenizer": task.folder,
            "seq_len": tokens,
            "context_len": task.length,
        },
        optimizer={"warmup_steps": 15, "eps": 1e-8, "betas": [0.9, 0.98], "min_lr_ratio": 0.0},
        training={"steps": run.steps, "tokens_per_step": tokens, "seed": 0},
        checkpoints={"every": 1000},
    )
    found = task.evaluate(AutoModelForCausalLM.from_pretrained(train(load_settings(config))), 0)["loss"]
    print(f"{variant}: the lab's loop {expected:.4f}, the trainer {found:.4f} nats per token")
    assert found < expected + 0.03  # the batches differ
