"""The compiled normalisation against its formula in float64."""

import pytest
import torch

from osdn.ops.cpu.normalization import widened
from tests.ops.problems import relative_error


def formula(x, unit):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if unit else x


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 37, 3, 128), (1, 1, 2, 5), (3, 2, 1, 17), (1, 0, 2, 8)])
@pytest.mark.parametrize("layout", ["whole", "split", "strided"])
def test_rows_and_gradients_are_the_formula(shape, dtype, unit, layout):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if layout == "split":  # a part of each token, as layers cut queries, keys and values
        x = torch.cat([x, x], 2)[:, :, shape[2] :]
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    x = x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, exact = widened(x, unit), formula(wide, unit)
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (grad,) = torch.autograd.grad((y * weights.to(y.dtype)).sum(), x)
    (exact_grad,) = torch.autograd.grad((exact * weights).sum(), wide)
    assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert grad.dtype == dtype
    assert relative_error(y.detach(), exact.detach()) < (1e-14 if dtype == torch.float64 else 1e-6)
    assert relative_error(grad, exact_grad) < {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 1e-6)


def test_zeros_stay_zeros():
    assert torch.equal(widened(torch.zeros(1, 2, 1, 5), True), torch.zeros(1, 2, 1, 5))


def test_the_operator_is_what_pytorch_expects_of_one():
    x = torch.randn(2, 3, 2, 9).bfloat16().requires_grad_()
    torch.library.opcheck(torch.ops.osdn.cpu_normalize, (x, True, 1e-6))
