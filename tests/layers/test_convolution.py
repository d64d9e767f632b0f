"""The short convolution against PyTorch's grouped `conv1d`."""

import pytest
import torch
from torch.nn import functional as F

from osdn.layers.convolution import ShortConvolution


def conv1d(x, weight):
    width = weight.shape[2]
    return F.silu(
        F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), weight, groups=x.shape[2]).transpose(1, 2)
    )


def make(channels=5, width=4, dtype=torch.float64):
    torch.manual_seed(0)
    return ShortConvolution(channels, width).to(dtype)


def test_a_neighbours_nan_stays_out_of_a_short_sequences_tail():
    x = torch.randn(1, 6, 5)
    x[0, :5] = torch.nan
    with torch.no_grad():
        _, tail = make(dtype=torch.float32)(x, None, torch.tensor([0, 5, 6]), output_final_state=True)
    assert torch.equal(tail[1], torch.cat([torch.zeros(2, 5), x[0, 5:]]))


@pytest.mark.parametrize("T", [1, 2, 3, 4, 17])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_conv1d(T, width):
    conv = make(width=width)
    x = torch.randn(3, T, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, T, 5, dtype=torch.float64)
    ours = torch.autograd.grad((conv(x)[0] * weights).sum(), (x, conv.weight))
    expected = torch.autograd.grad((conv1d(x, conv.weight) * weights).sum(), (x, conv.weight))
    torch.testing.assert_close(conv(x)[0], conv1d(x, conv.weight))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("lengths", [(5, 6), (1, 1, 1, 8), (2, 9), (11,), (0, 11)])
def test_pieces_and_their_gradients_are_the_whole(lengths):
    conv = make()
    x = torch.randn(2, 11, 5, dtype=torch.float64, requires_grad=True)
    tail, pieces = None, []
    for piece in x.split(lengths, 1):
        y, tail = conv(piece, tail, output_final_state=True)
        pieces.append(y)
    y = torch.cat(pieces, 1)
    torch.testing.assert_close(y, conv1d(x, conv.weight))
    torch.testing.assert_close(tail, x[:, -3:])
    expected = torch.autograd.grad(conv1d(x, conv.weight).square().sum(), (x, conv.weight))
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), (x, conv.weight)), expected)


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("lengths", [(3, 1, 0, 7), (0, 4), (2, 2, 2), (9,)])
def test_packed_sequences_are_each_alone(lengths, continued):
    conv = make()
    x = torch.randn(1, sum(lengths), 5, dtype=torch.float64, requires_grad=True)
    tails = torch.randn(len(lengths), 3, 5, dtype=torch.float64, requires_grad=True) if continued else None
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    y, last = conv(x, tails, cu_seqlens, output_final_state=True)
    alone = [
        conv(piece, tails[n : n + 1] if continued else None, output_final_state=True)
        for n, piece in enumerate(x.split(lengths, 1))
    ]
    torch.testing.assert_close(y, torch.cat([a for a, _ in alone], 1))
    torch.testing.assert_close(last, torch.cat([tail for _, tail in alone]))
    inputs = (x, tails) if continued else (x,)
    expected = torch.autograd.grad(sum(a.square().sum() + tail.sum() for a, tail in alone), inputs)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum() + last.sum(), inputs), expected)


def test_half_precision_rounds_only_inputs_and_outputs():
    conv = make(channels=64, dtype=torch.bfloat16)
    x = torch.randn(2, 33, 64, dtype=torch.bfloat16)
    exact = conv1d(x.double(), conv.weight.double())
    assert conv(x)[0].dtype == torch.bfloat16
    torch.testing.assert_close(conv(x)[0].double(), exact, rtol=2**-8, atol=1e-6)
    step, _ = conv(x[:, -1:], x[:, -4:-1], output_final_state=True)
    torch.testing.assert_close(step.double(), exact[:, -1:], rtol=2**-8, atol=1e-6)
