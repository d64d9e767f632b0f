"""The fast forms against the step functions: outputs, states and every gradient."""

import pytest
import torch

from osdn.layers.updates import efla_step
from osdn.zoo import RECURRENCES, RecurrentMixer
from tests.zoo.conftest import make_case

FAST = [name for name, row in RECURRENCES.items() if row.fast is not None]
fast_rows = pytest.mark.parametrize("name", FAST)


def error(x, truth):
    return ((x.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def scan_and_differentiate(case, stepwise, start=None):
    """Outputs, last state, and gradients with respect to every leaf and the initial state."""
    o, state = case.recurrence.scan(case.inputs, case.weights, start, stepwise)
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in (o, *state.values())]
    total = sum((x * probe).sum() for x, probe in zip((o, *state.values()), probes))
    leaves = [*case.leaves.values(), *(start or {}).values()]
    return o, state, torch.autograd.grad(total, leaves)


def random_state(case, batch, sizes, seed=3):
    state = case.recurrence.initial_state(*batch, **sizes, like=torch.empty(0, dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    noise = {x: 0.2 * torch.randn(a.shape, dtype=a.dtype, generator=generator) for x, a in state.items()}
    return {x: (a + noise[x]).requires_grad_() for x, a in state.items()}


def test_the_rivals_have_fast_forms():
    assert {"longhorn", "efla", "kaczmarz", "gdn2", "comba", "delta_product", "osdn", "kda"} <= set(FAST)
    assert RECURRENCES["mesa_net"].fast is None


@fast_rows
@pytest.mark.parametrize(("T", "batch"), [(11, (2, 3)), (70, (1, 2)), (1, (3,)), (5, ())])
def test_a_fast_form_matches_the_step_function_in_float64(name, T, batch):
    sizes = {"K": 5, "V": 3, "M": 4}
    case = make_case(name, T=T, batch=batch or (1,), **sizes)
    if not batch:
        case.leaves = {x: a.detach()[0].requires_grad_() for x, a in case.leaves.items()}
    start = random_state(case, batch, sizes)
    o, state, gradients = scan_and_differentiate(case, False, start)
    wanted_o, wanted_state, wanted = scan_and_differentiate(case, True, start)
    assert o.shape == wanted_o.shape
    torch.testing.assert_close(o, wanted_o, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, wanted_state, rtol=1e-9, atol=1e-10)
    for label, a, b in zip([*case.leaves, *start], gradients, wanted):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8, msg=lambda m, label=label: f"{label}: {m}")


@fast_rows
def test_a_fast_form_in_float32_is_close_to_the_step_function_in_float64(name):
    case = make_case(name, T=67, K=8, V=7, batch=(2, 2))
    wanted_o, wanted_state, wanted = scan_and_differentiate(case, True)
    case.leaves = {x: a.detach().float().requires_grad_() for x, a in case.leaves.items()}
    o, state, gradients = scan_and_differentiate(case, False)
    assert o.dtype == torch.float32
    assert error(o, wanted_o) < 1e-5
    assert all(error(state[x], wanted_state[x]) < 1e-5 for x in state)
    for label, a, b in zip(case.leaves, gradients, wanted):
        assert error(a, b) < 1e-4, label


@fast_rows
def test_a_fast_scan_can_be_split_anywhere(name):
    case = make_case(name)
    whole, last = case.recurrence.scan(case.inputs, case.weights)
    pieces, state = [], None
    for cut in (slice(0, 4), slice(4, 4), slice(4, 5), slice(5, None)):
        piece = {x: a[..., cut, :] for x, a in case.inputs.items()}
        o, state = case.recurrence.scan(piece, case.weights, state)
        pieces.append(o)
    torch.testing.assert_close(torch.cat(pieces, -2), whole, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, last, rtol=1e-9, atol=1e-10)


def test_comba_reads_the_state_before_even_the_strongest_decay():
    """A decay of exp(-200) all but erases the state, but Comba reads it before the decay."""
    case = make_case("comba", T=9, batch=(1, 1))
    inputs = {x: a.detach().float() for x, a in case.inputs.items()}
    inputs["alpha"] = torch.exp(torch.linspace(-200, -0.1, 9))[None, None, :, None]
    weights = {x: a.detach().float() for x, a in case.weights.items()}
    o, state = case.recurrence.scan(inputs, weights)
    exact = [{x: a.double() for x, a in given.items()} for given in (inputs, weights)]
    wanted_o, wanted_state = case.recurrence.scan(*exact, stepwise=True)
    assert error(o, wanted_o) < 1e-5
    assert error(state["S"], wanted_state["S"]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eflas_step_is_exact_for_short_and_long_keys(dtype):
    """(1 - exp(-x)) / x and its derivative, including where plain subtraction would cancel."""
    n = torch.tensor([0.0, 1e-12, 1e-6, 1e-3, 0.0099, 0.0101, 0.3, 5.0, 80.0], dtype=dtype)
    beta = torch.full_like(n, 0.7).requires_grad_()
    x = 0.7 * n.double()
    derivative = torch.exp(-x)  # of (1 - exp(-beta n)) / n with respect to beta
    value = torch.where(n > 0, -torch.expm1(-x) / n.double().clamp_min(1e-300), 0.7)
    found = efla_step(beta, n)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found.double(), value, rtol=tolerance, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), beta)
    torch.testing.assert_close(gradient.double(), derivative, rtol=30 * tolerance, atol=1e-9)


def test_the_mixer_uses_the_fast_form_unless_stepwise(monkeypatch):
    torch.manual_seed(0)
    fast = RecurrentMixer("comba", 12, num_heads=3)
    slow = RecurrentMixer("comba", 12, num_heads=3, stepwise=True)
    slow.load_state_dict(fast.state_dict())
    x, steps = torch.randn(2, 9, 12), []
    row = type(fast.recurrence)
    original = row.step
    monkeypatch.setattr(row, "step", lambda *args: steps.append(1) or original(*args))
    y = fast(x)
    assert not steps
    torch.testing.assert_close(slow(x), y, rtol=1e-4, atol=1e-5)
    assert len(steps) == 9
