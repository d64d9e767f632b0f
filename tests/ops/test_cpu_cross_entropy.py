"""The compiled cross-entropy against PyTorch's in float64."""

import pytest
import torch
from torch.nn import functional as F

from osdn.ops.cpu.cross_entropy import cross_entropies
from tests.ops.problems import relative_error

IGNORED = -100


def expected(logits, labels):
    logits = logits.detach().double().clone().requires_grad_()
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [1, 2, 7, 8, 61, 3072])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_losses_and_gradients_are_those_of_float64(dtype, classes, spread):
    g = torch.Generator().manual_seed(classes)
    logits = (spread * torch.randn(13, classes, generator=g, dtype=torch.float64)).to(dtype)
    labels = torch.randint(classes, (13,), generator=g)
    labels[::4] = IGNORED
    losses, grad = expected(logits, labels)
    kept = logits.clone()
    ours = cross_entropies(logits, labels, IGNORED, overwrite=False)
    assert torch.equal(logits, kept)
    assert torch.equal(ours, cross_entropies(logits, labels, IGNORED, overwrite=True))
    wide, rounding = (torch.float64, 1e-14) if dtype == torch.float64 else (torch.float32, 1e-6)
    assert ours.dtype == wide
    assert (ours - losses).abs().max() <= rounding * (1 + spread)
    limit = rounding if dtype == wide else torch.finfo(dtype).eps
    assert relative_error(logits, grad) < limit if grad.any() else not logits.any()
    assert not logits[::4].any()


def test_extreme_logits():
    logits = torch.tensor([[1e30, -1e30, 0.0], [-torch.inf, 0.0, -torch.inf], [-1e4, -1e4, -1e4]])
    labels = torch.tensor([0, 1, 2])
    losses, grad = expected(logits, labels)
    torch.testing.assert_close(
        cross_entropies(logits, labels, IGNORED, overwrite=True), losses, check_dtype=False
    )
    torch.testing.assert_close(logits, grad, check_dtype=False)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 5, 16])
def test_what_is_not_finite_is_not_hidden(bad, place):
    logits = torch.zeros(2, 17)
    logits[0, place] = bad
    losses = cross_entropies(logits, torch.tensor([5, 5]), IGNORED, overwrite=True)
    assert losses.isnan().tolist() == [True, False]
    assert logits[0].isnan().any()
    assert logits[1].isfinite().all()


@pytest.mark.parametrize("label", [-1, 7, 2**40])
def test_labels_beyond_the_classes_are_rejected(label):
    logits, labels = torch.zeros(3, 7), torch.tensor([0, label, IGNORED])
    with pytest.raises(IndexError, match="neither -100 nor between 0 and 6"):
        cross_entropies(logits, labels, IGNORED, overwrite=True)
    assert not logits.any()


def test_no_rows():
    assert cross_entropies(torch.zeros(0, 7), torch.zeros(0).long(), IGNORED, overwrite=True).shape == (0,)
