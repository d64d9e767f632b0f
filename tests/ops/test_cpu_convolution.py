"""The compiled short convolution against PyTorch's `conv1d` in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from osdn.ops.cpu.convolution import convolution_step, short_convolution
from tests.ops.problems import relative_error

F64 = torch.float64


def truth(x, weight, bias, tail, lengths, silu):
    """Each sequence alone; `x` is [B, T, D], or [1, T, D] with the lengths of packed sequences."""
    rows = x.unbind(0) if lengths is None else x[0].split(lengths)
    outs = []
    for n, row in enumerate(rows):
        if not len(row):
            continue
        before = row.new_zeros(weight.shape[1] - 1, row.shape[1]) if tail is None else tail[n]
        y = F.conv1d(torch.cat([before, row]).t()[None], weight[:, None], bias, groups=len(weight))
        outs.append(y[0].t())
    y = torch.stack(outs) if lengths is None else torch.cat(outs)[None]
    return F.silu(y) if silu else y


def problem(B, T, D, W, lengths, bias, tail, dtype, layout, seed=0):
    g = torch.Generator().manual_seed(seed)
    N = B if lengths is None else len(lengths)
    x = torch.randn(B, T, D, generator=g, dtype=F64)
    weight, b = torch.randn(D, W, generator=g, dtype=F64), torch.randn(D, generator=g, dtype=F64)
    before = torch.randn(N, W - 1, D, generator=g, dtype=F64)
    x, weight, b, before = (y.to(dtype) for y in (x, weight, b, before))
    if layout == "tokens":
        x = x.mT.contiguous().mT
    elif layout == "slices":
        x = torch.stack([x, x], -1)[..., 0]
    return x, weight, b if bias else None, before if tail else None


def gradients(function, inputs, weights):
    inputs = [None if y is None else y.detach().requires_grad_() for y in inputs]
    y = function(*inputs)
    leaves = [x for x in inputs if x is not None]
    return [y.detach(), *torch.autograd.grad((y * weights.to(y.dtype)).sum(), leaves)]


def agree(B, T, D, W, lengths, bias, tail, silu, dtype, layout):
    inputs = problem(B, T, D, W, lengths, bias, tail, dtype, layout)
    cuts = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    weights = torch.randn(B, T, D, dtype=F64, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = gradients(
        lambda x, w, b, t: short_convolution(x, w, b, tail=t, cu_seqlens=cuts, silu=silu), inputs, weights
    )
    wide = [None if y is None else y.double() for y in inputs]
    expected = gradients(lambda *a: truth(*a, lengths, silu), wide, weights.double())
    bound = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for got, exact in zip(ours, expected, strict=True):
        assert got.dtype == dtype
        assert got.shape == exact.shape
        assert relative_error(got, exact) < bound


@pytest.mark.parametrize("layout", ["channels", "tokens", "slices"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_those_of_conv1d(dtype, layout):
    agree(2, 150, 131, 4, None, True, True, True, dtype, layout)
    agree(1, 2060, 64, 4, None, False, False, True, dtype, layout)  # more than one segment
    agree(1, 40, 70, 4, [3, 0, 36, 1], False, True, True, dtype, layout)


@given(
    B=st.integers(1, 3),
    lengths=st.none() | st.lists(st.integers(0, 80), min_size=1, max_size=4).filter(any),
    T=st.integers(1, 140),
    D=st.integers(1, 140),
    W=st.integers(1, 6),
    bias=st.booleans(),
    tail=st.booleans(),
    silu=st.booleans(),
    layout=st.sampled_from(["channels", "tokens", "slices"]),
)
def test_any_shape(B, lengths, T, D, W, bias, tail, silu, layout):
    if lengths is not None:
        B, T = 1, sum(lengths)
    agree(B, T, D, W, lengths, bias, tail, silu, torch.float32, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extra", [0, 1])
def test_steps_continue_a_sequence(dtype, extra):
    x, weight, bias, _ = problem(2, 9, 70, 4, None, True, False, dtype, "channels")
    state = torch.zeros(2, 70, 4 + extra, dtype=dtype)
    steps = [convolution_step(x[:, t, :, None], state, weight, bias, True) for t in range(9)]
    exact = truth(x.double(), weight.double(), bias.double(), None, None, True)
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 1e-6)
    assert relative_error(torch.cat(steps, 2).mT, exact) < bound
    assert torch.equal(state, x.mT[..., -4 - extra :])


def test_bfloat16_is_rounded_once():
    x, weight, *_ = problem(1, 70, 64, 4, None, False, False, torch.bfloat16, "channels")
    x[0, 5, 3], x[0, 20, 4], x[0, 40, 5] = torch.nan, torch.inf, 3e38
    exact = truth(x.float(), weight.float(), None, None, None, False)
    assert torch.equal(short_convolution(x, weight, silu=False).nan_to_num(7), exact.bfloat16().nan_to_num(7))


def test_the_operator_is_what_pytorch_expects_of_one():
    x, weight, bias, tail = problem(1, 20, 9, 4, [12, 8], True, True, torch.float32, "tokens")
    taps = weight.t().contiguous()
    arguments = [y.requires_grad_() for y in (x, taps, bias, tail)]
    cuts = torch.tensor([0, 12, 20])
    torch.library.opcheck(torch.ops.osdn.cpu_short_convolution, (*arguments, cuts, True))
    torch.library.opcheck(torch.ops.osdn.cpu_short_convolution, (*arguments[:2], None, None, None, False))


def test_it_compiles_into_one_graph():
    x, weight, *_ = problem(2, 12, 9, 4, None, False, False, torch.float32, "tokens")
    weight.requires_grad_()
    expected = torch.autograd.grad(short_convolution(x, weight).square().sum(), weight)
    compiled = torch.compile(short_convolution, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, weight).square().sum(), weight), expected)


def test_the_result_does_not_depend_on_the_number_of_threads():
    x, weight, bias, _ = problem(2, 1500, 200, 4, None, True, False, torch.float32, "tokens")
    results, threads = [], torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(gradients(short_convolution, (x, weight, bias), torch.ones_like(x)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3)}, "x is torch.float32, .2, 3., on cpu; it must be .B, T, D. on a CPU"),
        ({"x": torch.zeros(1, 3, 4, dtype=torch.int32)}, "x is torch.int32"),
        ({"weight": torch.zeros(5, 4)}, "weight has shape .5, 4.; it must be .D, W. with D = 4, W >= 1"),
        ({"weight": torch.zeros(4, 0)}, "W >= 1"),
        ({"bias": torch.zeros(3)}, "bias has shape .3."),
        ({"tail": torch.zeros(1, 4, 4)}, "tail has shape .1, 4, 4.; it must be .N, W - 1, D. = .1, 3, 4."),
        (
            {"cu_seqlens": torch.tensor([0, 2])},
            "cu_seqlens ends at 2; it must end at .*, 3",
        ),
        ({"cu_seqlens": torch.tensor([0, 4, 3])}, "cu_seqlens decreases from 4 to 3"),
    ],
)
def test_bad_arguments_are_told(change, message):
    arguments = {"x": torch.zeros(1, 3, 4), "weight": torch.zeros(4, 4)} | change
    with pytest.raises(ValueError, match=message):
        short_convolution(**arguments)
