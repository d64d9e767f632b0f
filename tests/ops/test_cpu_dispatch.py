"""The kernels get real memory or nothing: whatever stands in for a tensor goes through the dispatcher."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from osdn.ops import available_backends, cpu, delta_rule, online_scaled_delta_rule, precondition_keys
from osdn.ops.cpu.build import library
from tests.ops.problems import Config, make

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="needs a C++ compiler")


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, 1, 5), torch.randn(2, 3, 1, 5), torch.randn(2, 3, 2, 7), torch.rand(2, 3, 2)


def test_fake_tensors_have_the_shapes_of_real_results() -> None:
    q, k, v, beta = inputs()
    real = (*online_scaled_delta_rule(q, k, v, beta, output_final_state=True), *precondition_keys(k, beta))
    with FakeTensorMode() as mode:
        q, k, v, beta = map(mode.from_tensor, (q, k, v, beta))
        fake = (
            *online_scaled_delta_rule(q, k, v, beta, output_final_state=True),
            *precondition_keys(k, beta),
        )
    assert [x.shape for x in fake] == [x.shape for x in real]
    assert [x.dtype for x in fake] == [x.dtype for x in real]


def test_a_fake_mode_around_real_tensors_is_no_crash() -> None:
    q, k, v, beta = inputs()
    with FakeTensorMode(allow_non_fake_inputs=True):
        o, _ = delta_rule(q, k, v, beta, backend="cpu")
    assert o.shape == (2, 3, 2, 7)


def test_other_dispatch_modes_see_the_operator_and_change_nothing() -> None:
    x = inputs()
    with FlopCounterMode(display=False):
        watched, _ = delta_rule(*x, backend="cpu")
    assert torch.equal(watched, delta_rule(*x, backend="cpu")[0])


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    x = [torch.nn.functional.normalize(torch.randn(1, 300, 3, 40), dim=-1) for _ in range(3)] + [
        torch.rand(1, 300, 3)
    ]
    try:
        results = []
        for n in (1, 2, 7):
            torch.set_num_threads(n)
            leaves = [t.clone().requires_grad_() for t in x]
            o, _, d = online_scaled_delta_rule(*leaves, backend="cpu")
            results.append([o, d, *torch.autograd.grad(o.sum() + d.sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_what_is_kept_for_the_backward_is_bounded() -> None:
    """Inputs, errors of the outputs' size, and a 64th of the per-token states: nothing that grows faster."""
    T, H, K, V = 640, 2, 32, 48
    x = [torch.randn(1, T, H, n).requires_grad_() for n in (K, K, V)] + [torch.rand(1, T, H)]
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        online_scaled_delta_rule(*x, backend="cpu")
    inputs_, errors, states, scales = T * H * (2 * K + V + 1), T * H * V, T // 64 * H * K * V, T // 64 * H * K
    assert sum(kept.values()) <= 4 * (inputs_ + errors + states + scales) + 1024


def test_one_huge_call_does_not_keep_its_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def call(size: int) -> None:
        x = torch.zeros(1, 2, 1, size)
        delta_rule(x, x, x, torch.zeros(1, 2, 1), backend="cpu")

    call(8)
    before = resident()
    call(4000)  # a state of 64 MB, and as much to work in
    assert resident() - before < 2**24


def test_a_field_out_of_place_is_noticed_when_the_library_is_loaded(monkeypatch) -> None:
    compiled = library("float")
    cpu._check_layout(compiled)
    for field in ("POINTERS", "INTEGERS", "NUMBERS"):
        with monkeypatch.context() as patch:
            first, second, *rest = getattr(cpu, field)
            patch.setattr(cpu, field, (second, first, *rest))
            with pytest.raises(RuntimeError, match="differ"):
                cpu._check_layout(compiled)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kinds", ["none", "head", "channel"])
def test_the_operators_are_what_pytorch_expects_of_one(packed: bool, kinds: str) -> None:
    """Schemas, fake implementations, gradients and tracing with dynamic shapes, as PyTorch checks them."""
    settings = {"decay": kinds, "retention": kinds, "initial_state": True}
    problem = make(Config((70, 70), packed=packed, group=2, K=5, V=3, **settings))
    tensors, options = problem.arguments(online_scaled_delta_rule)
    x = {name: value.requires_grad_() for name, value in tensors.items()}
    cuts = options.get("cu_seqlens")
    scaling = (x.get("retention"), x.get("initial_scale"))
    numbers = [0.1, 0.5, 2.0, 1e-6, 1.0, 0.4, 1.0]
    inputs = (x["q"], x["k"], x["v"], x["beta"], None, x.get("log_decay"), *scaling, x["initial_state"], cuts)
    torch.library.opcheck(cpu._delta_rule, (*inputs, numbers, True, True))
    torch.library.opcheck(cpu._precondition_keys, (x["k"], x["beta"], *scaling, cuts, numbers, True))

    inputs = tuple(t if t is None else t.detach() for t in inputs)
    o, final_state, final_scale, *saved = cpu._delta_rule(*inputs, numbers, True, True)
    grads = (o.sin(), final_state.sin(), final_scale.sin())
    torch.library.opcheck(cpu._delta_rule_backward, (*inputs, *saved, *grads, numbers, True))
    k, beta = inputs[1], inputs[3]
    scaling, write_keys = inputs[6:8], torch.randn(*beta.shape, k.shape[3])
    for grad in (write_keys, None):
        torch.library.opcheck(
            cpu._precondition_keys_backward, (k, beta, *scaling, cuts, saved[2], grad, grads[2], numbers)
        )
