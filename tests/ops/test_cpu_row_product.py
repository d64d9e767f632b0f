"""The product of a few rows with a matrix against float64."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F

from osdn.ops import available_backends
from osdn.ops.cpu.row_product import MOST_ROWS, Product, row_product, row_products, usable
from tests.ops.problems import relative_error, threads

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="no C++ compiler here")
# Rounding the result, and summing in float32.
BOUNDS = {torch.float32: 5e-7, torch.float64: 1e-14, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
every_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def problem(shape, N, K, bias, dtype):
    random = torch.Generator().manual_seed(N * K)
    x, weight, b = (torch.randn(s, generator=random).to(dtype) for s in ((*shape, K), (N, K), (N,)))
    return x, weight, b if bias else None


def agree(x, weight, bias):
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = row_product(x, weight, bias)
    assert got.dtype == x.dtype
    assert relative_error(got, exact) < BOUNDS[x.dtype]


@every_dtype
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
def test_every_number_of_rows(rows, dtype):
    with threads(2):
        agree(*problem((rows,), 519, 1093, True, dtype))  # enough work for both threads


@every_dtype
@settings(max_examples=30)
@given(
    shape=st.sampled_from([(), (1,), (2, 1), (1, 1, 3), (4,)]),
    N=st.integers(1, 70),
    K=st.integers(1, 140),
    bias=st.booleans(),
)
def test_any_shape(shape, N, K, bias, dtype):
    agree(*problem(shape, N, K, bias, dtype))


def test_weights_and_inputs_may_lie_anywhere():
    x, weight, _ = problem((3,), 20, 48, False, torch.bfloat16)
    agree(torch.stack([x, x], -1)[..., 0], weight.t().contiguous().t(), None)
    pieces = torch.zeros(48 * 20 + 1, dtype=torch.bfloat16)
    odd = pieces[1:].view(20, 48).copy_(weight)  # two bytes off
    agree(x, odd, None)


@every_dtype
def test_infinities_and_nans_stay_in_their_places(dtype):
    x, weight, _ = problem((2,), 40, 37, False, dtype)
    weight[3, 5], weight[7, 36], x[1, 0] = torch.nan, torch.inf, torch.nan
    got = row_product(x, weight)
    assert got[1].isnan().all()
    assert got[0].isnan().nonzero().flatten().tolist() == [3]
    assert got[0].isinf().nonzero().flatten().tolist() == [7]


def test_no_rows_give_nothing():
    assert row_product(torch.zeros(0, 5), torch.zeros(3, 5)).shape == (0, 3)


def test_usable_says_where_the_kernel_serves():
    x, weight, _ = problem((2,), 4, 5, False, torch.bfloat16)
    assert usable(x, weight)
    assert not usable(x, weight.float())
    assert not usable(x, weight.t().contiguous().t())
    assert not usable(torch.randn(MOST_ROWS + 1, 5).bfloat16(), weight)
    weight.requires_grad_()
    assert not usable(x, weight)
    with torch.no_grad():
        assert usable(x, weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(5, 5)}, "x has 5 rows"),
        ({"x": torch.zeros(1, 4)}, "do not fit"),
        ({"weight": torch.zeros(3, 5).bfloat16()}, "must share one dtype"),
        ({"weight": torch.zeros(5)}, "do not fit"),
        ({"bias": torch.zeros(4)}, r"bias has shape \[4\]"),
        (
            {"x": torch.zeros(1, 5, dtype=torch.int32), "weight": torch.zeros(3, 5, dtype=torch.int32)},
            "int32",
        ),
    ],
)
def test_bad_input_is_refused(changes, message):
    arguments = {"x": torch.zeros(1, 5), "weight": torch.zeros(3, 5), "bias": None, **changes}
    with pytest.raises(ValueError, match=message):
        row_product(**arguments)


def test_the_operator_is_what_pytorch_expects_of_one():
    x, weight, bias = problem((2, 1), 20, 48, True, torch.bfloat16)
    torch.library.opcheck(torch.ops.osdn.cpu_row_product, (x, weight, bias))
    graph = torch.compile(row_product, fullgraph=True, backend="aot_eager")
    assert torch.equal(graph(x, weight, bias), row_product(x, weight, bias))


@every_dtype
def test_several_products_in_one_call_are_each_alone(dtype):
    shapes = [((3,), 519, 1093), ((3,), 7, 1093), ((3,), 260, 64), ((3,), 1, 5)]
    products = [Product(*problem(*shape, i % 2 == 0, dtype)) for i, shape in enumerate(shapes)]
    products.insert(1, Product(products[0].x, problem((3,), 40, 1093, True, dtype)[1]))  # shares its input
    with threads(2):
        together = row_products(products)
    for product, got in zip(products, together):
        assert torch.equal(got, row_product(*product[:3]))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("K", [32, 96, 1056])
def test_small_weights_stand_for_what_they_say(rows, dtype, K):
    random = torch.Generator().manual_seed(K)
    N, groups = 70, K // 32
    x = torch.randn(rows, K, generator=random).to(dtype)
    bias = torch.randn(N, generator=random).to(dtype)
    codes = torch.randint(-128, 128, (N, K), generator=random, dtype=torch.int8)
    scales = torch.rand(N, generator=random)
    eight = Product(x, codes, bias, scales)
    nibbles = torch.randint(0, 16, (N, groups, 32), generator=random, dtype=torch.uint8)
    packed = (nibbles[..., :16] | nibbles[..., 16:] << 4).flatten(1)
    scale, zero = (torch.randn(N, groups, generator=random).bfloat16() for _ in range(2))
    four = Product(x, packed, bias, scale, zero)
    with threads(2):
        got = row_products([eight, four])
    weights = (
        codes.double() * scales.double()[:, None],
        (nibbles.double() * scale.double()[..., None] + zero.double()[..., None]).flatten(1),
    )
    for y, weight in zip(got, weights):
        assert y.dtype == dtype
        exact = F.linear(x.double(), weight, bias.double())
        assert relative_error(y, exact) < 2 * BOUNDS[dtype] + 1e-6
