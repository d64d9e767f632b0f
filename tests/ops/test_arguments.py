"""Malformed arguments are refused with a message that names them, and with nothing worse."""

import inspect
import warnings
from functools import cache

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from osdn.ops import (
    available_backends,
    delta_rule,
    newton_keys,
    operators,
    precondition_keys,
)
from tests.ops.problems import OPERATORS, Config, answer, assert_close, make

TENSORS = (
    "q", "k", "v", "beta", "gain", "write_keys", "log_decay", "retention", "center", "initial_state",
    "initial_scale", "initial_covariance", "initial_gram",
)  # fmt: skip
REQUIRED = ("q", "k", "v", "beta", "gain", "center")
CONFIG = Config(
    (4, 3),
    packed=True,
    H=4,
    group=2,
    K=3,
    V=5,
    decay="channel",
    retention="channel",
    initial_scale="each",
    initial_state=True,
)


def good(operator):
    tensors, options = make(CONFIG).arguments(operator)
    return {**tensors, **options}


def misshapen(name, x):
    yield x[None]
    yield x[..., :0]
    yield x.sum()
    if not name.startswith("initial_") or name == "initial_state":  # others may be shared by all sequences
        yield x[0]
    for dim in range(x.ndim):
        yield torch.cat([x, x.narrow(dim, 0, 1)], dim)
        yield x.narrow(dim, 0, x.shape[dim] - 1)


def malformed_tensors(name, x):
    yield from (x.long(), x.bool(), x.to(torch.complex64), x.to(torch.float8_e4m3fn))
    yield from (x.to("meta"), x.to_sparse(), torch.nested.nested_tensor([x[:1]], layout=torch.jagged))
    yield from ("tensor", x.tolist(), x.numpy(), object())
    if name in REQUIRED:
        yield None
    if name not in ("retention", "center"):
        yield 1.0


MALFORMED_OPTIONS = {
    "eta": [-1e-9, torch.nan, torch.inf, 1e39, 10**400, None, "0.1", True, torch.tensor(0.1), 1j],
    "eps": [0, 0.0, 1e-40, -1e-6, torch.nan, torch.inf, 10**400, None, "1e-6", torch.tensor(1e-6)],
    "bounds": [
        (2.0, 0.5),
        (0.5,),
        (0.5, 1.0, 2.0),
        (0.5, torch.nan),
        (-torch.inf, 1.0),
        (0.5, 1e300),
        (0.5, 10**400),
        (0.5, None),
        ("a", "b"),
        (torch.tensor(0.5), torch.tensor(2.0)),
        1.0,
        "ab",
        torch.tensor([0.5, 2.0]),
    ],
    "prior": [0, -1.0, torch.nan, torch.inf, 1e39, 10**400, None, "1", True, torch.tensor(1.0)],
    "block_size": [0, -1, 2, 5, 1.0, None, "1", True, torch.tensor(1)],
    "squash": [0.99, -1.5, torch.nan, torch.inf, None, "1.5", True, torch.tensor(1.5)],
    "beta_aware": [None, 1, 0, "yes", torch.tensor(True)],
    "output_final_state": [None, 1, "yes", torch.tensor([])],
    "retention": [-0.1, torch.nan, torch.inf, 10**400, True],
    "scale": [torch.nan, torch.inf, -torch.inf, 10**400, "1", True, torch.tensor(1.0)],
    "cu_seqlens": [
        [0, 4, 7],
        4,
        "047",
        torch.tensor([0.0, 4.0, 7.0]),
        torch.tensor([False, True, True]),
        torch.tensor([0, 4, 7], dtype=torch.int16),
        torch.tensor([[0, 4, 7]]),
        torch.tensor(7),
        torch.tensor([7]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([0, 4, 8]),
        torch.tensor([0, 4, 6]),
        torch.tensor([1, 4, 7]),
        torch.tensor([-1, 4, 7]),
        torch.tensor([0, 8, 7]),
        torch.tensor([0, -1, 7]),
        torch.tensor([0, 2**62, 7]),
        torch.tensor([0, 4, 7]).to_sparse(),
        torch.tensor([0, 4, 7], device="meta"),
    ],
}


def malformed(operator, name):
    if name in TENSORS:
        yield from malformed_tensors(name, good(operator)[name])
    yield from MALFORMED_OPTIONS.get(name, [])


def refuses(operator, arguments, name, backend):
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        operator(**arguments, backend=backend)


def cases(*kinds):
    return pytest.mark.parametrize(
        ("operator", "name"),
        [
            pytest.param(operator, name, id=f"{operator.__name__}-{name}")
            for operator in OPERATORS
            for name in inspect.signature(operator).parameters
            if name in kinds
        ],
    )


@pytest.mark.parametrize("backend", available_backends())
@cases(*TENSORS, *MALFORMED_OPTIONS)
def test_a_malformed_argument_is_named(operator, name, backend):
    for bad in malformed(operator, name):
        refuses(operator, good(operator) | {name: bad}, name, backend)


@cases(*TENSORS)
def test_a_shape_that_does_not_fit_is_refused(operator, name):
    """The message names the argument; of those that set the sizes, maybe another one's."""
    named = "|".join((*TENSORS, "block_size")) if name in ("k", "v", "beta", "gain") else name
    for bad in misshapen(name, good(operator)[name]):
        refuses(operator, good(operator) | {name: bad}, f"({named})", "auto")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("backend", ["cuda", "Reference", "", None, 3, ["cpu"]])
def test_an_unknown_backend_is_refused(operator, backend):
    refuses(operator, good(operator), "backend", backend)


@pytest.mark.parametrize("backend", available_backends())
def test_packing_is_for_a_single_row(backend):
    arguments = {
        name: x for name, x in good(precondition_keys).items() if name in ("k", "beta", "cu_seqlens")
    }
    arguments |= {name: arguments[name].expand(2, *arguments[name].shape[1:]) for name in ("k", "beta")}
    refuses(precondition_keys, arguments, "cu_seqlens", backend)


def test_queries_keys_and_values_share_one_dtype():
    for name in ("q", "k", "v"):
        arguments = good(delta_rule)
        refuses(delta_rule, arguments | {name: arguments[name].double()}, name, "auto")


def test_value_heads_are_a_multiple_of_key_heads():
    arguments = good(precondition_keys) | {"retention": None, "initial_scale": None}
    for heads in (1, 3, 6):
        refuses(precondition_keys, arguments | {"beta": torch.rand(1, 7, heads)}, "beta", "auto")


def test_a_covariance_keeps_at_most_all_of_itself():
    refuses(newton_keys, good(newton_keys) | {"retention": 1.001}, "retention", "auto")


def test_a_refusal_says_what_it_got_and_what_it_wants():
    arguments = good(delta_rule)
    with pytest.raises(ValueError, match=r"beta has shape \[1, 6, 8\]; it must be .* \[1, 7, 8\]"):
        delta_rule(**arguments | {"beta": arguments["beta"][:, :6]})


@st.composite
def junk(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32]))
    tensor = torch.full(shape, draw(st.integers(-3, 8)), dtype=dtype)
    return draw(
        st.one_of(st.just(tensor), st.none(), st.floats(), st.integers(), st.text(max_size=3), st.booleans())
    )


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=100)
@given(data=st.data())
def test_junk_is_computed_or_refused(operator, backend, data):
    names = sorted(set(inspect.signature(operator).parameters) - {"backend"})
    changed = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    arguments = good(operator) | {name: data.draw(junk(), label=name) for name in changed}
    try:
        outputs = operator(**arguments, backend=backend)
    except (ValueError, TypeError):
        return
    assert all(x is None or isinstance(x, torch.Tensor) for x in outputs)


def test_numbers_of_numpy_are_numbers():
    k, beta = torch.randn(1, 3, 1, 4), torch.rand(1, 3, 1)
    got = precondition_keys(k, beta, eta=np.float64(0.25), bounds=(np.float32(0.5), np.int64(2)))
    want = precondition_keys(k, beta, eta=0.25, bounds=(0.5, 2.0))
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("backend", available_backends())
def test_a_positive_log_decay_is_warned_of_once(backend, monkeypatch):
    monkeypatch.setattr(operators, "_warn_of_growth", cache(operators._warn_of_growth.__wrapped__))
    x, beta = torch.randn(1, 5, 2, 4), torch.rand(1, 5, 2)
    log_decay = torch.zeros(1, 5, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        delta_rule(x, x, x, beta, log_decay=log_decay, backend=backend)
    log_decay[0, 3, 1] = 0.01
    with pytest.warns(UserWarning, match="is a minus sign missing") as caught:
        delta_rule(x, x, x, beta, log_decay=log_decay, backend=backend)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        delta_rule(x, x, x, beta, log_decay=log_decay, backend=backend)


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_state_may_grow_by_a_moderate_factor(backend, decay):
    problem = make(Config((70,), decay=decay, initial_state=True))
    problem.tensors["log_decay"] *= -10  # up to a factor of e per token
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = (
            answer(delta_rule, problem, name, dtype)
            for name, dtype in ((backend, torch.float32), ("reference", torch.float64))
        )
    assert_close(got, want, outputs=1e-5, gradients=1e-4)
