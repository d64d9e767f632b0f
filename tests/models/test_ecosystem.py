"""What users of `transformers`, PEFT and torchao expect of any model."""

import json
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from osdn import OSDNConfig, OSDNForCausalLM, OSDNForSequenceClassification, OSDNForTokenClassification
from tests.models.variants import make, make_config, tokens


def classifier(variant="osdn-apf", **overrides):
    torch.manual_seed(3)
    config = make_config(variant, num_labels=3, pad_token_id=0, **overrides)
    return OSDNForSequenceClassification(config).eval()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_is_classified_by_its_last_token_with_any_padding(side):
    model, ids = classifier(), tokens(2, 9).clamp(min=1)
    padding = torch.zeros(2, 4, dtype=ids.dtype)
    padded = torch.cat([padding, ids] if side == "left" else [ids, padding], 1)
    with torch.no_grad():
        last = model.model(ids, use_cache=False).last_hidden_state[:, -1]
        scores = model(padded, attention_mask=(padded != 0).long()).logits
    torch.testing.assert_close(scores, model.score(last))


def test_a_classifier_starts_from_a_language_model_and_learns_from_labels(tmp_path):
    make("osdn-apf", pad_token_id=0).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(model) is OSDNForSequenceClassification
    body = OSDNForCausalLM.from_pretrained(tmp_path).model.state_dict()
    assert all(torch.equal(x, body[name]) for name, x in model.model.state_dict().items())
    ids, labels = tokens(2, 7).clamp(min=1), torch.tensor([2, 0])
    output = model.train()(ids, labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
    output.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_preset_accepts_a_number_of_labels():
    assert OSDNConfig.from_preset("osdn-tiny", num_labels=5).num_labels == 5


def test_tokens_are_classified_one_by_one(tmp_path):
    make("gdn").save_pretrained(tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=4)
    assert type(model) is OSDNForTokenClassification
    ids, labels = tokens(2, 7), tokens(2, 7) % 4
    output = model(ids, labels=labels)
    assert output.logits.shape == (2, 7, 4)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()))


def test_the_text_classification_pipeline_finds_the_saved_class(tmp_path):
    tokenizer = tiny_tokenizer()
    model = classifier(vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = pipeline("text-classification", str(tmp_path))("ab ba", top_k=None)
    with torch.no_grad():
        expected = model(tokenizer("ab ba", return_tensors="pt").input_ids).logits.softmax(-1)[0]
    assert {row["label"]: row["score"] for row in found} == pytest.approx(
        {f"LABEL_{i}": p.item() for i, p in enumerate(expected)}, abs=1e-5
    )


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", "a", "b", "ab", "ba"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def test_lora_has_default_target_modules():
    model = get_peft_model(make("oskda"), LoraConfig(task_type="CAUSAL_LM", r=2))
    adapted = {name.split(".")[-1] for name, x in model.named_modules() if hasattr(x, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


LOAD = """
import sys
from transformers import AutoModelForCausalLM
assert "osdn" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
print(type(model).__module__, type(model).__name__)
"""


def test_a_checkpoint_loads_without_importing_this_package_first(tmp_path):
    model = make("osgdn")
    model.save_pretrained(tmp_path / "saved")
    run = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "saved", tmp_path / "again"],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["osdn.models.modeling_osdn", "OSDNForCausalLM"]
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("saved", "again")]
    assert (
        files[0]
        == files[1]
        == [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "osdn_classes.py",
        ]
    )
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("saved", "again")]
    assert configs[0] == configs[1]


class Int8Weight(torch.Tensor):
    """An 8-bit weight that only supports multiplication, like those of torchao."""

    @staticmethod
    def __new__(cls, weight):
        scale = weight.abs().amax() / 127
        self = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        self.codes, self.scale = (weight / scale).round().to(torch.int8), scale
        return self

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is F.linear:
            x, weight = arguments[:2]
            return F.linear(x, weight.codes.to(x.dtype)) * weight.scale
        return super().__torch_function__(function, types, arguments, options or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            return arguments[0]
        raise NotImplementedError(f"{function} of {cls.__name__}")


def test_the_loss_of_a_quantized_head_matches_its_logits():
    model, ids = make("osdn"), tokens(2, 9)
    weight = Int8Weight(model.lm_head.weight.detach())
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        output = model(ids, labels=ids)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
