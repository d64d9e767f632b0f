"""Linear layers in decoding."""

import pytest
import torch
from torch import nn

from osdn.layers import linear
from osdn.layers.linear import Linear


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
