"""What PyTorch asks of an operator: shapes without values, compilation, strides, and clear refusals."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from osdn.ops import checks, delta_rule, online_scaled_delta_rule
from osdn.ops.triton import autograd, chunks, phase1
from tests.ops.problems import OPERATORS, Config, make, relative_error, weighted_sum
from tests.ops.triton.device import DEVICE

SMALL = Config(
    (7, 60), packed=True, H=1, group=2, K=5, V=3, decay="head", retention="head", initial_state=True
)


def arguments(operator, config=SMALL, dtype=torch.float32):
    tensors, options = make(config).arguments(operator)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = options["cu_seqlens"].to(DEVICE)
    return {name: x.to(DEVICE, dtype) for name, x in tensors.items()}, {**options, "backend": "triton"}


@pytest.mark.slow
def test_custom_operators_keep_their_promises_to_pytorch():
    x, options = arguments(online_scaled_delta_rule)
    x = {name: t.requires_grad_() for name, t in x.items()}
    numbers, cu = [1.0, 0, 0.003, 1e-6, 0.5, 2.0], options["cu_seqlens"]
    torch.library.opcheck(
        autograd._precondition, (x["k"], x["beta"], x["retention"], None, None, cu, numbers, True)
    )
    rule = (x["q"], x["k"], x["v"], x["beta"], None, x["log_decay"], x["initial_state"], cu, 0.5)
    torch.library.opcheck(autograd._rule, rule)
    with torch.no_grad():
        tensors = [t.detach() if isinstance(t, torch.Tensor) else t for t in rule[:7]]
        torch.library.opcheck(autograd._recurrent, (*tensors, None, None, None, None, cu, 0.5, numbers, True))


@pytest.mark.parametrize("operator", OPERATORS)
def test_compilation_traces_through_in_one_graph(operator):
    x, options = arguments(operator)
    x = {name: t.requires_grad_() for name, t in x.items()}

    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    got, want = (_with_gradients(f, x, options) for f in (compiled, operator))
    for a, b in zip(got, want):
        assert relative_error(a, b) < 1e-6


def test_decoding_compiles_in_one_graph():
    x, options = arguments(online_scaled_delta_rule, Config((1, 1), H=1, K=5, V=3))
    step = torch.compile(
        lambda: online_scaled_delta_rule(**x, **options), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        for a, b in zip(step(), online_scaled_delta_rule(**x, **options)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strided_inputs_give_what_contiguous_ones_give(decay):
    x, options = arguments(online_scaled_delta_rule, Config((66,), H=1, group=2, K=6, V=5, decay=decay))
    strided = {
        name: torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0].requires_grad_()
        for name, t in x.items()
    }
    whole = {name: t.requires_grad_() for name, t in x.items()}
    for a, b in zip(*(_with_gradients(online_scaled_delta_rule, t, options) for t in (strided, whole))):
        assert torch.equal(a, b)


def test_negated_views_are_read_right():
    x, options = arguments(delta_rule, Config((20,), H=1, K=6, V=5))
    lazy = x | {"v": torch._neg_view(x["v"])}
    with torch.no_grad():
        got, want = (delta_rule(**t, **options)[0] for t in (lazy, x | {"v": -x["v"]}))
    assert torch.equal(got, want)


@pytest.mark.parametrize("T", [3, 70])
def test_fake_tensors_have_the_shapes_of_real_results(T):
    x, options = arguments(online_scaled_delta_rule, Config((T,), H=1, group=2, K=6, V=5))
    with torch.no_grad():
        real = online_scaled_delta_rule(**x, **options)
        with FakeTensorMode() as mode:
            fakes = {name: mode.from_tensor(t) for name, t in x.items()}
            fake = online_scaled_delta_rule(**fakes, **options)
        with FakeTensorMode(allow_non_fake_inputs=True):
            around = online_scaled_delta_rule(**x, **options)
    for results in (fake, around):
        assert [(y.shape, y.dtype) for y in results] == [(y.shape, y.dtype) for y in real]


def test_dispatch_modes_see_the_operators_and_change_nothing():
    x, options = arguments(online_scaled_delta_rule, Config((3,), H=1, K=6, V=5))
    with torch.no_grad():
        want = online_scaled_delta_rule(**x, **options)
        with FlopCounterMode(display=False):
            got = online_scaled_delta_rule(**x, **options)
    assert all(map(torch.equal, got, want))


def _with_gradients(operator, x, options):
    outputs = operator(**x, **options)
    loss = weighted_sum(y.cpu() for y in outputs)
    grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True, materialize_grads=True)
    return [y.detach() for y in (*outputs, *grads)]


def test_a_second_derivative_is_refused_with_a_way_out():
    x, options = arguments(delta_rule, Config((3,), H=1, K=2, V=2))
    x = {name: t.requires_grad_() for name, t in x.items()}
    (grad,) = torch.autograd.grad(delta_rule(**x, **options)[0].sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivatives; use backend="chunkwise"'):
        grad.sum().backward()


def test_double_precision_is_refused_with_a_way_out():
    x, options = arguments(delta_rule, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"float64.*float32, bfloat16 and float16"):
        delta_rule(**x, **options)


def keys(B, T, K=64, dtype=torch.float32, device=DEVICE):
    return torch.zeros(B, T, 1, K, dtype=dtype, device=device)


def test_boundaries_are_read_once_and_again_when_they_change(monkeypatch):
    reads, read = [], torch.Tensor.tolist
    monkeypatch.setattr(checks, "_reading_waits", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x) or read(x))
    cu = torch.tensor([0, 70, 100], device=DEVICE)
    table = chunks.chunks_of(keys(1, 100), cu).table
    chunks.chunks_of(keys(1, 100), cu)
    assert len(reads) == 1
    assert table.tolist() == [[0, 64], [64, 6], [70, 30]]
    with pytest.raises(ValueError, match="must end at the number of tokens, 99"):
        chunks.chunks_of(keys(1, 99), cu)
    cu[1] = 30
    assert chunks.chunks_of(keys(1, 100), cu).table.tolist() == [[0, 30], [30, 64], [94, 6]]
    with torch.inference_mode():
        frozen = torch.tensor([0, 100], device=DEVICE)
        assert chunks.chunks_of(keys(1, 100), frozen).sequences.tolist() == [0, 2]


def test_no_packing_has_more_chunks_than_the_bound():
    for lengths in ([1] * 130, [65, 63, 0, 1, 200], [0, 0], [64]):
        for k in (keys(1, sum(lengths)), keys(1, sum(lengths), 256)):
            made = chunks.chunks_of(k, torch.tensor([0, *lengths], device=DEVICE).cumsum(0))
            assert made.count <= chunks.upper_bound(k, len(lengths))
    assert chunks.chunks_of(keys(3, 65), None).count == 6


def test_chunks_have_no_more_tokens_than_keys_have_channels():
    sizes = [chunks.chunks_of(keys(1, 65, K), None).size for K in (1, 4, 16, 31, 32, 63, 64, 100)]
    assert sizes == [16, 16, 16, 16, 32, 32, 64, 64]


def test_chunks_are_halved_where_keys_are_long():
    assert chunks.chunks_of(keys(1, 65, 128), None).size == 64
    assert chunks.chunks_of(keys(1, 65, 256, torch.bfloat16), None).size == 64
    assert chunks.chunks_of(keys(1, 65, 129), None).sizes() == {"C": 32, "LEVELS": 5}


def test_a_gradient_of_one_output_alone_is_enough(monkeypatch):
    monkeypatch.setattr(phase1, "PARALLEL_FROM", 1)
    x, options = arguments(online_scaled_delta_rule, Config((70,), H=1, K=4, V=3))
    x = {name: t.requires_grad_() for name, t in x.items()}
    for i, names in enumerate((("q", "k", "v", "beta"), ("k", "v", "beta"), ("k", "beta"))):
        outputs = online_scaled_delta_rule(**x, **options)
        for name, grad in zip(names, torch.autograd.grad(outputs[i].sum(), [x[name] for name in names])):
            assert grad.abs().max() > 0, name
