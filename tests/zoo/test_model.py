"""Language models built on any row."""

import pytest
import torch

from osdn import OSDNConfig
from osdn.zoo.model import causal_lm


def tiny() -> OSDNConfig:
    config = OSDNConfig.from_preset("delta_net-tiny")
    config.vocab_size, config.hidden_size, config.intermediate_size = 32, 16, 32
    config.head_k_dim = config.head_v_dim = 8
    return config


def test_any_row_makes_a_causal_language_model(name):
    torch.manual_seed(0)
    model = causal_lm(name, tiny(), num_slots=4)
    ids = torch.randint(32, (2, 7))
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = [p.grad for p in model.model.layers.parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 32
    model.eval()
    with torch.no_grad():
        a, b = model(input_ids=ids).logits, model(input_ids=changed).logits
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_every_block_runs_the_row():
    model = causal_lm("gsa", tiny(), num_slots=3)
    rows = [block.attn.mixer for block in model.model.layers]
    assert len(rows) == tiny().num_hidden_layers
    assert all(row.recurrence.name == "gsa" and row.sizes == {"K": 8, "V": 8, "M": 3} for row in rows)


def test_caching_and_padding_are_rejected():
    model = causal_lm("gla", tiny()).eval()
    ids = torch.randint(32, (1, 4))
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=ids, use_cache=True)
    with pytest.raises(ValueError, match="without padding or packing"):
        model(input_ids=ids, cu_seqlens=torch.tensor([0, 2, 4]))
