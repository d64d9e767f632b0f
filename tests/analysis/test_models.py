"""The statements on the keys and gates of the nine variants, briefly trained on real text."""

from pydoc_data import topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from osdn import PRESETS, OSDNConfig, OSDNForCausalLM
from osdn.analysis.theory.models import model_statements, problems_of, statements_of
from osdn.analysis.theory.token_local import RESIDUAL

TINY = [name for name in PRESETS if name.endswith("-tiny") and "newton" not in name]


def bytes_of_text() -> torch.Tensor:
    return torch.tensor(list(" ".join(" ".join(topics.topics.values()).split()).encode()))


def train(name: str, steps: int) -> OSDNForCausalLM:
    torch.manual_seed(0)
    config = OSDNConfig.from_preset(name)
    config.vocab_size = 256
    model, text = OSDNForCausalLM(config), bytes_of_text()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = torch.stack([text[i : i + 48] for i in torch.randint(len(text) - 48, (4,)).tolist()])
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    return model.eval()


@pytest.mark.parametrize("name", ["osdn-tiny", "osgdn-apf-tiny", "oskda-tiny"])
def test_statements_hold_on_a_trained_models_own_keys(name):
    model = train(name, steps=8)
    problems = problems_of(model, input_ids=bytes_of_text()[None, :64])
    assert len(problems) == model.config.num_hidden_layers
    for check in model_statements(problems):
        assert check.passed, (check.statement, check.verdict)


def test_a_model_without_a_box_is_checked_as_far_as_possible():
    model = OSDNForCausalLM(OSDNConfig.from_preset("osdn-tiny", preconditioner={"bounds": None}))
    checks = model_statements(problems_of(model, input_ids=bytes_of_text()[None, :64]))
    assert len(checks) == 2
    assert all(check.passed for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_statements_hold_on_the_keys_of_every_variant_after_more_training(name):
    model = train(name, steps=60)
    for check in model_statements(problems_of(model, input_ids=bytes_of_text()[:512].view(4, 128))):
        assert check.passed, (check.statement, check.verdict)


def test_other_rules_are_rejected():
    model = OSDNForCausalLM(OSDNConfig.from_preset("osdn-newton-tiny"))
    with pytest.raises(ValueError, match="the paper's statements are about its own rule, not newton"):
        problems_of(model, input_ids=torch.arange(9)[None])


def test_a_models_problems_hold_its_own_tensors_in_float64():
    model = train("osgdn-apf-tiny", steps=1)
    ids = bytes_of_text()[None, :20]
    (p, *_) = problems_of(model, input_ids=ids)
    layer = model.model.layers[0].attn
    x = model.model.layers[0].attn_norm(model.model.embeddings(ids))
    v, _ = layer.v_conv1d(layer.v_proj(x), None, None, False)
    torch.testing.assert_close(p.v.float(), v.unflatten(-1, p.v.shape[2:]))
    torch.testing.assert_close(p.beta.float(), layer.b_proj(x).sigmoid())
    torch.testing.assert_close(p.n, torch.ones_like(p.n), rtol=0, atol=1e-14)
    for tensor in (p.k, p.v, p.beta, p.log_decay, p.retention):
        assert tensor.dtype == torch.float64


def test_repeating_one_token_drives_its_residual_to_zero_and_is_reported():
    """A run of blanks repeats one key and one value, which violates a hypothesis the paper leaves out."""
    model = train("delta_net-tiny", steps=1)
    (check, *_) = model_statements(problems_of(model, input_ids=torch.full((1, 256), 32)))
    assert check.violated == [RESIDUAL]


def test_a_saved_model_is_checked_on_text(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    train("osdn-tiny", steps=2).save_pretrained(tmp_path)
    checks = statements_of(tmp_path, sequences=2, length=32)
    assert [c.verdict for c in checks] == ["holds"] * 5
