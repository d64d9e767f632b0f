"""Kernels that read and write 16 bits give what float32 kernels between two conversions give, bit for bit."""

import pytest
import torch
from hypothesis import given, settings

from osdn.ops import available_backends, delta_rule, online_scaled_delta_rule, precondition_keys
from tests.ops.problems import OPERATORS, OUTPUTS, Config, make, relative_error, threads
from tests.ops.test_agreement import BOXES, TAME, configs

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="no C++ compiler here")
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
HALVES = ("q", "k", "v", "write_keys")  # what a layer hands over in 16 bits, and the outputs
RESULTS = ("o", "write_keys")


def run(operator, problem, dtype, wide=None, backend="cpu", call=None):
    """Outputs and gradients by name, of tensors rounded to `dtype` and computed with in `wide`."""
    tensors, options = problem.arguments(operator)
    rounded = {name: x.to(dtype) if name in HALVES else x for name, x in tensors.items()}
    leaves = {name: x.to(wide or x.dtype).detach().requires_grad_() for name, x in rounded.items()}
    with threads(2):
        outputs = dict(zip(OUTPUTS[operator], (call or operator)(**leaves, **options, backend=backend)))
    random = torch.Generator().manual_seed(1)
    grads = {
        name: torch.randn(x.shape, generator=random).to(dtype if name in RESULTS else x.dtype).to(x.dtype)
        for name, x in outputs.items()
    }
    input_grads = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), list(grads.values()), materialize_grads=True
    )
    return {name: x.detach() for name, x in outputs.items()} | dict(
        zip((f"grad_{name}" for name in leaves), input_grads)
    )


def same(got, want):
    return torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@every_operator
@every_dtype
@settings(max_examples=12)
@given(config=configs(TAME, [*BOXES, None], longest=150))
def test_answers_are_those_of_float32_rounded_once(operator, dtype, config):
    problem = make(config)
    half, single = run(operator, problem, dtype), run(operator, problem, dtype, torch.float32)
    for name, x in half.items():
        expected = dtype if name.removeprefix("grad_") in (*HALVES, *RESULTS) else torch.float32
        assert x.dtype == expected, name
        assert same(x, single[name].to(expected)), name


@every_operator
@every_dtype
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_the_error_is_that_of_rounding_the_results(operator, dtype, decay):
    problem = make(Config((70, 1, 67), packed=True, K=40, V=24, decay=decay, retention="head", eta=0.1))
    half, exact = run(operator, problem, dtype), run(operator, problem, dtype, torch.float64, "reference")
    for name, x in half.items():
        rounding = relative_error(exact[name].to(x.dtype), exact[name])
        assert relative_error(x, exact[name]) < 1.01 * rounding + 1e-5, name


@every_dtype
def test_every_number_of_16_bits_is_read_and_written_as_torch_does(dtype):
    """A write key is a scale times a key: with one channel per number, in sequences of their own."""
    k = torch.arange(2**16).to(torch.int32).sub(2**15).to(torch.int16).view(dtype).view(256, 1, 1, 256)
    ones = torch.ones(256, 1, 256)
    ties = ones + torch.finfo(dtype).eps / 2  # products that lie in the middle of two numbers
    for scale in (ones, ties, torch.randn(256, 1, 256).mul(8).exp()):
        w, _ = precondition_keys(k, torch.zeros(256, 1, 1), initial_scale=scale, backend="cpu")
        want = (scale[:, None] * k.float()).to(dtype)
        assert torch.equal(w.isnan(), want.isnan())
        assert same(w, want)


def test_write_keys_may_be_wider_or_narrower_than_keys():
    tensors, options = make(Config((70,), K=9, V=7, group=2)).arguments(delta_rule)
    for narrow in ("keys", "write_keys"):
        mixed = {
            name: x.bfloat16() if (name == "write_keys") == (narrow == "write_keys") and name in HALVES else x
            for name, x in tensors.items()
        }
        leaves = {name: x.detach().requires_grad_() for name, x in mixed.items()}
        o, state = delta_rule(**leaves, **options, backend="cpu")
        want, exact_state = delta_rule(**{n: x.float() for n, x in mixed.items()}, **options, backend="cpu")
        assert same(o, want.to(o.dtype))
        assert torch.equal(state, exact_state)
        grads = torch.autograd.grad(o.float().sum(), list(leaves.values()))
        assert [g.dtype for g in grads] == [x.dtype for x in leaves.values()]


@every_dtype
def test_nothing_of_16_bits_is_kept_in_32(dtype):
    """What a backward needs of its inputs are the inputs themselves."""
    tensors, options = make(Config((70,), K=16, V=16, decay="head")).arguments(delta_rule)
    leaves = {
        name: (x.to(dtype) if name in HALVES else x).detach().requires_grad_() for name, x in tensors.items()
    }
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        delta_rule(**leaves, **options, backend="cpu")
    places = {x.data_ptr(): x.dtype for x in saved}
    for name in HALVES:
        assert places[leaves[name].data_ptr()] == dtype


@pytest.mark.parametrize("operator", [precondition_keys, online_scaled_delta_rule], ids=lambda f: f.__name__)
def test_a_traced_call_has_the_dtypes_of_a_real_one(operator):
    problem = make(Config((66,), group=2, decay="head"))
    graph = torch.compile(operator, fullgraph=True, backend="aot_eager")
    traced = run(operator, problem, torch.bfloat16, call=graph)
    for name, x in run(operator, problem, torch.bfloat16).items():
        assert traced[name].dtype == x.dtype
        assert same(traced[name], x)
