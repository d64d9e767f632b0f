"""The compiled decay against its formula in float64."""

import pytest
import torch
from torch.nn import functional as F

from osdn.ops.cpu.decay import log_decay
from tests.ops.problems import relative_error


def formula(x, rate, bias, bound):
    v = x if bias is None else x + bias
    return -rate * F.softplus(v, threshold=100) if bound is None else bound * torch.sigmoid(rate * v)


def gradients(function, inputs, weights):
    inputs = [None if y is None else y.detach().requires_grad_() for y in inputs]
    y = function(*inputs)
    leaves = [x for x in inputs if x is not None]
    return [y.detach(), *torch.autograd.grad((y * weights.to(y.dtype)).sum(), leaves)]


@pytest.mark.parametrize("layout", ["whole", "split", "strided"])
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 37, 3 * 17), (150, 5), (1, 16), (7,)])
def test_outputs_and_gradients_are_the_formula(shape, dtype, bound, layout):
    g = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    rate, bias = (torch.randn(shape[-1], generator=g, dtype=torch.float64) for _ in range(2))
    x, rate, bias = (5 * x).to(dtype), rate.exp(), bias
    if layout == "split":
        x = torch.cat([x, x], -1)[..., shape[-1] :]
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for given in (bias, None):
        inputs = [x, rate.to(wide), None if given is None else given.to(wide)]
        ours = gradients(lambda *y: log_decay(*y, bound), inputs, weights.to(wide))
        exact = [None if y is None else y.double() for y in inputs]
        expected = gradients(lambda *y: formula(*y, bound), exact, weights.to(wide).double())
        for i, (got, want) in enumerate(zip(ours, expected, strict=True)):
            assert got.dtype == (dtype if i == 1 else wide)  # that of x goes back in its own
            limit = 2**-8 if got.dtype == torch.bfloat16 else 1e-14 if wide == torch.float64 else 1e-6
            assert relative_error(got, want) < limit


def test_every_decay_is_accurate():
    x = torch.linspace(-80, 80, 4001)
    ours = log_decay(x[:, None], torch.ones(1))
    exact = formula(x.double()[:, None], 1.0, None, None)
    assert ((ours - exact).abs() <= 1e-6 * exact.abs()).all()  # where 1 + exp(x) would be 1, too
    extreme = torch.tensor([[-1e30], [1e30], [torch.inf], [-torch.inf]])
    assert torch.equal(log_decay(extreme, torch.ones(1)), -extreme.clamp(min=0))
    assert log_decay(torch.tensor([[torch.nan]]), torch.ones(1)).isnan()


def test_empty_inputs():
    x, rate = torch.zeros(0, 3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    assert torch.equal(torch.autograd.grad(log_decay(x, rate).sum(), rate)[0], torch.zeros(8))


def test_the_operator_is_what_pytorch_expects_of_one():
    x, rate, bias = (torch.randn(*shape, requires_grad=True) for shape in [(2, 3, 9), (9,), (9,)])
    torch.library.opcheck(torch.ops.osdn.cpu_decay, (x, rate, bias, -5.0, True))
    torch.library.opcheck(torch.ops.osdn.cpu_decay, (x, rate, None, 0.0, False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4, dtype=torch.int32)}, "x is torch.int32, .2, 4., on cpu; it must be"),
        ({"rate": torch.zeros(3)}, "rate has shape .3."),
        ({"bias": torch.zeros(5)}, "bias has shape .5."),
    ],
)
def test_bad_arguments_are_told(change, message):
    with pytest.raises(ValueError, match=message):
        log_decay(**{"x": torch.zeros(2, 4), "rate": torch.ones(4)} | change)
