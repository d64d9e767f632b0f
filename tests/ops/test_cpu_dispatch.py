"""The kernels get real memory or nothing: whatever stands in for a tensor goes through the dispatcher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from osdn.ops import (
    available_backends,
    cpu,
    delta_rule,
    newton_delta_rule,
    online_scaled_delta_rule,
    pgdn_delta_rule,
    precondition_keys,
)
from tests.ops.problems import BOTH, Config, make

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
    cpu._kernels.__wrapped__(torch.float32)
    for field in ("POINTERS", "INTEGERS", "NUMBERS"):
        with monkeypatch.context() as patch:
            first, second, *rest = getattr(cpu, field)
            patch.setattr(cpu, field, (second, first, *rest))
            with pytest.raises(RuntimeError, match="differ"):
                cpu._kernels.__wrapped__(torch.float32)


def check_operators(settings: dict[str, Any], operator: Callable[..., Any], numbers: cpu.Numbers) -> None:
    """Schemas, fake implementations, gradients and tracing with dynamic shapes, as PyTorch checks them."""
    problem = make(Config((70, 70), group=2, K=5, V=3, initial_state=True, **settings))
    tensors, options = problem.arguments(operator)
    x = {name: value.requires_grad_() for name, value in tensors.items()}
    cuts, gate = options.get("cu_seqlens"), x.get("gain", x["beta"])
    initial = next((t.flatten(2) for name, t in x.items() if name == f"initial_{BOTH[operator]}"), None)
    of_phase1 = (x.get("retention"), initial if initial is None else initial.detach().requires_grad_())
    inputs = (
        *(x["q"], x["k"], x["v"], x["beta"], None, x.get("log_decay"), *of_phase1, x["initial_state"]),
        *(x.get("gain"), x.get("center"), cuts),
    )
    torch.library.opcheck(cpu._delta_rule, (*inputs, list(numbers), True))
    alone = (x["k"], gate, *of_phase1, x.get("center"), cuts)
    torch.library.opcheck(cpu._precondition_keys, (*alone, list(numbers), True))

    inputs, alone = (tuple(t if t is None else t.detach() for t in some) for some in (inputs, alone))
    o, final_state, final_scale, *saved = cpu._delta_rule(*inputs, list(numbers), True)
    grads = (o.sin(), final_state.sin(), final_scale.sin())
    torch.library.opcheck(cpu._delta_rule_backward, (*inputs, *saved, *grads, list(numbers)))
    for grad in (torch.randn(*gate.shape, x["k"].shape[3]), None):
        torch.library.opcheck(
            cpu._precondition_keys_backward, (*alone, saved[2], grad, grads[2], list(numbers))
        )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kinds", ["none", "head", "channel"])
def test_the_operators_are_what_pytorch_expects_of_one(packed: bool, kinds: str) -> None:
    settings = {"packed": packed, "decay": kinds, "retention": kinds}
    numbers = cpu.Numbers(rule=1, beta_aware=1, eta=0.1, low=0.5, high=2.0, eps=1e-6, scale=0.4)
    check_operators(settings, online_scaled_delta_rule, numbers)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("operator", "numbers"),
    [
        (newton_delta_rule, cpu.Numbers(rule=2)),
        (newton_delta_rule, cpu.Numbers(rule=2, block=5)),
        (pgdn_delta_rule, cpu.Numbers(rule=3, eps=1e-6, log_squash=0.4)),
    ],
    ids=["newton-1", "newton-5", "pgdn"],
)
def test_so_are_those_of_other_rules(
    packed: bool, operator: Callable[..., Any], numbers: cpu.Numbers
) -> None:
    settings = {"packed": packed, "retention": "channel", "initial_scale": "each"}
    check_operators({**settings, "block": int(numbers.block)}, operator, numbers)


def test_a_loss_on_nothing_of_the_plain_delta_rule_has_no_gradients() -> None:
    """It carries no state of phase 1: there is nothing to differentiate."""
    q, k, v, beta = (x.requires_grad_() for x in inputs())
    nothing = (None,) * 8
    *_, empty, _, _, _ = cpu._delta_rule(q, k, v, beta, *nothing, list(cpu.Numbers()), True)
    assert empty.numel() == 0
    assert torch.autograd.grad(empty.sum(), (q, k, v, beta), allow_unused=True) == (None,) * 4
