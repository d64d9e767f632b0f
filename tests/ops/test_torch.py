"""The operators inside PyTorch: dtypes, strides, compilation, autocast, checkpointing, second derivatives."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from osdn.ops import (
    available_backends,
    newton_delta_rule,
    online_scaled_delta_rule,
    pgdn_delta_rule,
    precondition_keys,
)
from tests.ops.problems import BOTH, OPERATORS, Config, answer, gradients, make, relative_error, weighted_sum

every_backend = pytest.mark.parametrize("backend", available_backends())
every_decay = pytest.mark.parametrize("decay", ["none", "head", "channel"])
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)
# The paper's rule and the others: with a diagonal covariance, and with blocks.
every_rule = pytest.mark.parametrize(
    ("operator", "block"),
    [
        (online_scaled_delta_rule, 1),
        (newton_delta_rule, 1),
        (newton_delta_rule, 3),
        (pgdn_delta_rule, 1),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
compiled = pytest.mark.skipif("cpu" not in available_backends(), reason="no C++ compiler here")


def problem(decay="head", **changes):
    sizes = {"H": 2, "group": 2, "K": 9, "V": 7, "retention": "channel", "eta": 0.2}
    return make(Config((70, 70), decay=decay, initial_state=True, initial_scale="each", **sizes | changes))


def fresh(tensors):
    return {name: x.clone().requires_grad_() for name, x in tensors.items()}


@every_backend
@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_single_precision(backend, operator, block, dtype):
    p = problem(block=block)
    p.tensors = {name: x.to(dtype).float() for name, x in p.tensors.items()}  # the numbers half precision has
    half = answer(operator, p, backend, dtype)
    single = answer(operator, p, backend, torch.float32)
    assert half["o"].dtype == dtype
    assert torch.equal(half["o"], single["o"].to(dtype))
    for name in ("final_state", f"final_{BOTH[operator]}"):
        assert half[name].dtype == torch.float32
        assert torch.equal(half[name], single[name])
    for name in single:
        if name.startswith("grad_"):
            assert half[name].dtype == dtype
            assert relative_error(half[name], single[name]) < torch.finfo(dtype).eps


@every_backend
@every_rule
def test_gates_may_be_single_precision_where_keys_are_half(backend, operator, block):
    """A layer under autocast hands over bfloat16 keys and values but float32 gates and states."""
    t, options = problem(block=block).arguments(operator)
    half = {name: x.bfloat16() if name in ("q", "k", "v") else x for name, x in t.items()}
    got = operator(**half, **options, backend=backend)
    want = operator(**{name: x.float() for name, x in half.items()}, **options, backend=backend)
    assert got[0].dtype == torch.bfloat16
    assert torch.equal(got[0], want[0].bfloat16())
    assert torch.equal(got[1], want[1])


@every_backend
def test_write_keys_come_in_the_dtype_of_the_keys(backend):
    t, options = problem().arguments(precondition_keys)
    write_keys, scale = precondition_keys(**t | {"k": t["k"].bfloat16()}, **options, backend=backend)
    assert (write_keys.dtype, scale.dtype) == (torch.bfloat16, torch.float32)
    assert precondition_keys(t["k"].double(), t["beta"].double(), backend=backend)[1].dtype == torch.float64


def transposed(x):  # as a layer has them that keeps heads before tokens
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 2 else x


def sliced(x):  # as cut out of one wide projection
    return torch.stack([x, x + 1, x - 1], -1)[..., 0]


def reversed_in_memory(x):
    return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))


def negated_lazily(x):  # as the imaginary part of a conjugate is
    return torch._neg_view(-x)


@every_backend
@every_rule
@every_decay
@pytest.mark.parametrize("view", [transposed, sliced, reversed_in_memory, negated_lazily])
def test_how_a_tensor_lies_in_memory_does_not_matter(backend, operator, block, decay, view):
    t, options = problem(decay, block=block).arguments(operator)
    results = []
    for arrange in (lambda x: x, view):
        leaves = fresh(t)
        outputs = operator(**{n: arrange(x) for n, x in leaves.items()}, **options, backend=backend)
        results.append({**dict(enumerate(outputs)), **gradients(weighted_sum(outputs), leaves)})
    for name, want in results[0].items():
        torch.testing.assert_close(results[1][name], want)


@every_backend
def test_expanded_inputs_get_summed_gradients(backend):
    """Tensors with a stride of zero: one gate for all heads, one initial scale for all sequences."""
    t, options = problem().arguments(online_scaled_delta_rule)
    shared = {
        "beta": t["beta"][..., :1],
        "log_decay": t["log_decay"][:1, :1],
        "initial_scale": t["initial_scale"][0],
    }
    results = []
    for copy in (False, True):
        leaves = fresh(t | shared)
        wide = {name: leaves[name].expand(t[name].shape) for name in shared}
        wide = {name: x.contiguous() if copy else x for name, x in wide.items()}
        outputs = online_scaled_delta_rule(**leaves | wide, **options, backend=backend)
        results.append(gradients(weighted_sum(outputs), leaves))
    for name, want in results[1].items():
        torch.testing.assert_close(results[0][name], want)


@every_backend
@every_rule
@pytest.mark.parametrize("used", [0, 1, 2], ids=["o", "final_state", "carried"])
def test_one_output_alone_can_be_differentiated(backend, operator, block, used):
    """Its gradient is one number expanded, and the other outputs have none."""
    t, options = problem(block=block).arguments(operator)
    leaves = fresh(t)
    alone = gradients(operator(**leaves, **options, backend=backend)[used].sum(), leaves)
    outputs = operator(**leaves, **options, backend=backend)
    weights = [torch.full_like(x, float(i == used)) for i, x in enumerate(outputs)]
    among_all = torch.stack([(x * weight).sum() for x, weight in zip(outputs, weights)]).sum()
    for name, want in gradients(among_all, leaves).items():
        torch.testing.assert_close(alone[name], want)


@every_backend
@every_rule
@pytest.mark.parametrize("packed", [False, True])
def test_a_state_that_overflows_does_not_reach_the_gradients_of_the_scale(backend, operator, block, packed):
    """Phase 1 knows nothing of the state, so neither does a loss on the final scale, whatever the rule."""
    sizes = {"group": 2, "K": 9, "V": 7, "block": block}
    p = make(Config((70, 70), packed=packed, retention="channel", initial_scale="each", **sizes))
    t, options = p.arguments(operator)
    grads = []
    for size in (1.0, 1e38):  # of the values, whose sums overflow
        leaves = fresh(t | {"v": t["v"] * size})
        o, _, scale = operator(**leaves, **options, backend=backend)
        grads.append(gradients(weighted_sum([scale]), leaves))
    assert not o.isfinite().all()
    for name, want in grads[0].items():
        assert torch.equal(grads[1][name], want), name


@every_backend
def test_write_keys_that_overflow_do_not_reach_the_gradients_of_the_gram_diagonal(backend):
    """They are made of its logarithm, of which its own step knows nothing."""
    t, options = problem().arguments(pgdn_delta_rule)
    results = []
    for first in (1.0, torch.inf):
        leaves = fresh(t | {"initial_gram": torch.full_like(t["initial_gram"], first)})
        o, _, gram = pgdn_delta_rule(**leaves, **options, backend=backend)
        grads = gradients(gram.sum(), leaves)
        results.append({name: grads[name] for name in ("grad_k", "grad_gain", "grad_center", "grad_v")})
    assert not o.isfinite().all()
    for name, want in results[0].items():
        assert torch.equal(results[1][name], want), name


@every_backend
@every_rule
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_queries_do_not_reach_the_gradients_of_the_state(backend, operator, block, poison):
    t, options = problem(block=block).arguments(operator)
    grads = []
    for value in (0.0, poison):
        leaves = fresh(t | {"q": torch.full_like(t["q"], value)})
        _, state, scale = operator(**leaves, **options, backend=backend)
        grads.append(gradients(weighted_sum([state, scale]), leaves))
    for name, want in grads[0].items():
        assert torch.equal(grads[1][name], want), name
    assert grads[1]["grad_q"].eq(0).all()


@every_backend
@every_rule
def test_only_what_asks_for_a_gradient_gets_one(backend, operator, block):
    t, options = problem(block=block).arguments(operator)
    for name in t:
        leaf = t[name].clone().requires_grad_()
        outputs = operator(**t | {name: leaf}, **options, backend=backend)
        (alone,) = torch.autograd.grad(weighted_sum(outputs), leaf)
        leaves = fresh(t)
        outputs = operator(**leaves, **options, backend=backend)
        torch.testing.assert_close(alone, gradients(weighted_sum(outputs), leaves)[f"grad_{name}"])


@every_backend
@every_rule
def test_without_gradients_the_outputs_are_the_same(backend, operator, block):
    t, options = problem(block=block).arguments(operator)
    with_grad = operator(**fresh(t), **options, backend=backend)
    with torch.no_grad():
        without = operator(**fresh(t), **options, backend=backend)
    with torch.inference_mode():
        inference = operator(**t, **options, backend=backend)
    for a, b, c in zip(with_grad, without, inference):
        assert a.requires_grad
        assert not b.requires_grad
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@every_backend
@every_rule
@every_decay
def test_autocast_does_not_touch_the_recurrence(backend, operator, block, decay):
    t, options = problem(decay, block=block).arguments(operator)
    leaves = fresh(t)
    want = operator(**leaves, **options, backend=backend)
    want_grads = gradients(weighted_sum(want), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = operator(**leaves, **options, backend=backend)
    for a, b in zip(got, want):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    for name, grad in gradients(weighted_sum(got), leaves).items():
        torch.testing.assert_close(grad, want_grads[name])


@every_backend
@every_rule
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(backend, operator, block, use_reentrant):
    t, options = problem(block=block).arguments(operator)
    leaves, names = fresh(t), list(t)

    def run(*tensors):
        return operator(**dict(zip(names, tensors)), **options, backend=backend)

    want = gradients(weighted_sum(run(*leaves.values())), leaves)
    outputs = checkpoint(run, *leaves.values(), use_reentrant=use_reentrant)
    weighted_sum(outputs).backward()  # the reentrant kind knows only this
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, want[f"grad_{name}"])


@every_backend
@every_operator
def test_a_second_derivative_is_right_or_refused(backend, operator):
    config = Config((3,), H=1, K=2, V=2, decay="channel", eta=0.1, block=2, initial_state=True)
    tensors, options = make(config).arguments(operator)
    names, leaves = list(tensors), [x.double().requires_grad_() for x in tensors.values()]

    def outputs(*tensors):
        return operator(**dict(zip(names, tensors)), **options, backend=backend)

    if backend in ("reference", "chunkwise"):
        assert torch.autograd.gradgradcheck(outputs, leaves)
    else:
        grads = torch.autograd.grad(weighted_sum(outputs(*leaves)), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=r"twice|double backward|second"):
            weighted_sum(grads).backward()


def compiled_equals_eager(tensors, options, operator, compiler):
    def run(tensors):
        return operator(**tensors, **options, backend="cpu")

    torch.compiler.reset()
    fast = torch.compile(run, fullgraph=True, backend=compiler)
    results = []
    for call in (run, fast):
        leaves = fresh(tensors)
        outputs = call(leaves)
        results.append({**dict(enumerate(outputs)), **gradients(weighted_sum(outputs), leaves)})
    for name, want in results[0].items():
        torch.testing.assert_close(results[1][name], want)


@compiled
@every_decay
@every_operator
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_into_one_graph(operator, decay, packed):
    p = make(Config((20, 20), packed=packed, decay=decay, retention="head", block=4, initial_state=True))
    compiled_equals_eager(*p.arguments(operator), operator, "aot_eager")


@compiled
@pytest.mark.slow
@every_decay
@every_operator
def test_compiles_into_one_graph_with_the_default_compiler(operator, decay):
    p = make(Config((20, 20), packed=True, decay=decay, retention="head", block=4, initial_state=True))
    compiled_equals_eager(*p.arguments(operator), operator, "inductor")


@compiled
def test_compiled_code_without_gradients_and_of_another_length():
    torch.compiler.reset()
    fast = torch.compile(
        lambda **t: online_scaled_delta_rule(**t, backend="cpu"), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        for length in (1, 20, 33, 64):
            t, _ = make(Config((length,), decay="head", initial_state=True)).arguments(
                online_scaled_delta_rule
            )
            for a, b in zip(fast(**t), online_scaled_delta_rule(**t, backend="cpu")):
                assert a is b is None or torch.equal(a, b)


def of_values(operator, t, options):
    """o as a function of v, with the backend that `auto` takes."""
    return lambda v: operator(**t | {"v": v}, **options)[0]


@every_rule
def test_function_transforms_are_those_of_the_reference(operator, block):
    t, options = problem(K=3, V=2, block=block).arguments(operator)
    t = {name: x.double() for name, x in t.items()}
    v, f = t["v"], of_values(operator, t, options)
    g = of_values(operator, t, options | {"backend": "reference"})
    tangent = torch.randn_like(v)
    linear = f(v + tangent) - f(v)  # o is affine in v
    assert relative_error(torch.func.jvp(f, (v,), (tangent,))[1], linear) < 1e-9
    assert relative_error(torch.func.vmap(f)(torch.stack([v, tangent]))[1], f(tangent)) < 1e-9
    grad, want = (torch.func.grad(lambda v, f=h: f(v).square().sum())(v) for h in (f, g))
    assert relative_error(grad, want) < 1e-9
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, tangent)
        got = torch.autograd.forward_ad.unpack_dual(f(dual)).tangent
        assert relative_error(got, linear) < 1e-9


@compiled
@every_operator
def test_batched_gradients_are_refused_by_kernels_with_a_way_out(operator):
    t, options = problem(K=3, V=2, block=3).arguments(operator)
    for backend in ("chunkwise", "cpu"):
        x = fresh(t)
        result = operator(**x, **options, backend=backend)[0]
        stacked = torch.stack([torch.ones_like(result), torch.zeros_like(result)])
        if backend == "chunkwise":
            (grad,) = torch.autograd.grad(result, x["k"], stacked, is_grads_batched=True)
            assert grad[0].any()
            assert not grad[1].any()
        else:
            with pytest.raises(RuntimeError, match='no batched gradients; use backend="chunkwise"'):
                torch.autograd.grad(result, x["k"], stacked, is_grads_batched=True)


@compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_operator_is_the_operator():
    t, options = problem().arguments(online_scaled_delta_rule)

    def f(v, beta):
        return online_scaled_delta_rule(**t | {"v": v, "beta": beta}, **options, backend="cpu")[0]

    with torch.no_grad():
        traced = torch.jit.trace(f, (t["v"], t["beta"]))
        v, beta = torch.randn_like(t["v"]), torch.rand_like(t["beta"])
        assert torch.equal(traced(v, beta), f(v, beta))


@every_backend
@every_rule
def test_no_tokens_leave_copies_of_the_states(backend, operator, block):
    config = Config((0,), K=9, block=block, initial_state=True, initial_scale="each")
    t, options = make(config).arguments(operator)
    _, state, carried = operator(**t, **options, backend=backend)
    for given, made in ((t["initial_state"], state), (t[f"initial_{BOTH[operator]}"], carried)):
        assert torch.equal(given, made)
        assert given.data_ptr() != made.data_ptr()


@compiled
def test_function_transforms_are_refused_by_kernels_with_a_way_out():
    t, options = problem().arguments(online_scaled_delta_rule)
    f = of_values(online_scaled_delta_rule, t, options | {"backend": "cpu"})
    with pytest.raises(ValueError, match=r'neither torch.func nor.*backend="chunkwise"'):
        torch.func.vmap(f)(t["v"][None])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        f(torch.autograd.forward_ad.make_dual(t["v"], t["v"]))
