"""trl's `padding_free` training of a packed batch on a CPU; needs an environment with trl."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

import osdn
from tests.hosts.families import make, tokens

trl = pytest.importorskip("trl")

LENGTHS = (9, 3, 14, 5, 2, 11, 7, 6)


def train(model, path, **settings):
    """The losses of two steps over all sequences."""
    data = Dataset.from_list([{"input_ids": tokens(n, seed=n).tolist()} for n in LENGTHS])
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    config = trl.SFTConfig(
        output_dir=str(path), use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1,
        max_steps=2, per_device_train_batch_size=4, learning_rate=1e-3, max_length=None,
        gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True}, disable_tqdm=True,
        train_sampling_strategy="sequential", **settings,
    )  # fmt: skip
    trainer = trl.SFTTrainer(model, args=config, train_dataset=data, processing_class=words)
    trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def separate(model):
    """The loss of the first batch, computed for each sequence separately."""
    total = count = 0
    for n in LENGTHS[:4]:
        ids = tokens(1, n, seed=n)
        logits = model(ids, use_cache=False).logits
        total = total + F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += n - 1
    return total / count


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_packed_training_is_training_on_separate_sequences(family, tmp_path):
    alone = separate(make(family))
    padded, packed = make(family), make(family)
    expected = train(padded, tmp_path)
    osdn.accelerate()
    losses = train(packed, tmp_path, padding_free=True)
    torch.testing.assert_close(losses[0], alone, rtol=1e-3, atol=1e-3)  # logs have four digits
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    for (name, x), y in zip(packed.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_trl_rejects_it_without_accelerate(tmp_path):
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        train(make("qwen3_5"), tmp_path, padding_free=True)
