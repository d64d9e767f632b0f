"""Linear layers in decoding."""

import pytest
import torch
from torch import nn

from osdn.layers import linear
from osdn.layers.linear import Linear, linears


@pytest.fixture
def calls(monkeypatch):
    """The shapes of inputs that `row_product` was called with."""
    seen, original = [], linear.row_product

    def count(x, *rest):
        seen.append(tuple(x.shape))
        return original(x, *rest)

    monkeypatch.setattr(linear, "row_product", count)
    return seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_rows_without_gradients_are_the_same_product(calls, dtype, bias):
    layer = Linear(512, 300, bias=bias, dtype=dtype)
    exact = nn.Linear(512, 300, bias=bias, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 1, 512, dtype=dtype)
    with torch.no_grad():
        y = layer(x)
        error = (y - exact(x.double())).norm() / exact(x.double()).norm()
    assert calls == [(2, 1, 512)]
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)


def test_everything_else_is_pytorch_s_product(calls):
    layer, x = Linear(512, 300), torch.randn(1, 512)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer(torch.randn(5, 512))
        Linear(16, 16)(torch.randn(1, 16))
        layer(torch.randn(0, 512))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert calls == []


@pytest.fixture
def joint_calls(monkeypatch):
    """How many products each call of `row_products` had."""
    seen, original = [], linear.row_products

    def count(products):
        seen.append(len(products))
        return original(products)

    monkeypatch.setattr(linear, "row_products", count)
    return seen


@torch.no_grad()
def test_several_layers_are_one_call(joint_calls):
    x, narrow = torch.randn(2, 1, 64), torch.randn(2, 1, 8)
    layers = [Linear(64, 96, bias=False), Linear(64, 4), Linear(8, 33)]
    inputs = [x, x, narrow]
    outputs = linears(list(zip(layers, inputs)))
    assert joint_calls == [3]
    for layer, given, got in zip(layers, inputs, outputs):
        torch.testing.assert_close(got, nn.functional.linear(given, layer.weight, layer.bias))


class Doubled(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(64, 4),
        nn.Sequential(Linear(64, 4)),
        Doubled(64, 4),
        Linear(64, 4),  # with a hook
    ],
    ids=lambda layer: type(layer).__name__,
)
@torch.no_grad()
def test_a_layer_that_is_not_plain_is_called(joint_calls, other):
    x, first = torch.randn(1, 64), Linear(64, 96)
    if type(other) is Linear:
        other.register_forward_hook(lambda module, args, y: y + 1)
    got = linears([(first, x), (other, x)])
    assert joint_calls == []
    torch.testing.assert_close(got[0], first(x))
    torch.testing.assert_close(got[1], other(x))


def test_gradients_and_many_rows_are_pytorch_s(joint_calls):
    layers = [Linear(64, 96), Linear(64, 4)]
    x = torch.randn(1, 64)
    sum(y.sum() for y in linears([(layer, x) for layer in layers])).backward()
    assert all(layer.weight.grad is not None for layer in layers)
    with torch.no_grad():
        linears([(layer, torch.randn(5, 64)) for layer in layers])
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linears([(layer, torch.randn(1, 63)) for layer in layers])
    assert joint_calls == []
