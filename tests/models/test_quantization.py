"""Linear layers with weights of 8 and 4 bits."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from osdn import OSDNConfig, OSDNForCausalLM, QuantizationConfig
from osdn.models.checkpoints import load_model
from osdn.models.quantization import GROUP, LAYERS, Int4Linear, Int8Linear, quantize
from tests.models.variants import scatter, tokens

LARGEST_ERROR = {"int8": 0.01, "int4": 0.12}  # of a row of outputs, relative
BITS = {"int8": 8, "int4": 4}


def linear(dtype, bias=False):
    torch.manual_seed(0)
    return nn.Linear(96, 128, bias=bias, dtype=dtype)


def expected_weight(layer, weights):
    """The nearest multiples of a scale, found in float64; scales are kept in float32, of int4 in bfloat16."""
    wide = layer.weight.detach().double()
    if weights == "int8":
        scale = wide.abs().amax(1, keepdim=True) / 127
        return (wide / scale).round() * scale.float()
    groups = wide.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, zero = ((high - low) / 15).bfloat16(), low.bfloat16().double()
    return (((groups - zero) / scale).round().clamp(0, 15) * scale + zero).flatten(1)


@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (2, 9), (4, 1), (1, 0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", LAYERS)
def test_a_layer_multiplies_by_its_rounded_weight(weights, dtype, bias, shape):
    layer = linear(dtype, bias)
    x = torch.randn(*shape, 96).to(dtype)
    with torch.no_grad():
        y = LAYERS[weights](layer)(x)
    assert (y.shape, y.dtype) == ((*shape, 128), dtype)
    expected = x.double() @ expected_weight(layer, weights).T + (layer.bias.double() if bias else 0)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.01}[dtype]
    assert (y - expected).norm() <= tolerance * expected.norm()
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert (y - exact).norm() <= LARGEST_ERROR[weights] * exact.norm()


def save(folder):
    config = OSDNConfig.from_preset("oskda-tiny", head_k_dim=32, head_v_dim=32)
    scatter(OSDNForCausalLM(config)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("weights", LAYERS)
def test_from_pretrained_makes_the_large_layers_small(weights, tmp_path):
    whole = OSDNForCausalLM.from_pretrained(save(tmp_path))
    small = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QuantizationConfig(weights))
    packed = {name for name, x in small.named_modules() if isinstance(x, (Int8Linear, Int4Linear))}
    expected = {
        "attn.q_proj",
        "attn.k_proj",
        "attn.v_proj",
        "attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "attn.g_proj.1",
    }
    assert packed == {"lm_head"} | {f"model.layers.{i}.{name}" for i in range(2) for name in expected}
    assert small.lm_head.weight.nbytes * 8 == whole.lm_head.weight.numel() * BITS[weights]
    ids = tokens(2, 30)
    with torch.no_grad():
        a, b = whole(ids, labels=ids), small(ids, labels=ids)
    assert abs(a.loss - b.loss) < {"int8": 0.02, "int4": 0.4}[weights]
    assert not torch.equal(a.logits, b.logits)
    with torch.no_grad():
        steps = small.generate(ids[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0)
        again = small(steps[:, :-1], use_cache=False).logits[:, 8:].argmax(-1)
    assert torch.equal(again, steps[:, 9:])


def test_large_layers_that_cannot_be_packed_are_named(caplog):
    model = nn.ModuleDict({"fits": nn.Linear(64, 64), "head": nn.Linear(64, 100), "gate": nn.Linear(64, 2)})
    quantize(model, "int4")
    assert caplog.messages == [
        "head in full precision: int4 needs outputs in multiples of 64 and inputs of 32"
    ]
    assert isinstance(model["fits"], Int4Linear)


def test_what_cannot_be_done_is_refused(tmp_path):
    with pytest.raises(ValueError, match="weights is 'int2'; it must be one of int8, int4"):
        QuantizationConfig("int2")
    with pytest.raises(ValueError, match="no linear layer can be stored in int8"):
        quantize(nn.Sequential(nn.Linear(30, 30)), "int8")
    with pytest.raises(ValueError, match="packed weights are for CPUs"):
        quantize(nn.Linear(64, 64, device="meta"), "int8")
    small = load_model(save(tmp_path), weights="int8")
    with pytest.raises(ValueError, match="not serializable"):
        OSDNForCausalLM.from_pretrained(
            tmp_path, quantization_config=QuantizationConfig("int4")
        ).save_pretrained(tmp_path / "again")
    assert isinstance(small.lm_head, Int8Linear)
