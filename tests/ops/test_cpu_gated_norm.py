"""The compiled norm with its gate against its formula in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from osdn.ops.cpu.gated_norm import gated_rms_norm
from tests.ops.problems import relative_error

GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])


def formula(x, weight, gate, activation, eps):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y if gate is None else y * GATES[activation](gate)


def gradients(function, inputs, weights):
    inputs = [None if y is None else y.detach().requires_grad_() for y in inputs]
    y = function(*inputs)
    leaves = [x for x in inputs if x is not None]
    return [y.detach(), *torch.autograd.grad((y * weights.to(y.dtype)).sum(), leaves)]


def agree(shape, dtype, activation, layout="whole", eps=1e-6, size=1.0, slack=1):
    g = torch.Generator().manual_seed(0)
    x, gate, weights = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    x, gate, weight = size * x, 3 * gate, 1 + torch.randn(shape[-1], generator=g, dtype=torch.float64)
    x, gate, weight, weights = (y.to(dtype) for y in (x, gate, weight, weights))
    if layout == "split":  # a part of each row, as layers cut what a projection made
        x, gate = torch.cat([x, gate], -1).split(shape[-1], -1)
    elif layout == "strided":
        x, gate = torch.stack([x, gate], -1).unbind(-1)
    inputs = (x, weight, None if activation is None else gate)
    ours = gradients(
        lambda *y: gated_rms_norm(y[0], y[1], y[2], activation=activation, eps=eps), inputs, weights
    )
    wide = [None if y is None else y.double() for y in inputs]
    expected = gradients(lambda *y: formula(*y, activation, eps), wide, weights.double())
    bound = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2**-8}[dtype]
    for got, exact in zip(ours, expected, strict=True):
        assert got.dtype == dtype
        assert got.shape == exact.shape
        assert relative_error(got, exact) < slack * bound


@pytest.mark.parametrize("layout", ["whole", "split", "strided"])
@pytest.mark.parametrize("activation", [None, "silu", "sigmoid"])
@dtypes
def test_outputs_and_gradients_are_the_formula(dtype, activation, layout):
    agree((2, 37, 3, 128), dtype, activation, layout)
    agree((300, 9), dtype, activation, layout)  # more than one item of work


@given(
    shape=st.lists(st.integers(1, 12), max_size=2),
    D=st.integers(2, 140),
    activation=st.sampled_from([None, "silu", "sigmoid"]),
    eps=st.sampled_from([1e-6, 1e-5, 1.0]),
    size=st.sampled_from([1e-4, 1.0, 1e6]),
)
def test_any_shape(shape, D, activation, eps, size):
    agree((*shape, D), torch.float32, activation, eps=eps, size=size, slack=10)  # a row alone cancels more


@dtypes
def test_large_gates_and_zeros_are_finite(dtype):
    x, weight = torch.zeros(2, 20, dtype=dtype), torch.ones(20, dtype=dtype)
    x[1] = 1
    gate = torch.full((2, 20), 200.0, dtype=dtype)
    gate[:, ::2] *= -1
    inputs = [y.requires_grad_() for y in (x, weight, gate)]
    for activation in GATES:
        y = gated_rms_norm(*inputs, activation=activation)
        torch.testing.assert_close(y, formula(*inputs, activation, 1e-6), rtol=1e-2, atol=1e-3)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), inputs))


def test_bfloat16_is_rounded_once():
    g = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(50, 64, generator=g).bfloat16() for _ in range(2))
    weight = 1 + torch.randn(64, generator=g)  # may stay in float32
    exact = formula(x.double(), weight.double(), gate.double(), "silu", 1e-6)
    ours = gated_rms_norm(x, weight, gate, activation="silu")
    assert (ours != exact.bfloat16()).float().mean() < 1e-3  # where float32 falls to the other side


def test_empty_inputs():
    x = torch.zeros(0, 3, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    y = gated_rms_norm(x, weight, x, activation="silu")
    assert y.shape == x.shape
    assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], torch.zeros(8))


def test_the_operator_is_what_pytorch_expects_of_one():
    x, weight, gate = (torch.randn(*shape, requires_grad=True) for shape in [(2, 3, 9), (9,), (2, 3, 9)])
    torch.library.opcheck(torch.ops.osdn.cpu_gated_norm, (x, weight, gate, 1, 1e-6))
    torch.library.opcheck(torch.ops.osdn.cpu_gated_norm, (x, weight, None, 0, 1e-6))


def test_the_result_does_not_depend_on_the_number_of_threads():
    x, weight, gate = torch.randn(2000, 64), torch.randn(64), torch.randn(2000, 64)
    results, threads = [], torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(
                gradients(lambda *y: gated_rms_norm(*y, activation="silu"), (x, weight, gate), gate)
            )
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4, dtype=torch.int32)}, "x is torch.int32, .2, 4., on cpu; it must be"),
        ({"weight": torch.zeros(3)}, "weight has shape .3."),
        ({"gate": torch.zeros(2, 5)}, "gate is torch.float32, .2, 5., on cpu; it must be like x"),
        ({"gate": torch.zeros(2, 4).bfloat16()}, "gate is torch.bfloat16"),
        (
            {"gate": None},
            "activation is 'silu'; it must be 'silu' or 'sigmoid' with a gate, and None without",
        ),
        ({"activation": "relu"}, "activation is 'relu'"),
    ],
)
def test_bad_arguments_are_told(change, message):
    arguments = {"x": torch.zeros(2, 4), "weight": torch.ones(4), "gate": torch.zeros(2, 4)}
    arguments |= {"activation": "silu"} | change
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**arguments)
