"""Every backend gives what the float64 reference gives: outputs, states and every gradient."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from osdn.ops import delta_rule, newton_keys, online_scaled_delta_rule, precondition_keys
from tests.ops.problems import (
    BACKENDS,
    OPERATORS,
    Config,
    Problem,
    answer,
    assert_close,
    make,
    relative_error,
)

SINGLE = {"outputs": 1e-5, "gradients": 1e-4}  # what a user is promised
DOUBLE = {"outputs": 1e-9, "gradients": 1e-9}

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)


SIZES = (31, 32, 61, 64, 97, 127, 128, 131, 251, 256)


@st.composite
def configs(
    draw: st.DrawFn, etas: list[float], bounds: list, longest: int = 300, sizes: tuple[int, ...] = SIZES
) -> Config:
    """Anything an operator takes, as large as the reference has time for."""
    size = st.one_of(st.integers(1, 20), st.sampled_from(sizes))
    K, V, H = draw(size), draw(size), draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 1, 2, 3]))
    room = min(longest, max(20, 2_000_000 // (K * max(K, V) * H * group)))  # tokens in all
    packed, sequences = draw(st.booleans()), draw(st.integers(1, 4))
    length = st.one_of(st.integers(0, room // sequences), st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65]))
    lengths = [min(draw(length), room // sequences) for _ in range(sequences)]
    return Config(
        lengths=tuple(lengths) if packed else (lengths[0],) * sequences,
        packed=packed,
        H=H,
        group=group,
        K=K,
        V=V,
        decay=draw(st.sampled_from(["none", "head", "channel"])),
        strength=draw(st.sampled_from(["weak", "strong", "mixed", "constant"])),
        retention=draw(st.sampled_from(["none", "constant", "head", "channel", "tied"])),
        bounds=draw(st.sampled_from(bounds)),
        eta=draw(st.sampled_from(etas)),
        beta_aware=draw(st.booleans()),
        prior=draw(st.sampled_from([0.3, 1.0, 4.0])),
        block=draw(st.sampled_from([1, 1, 2, 3, 4, 8, 16, 32, 0])),
        squash=draw(st.sampled_from([1.0, 1.5, 2.0])),
        initial_scale=draw(st.sampled_from(["none", "shared", "each"])),
        initial_state=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 1.0, -0.3])),
        alike=draw(st.sampled_from([0.0, 0.5, 3.0])),
        seed=draw(st.integers(0, 2**16)),
    )


# A step this size contracts the scale, so rounding stays what it is.
TAME = [0.0, 0.003, 0.1, 0.7]
# Beyond, the scale is thrown from bound to bound and rounding is amplified at each throw: that is the
# recurrence itself, not an implementation of it, so these are compared in float64 alone.
WILD = [2.0, 5.0, 40.0]
BOXES = [(0.5, 2.0), (0.9, 1.1), (-1.0, 1.5)]
# At a bound near 1 a unit key and beta 1 make a step that is lost in float32's rounding, whose direction then
# decides whether a gradient passes the bound: such boxes, too, are compared in float64 alone.
TIGHT = [(0.9985, 1.002), (1.0, 1.0)]


def well_posed(operator, problem: Problem, want: dict[str, torch.Tensor]) -> bool:
    """Whether float32 can give this answer: numbers that differ by a rounding must have nearly the same one.

    They do not where the scale meets a bound but for a rounding, since its gradient jumps there, or where
    all that is left of the scale is the rounding of 1 - |k|^2.
    """
    if operator is delta_rule:
        return True
    options = {**problem.options}
    k, write_keys = problem.tensors["k"], problem.tensors["write_keys"]
    retention = problem.tensors.get("retention", torch.ones_like(write_keys)) * options.pop("retention", 1.0)
    for sign in (1, -1):
        random = torch.Generator().manual_seed(0)

        def nudged(x, size, sign=sign, random=random):
            return x.double() * (1 + sign * size * torch.randn(x.shape, generator=random).sign())

        tensors = {**problem.tensors, "k": nudged(k, 2e-7), "retention": nudged(retention, 1e-6)}
        got = answer(operator, Problem(tensors, options), "reference", torch.float64)
        if any(relative_error(got[name], want[name]) > 5e-5 for name in want):
            return False
    return True


def all_agree(operator, config: Config, dtype: torch.dtype) -> None:
    problem = make(config)
    want = answer(operator, problem, "reference", torch.float64)
    if dtype == torch.float32:
        assume(well_posed(operator, problem, want))
    for backend in BACKENDS:
        agrees(operator, problem, backend, dtype, want)


def agrees(
    operator, problem: Problem, backend: str, dtype: torch.dtype, want: dict[str, torch.Tensor]
) -> None:
    assert_close(
        answer(operator, problem, backend, dtype), want, **SINGLE if dtype == torch.float32 else DOUBLE
    )


@every_operator
@settings(max_examples=50)
@given(config=configs(TAME, [*BOXES, None]))
def test_outputs_states_and_gradients_are_those_of_the_reference(operator, config):
    all_agree(operator, config, torch.float32)


@pytest.mark.slow
@every_operator
@settings(max_examples=400)
@given(config=configs(TAME, [*BOXES, None], longest=400))
def test_hundreds_of_configurations_agree(operator, config):
    all_agree(operator, config, torch.float32)


@every_operator
@settings(max_examples=20)
@given(config=configs(TAME, [*BOXES, *TIGHT, None]))
def test_double_precision_is_double_precision(operator, config):
    all_agree(operator, config, torch.float64)


@settings(max_examples=30)
@given(config=configs(WILD, [*BOXES, *TIGHT], longest=60) | configs([2.0, 5.0], [None], longest=12))
def test_a_step_too_large_is_taken_as_defined(config):
    """Without bounds the scale and then the state explode, so those sequences are short."""
    all_agree(online_scaled_delta_rule, config, torch.float64)


@every_backend
@pytest.mark.parametrize("strength", ["strong", "mixed", "constant"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decay_loses_no_digits_over_hundreds_of_tokens(backend, decay, strength):
    config = Config((300, 300), H=1, group=2, K=29, V=13, decay=decay, strength=strength, initial_state=True)
    want = answer(online_scaled_delta_rule, make(config), "reference", torch.float64)
    agrees(online_scaled_delta_rule, make(config), backend, torch.float32, want)


@every_backend
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_decay_of_minus_infinity_forgets_everything(backend, decay):
    problem = make(Config((70,), decay=decay, initial_state=True))
    problem.tensors["log_decay"][:, 33] = -torch.inf
    want = answer(delta_rule, problem, "reference", torch.float64)
    agrees(delta_rule, problem, backend, torch.float32, want)


@every_backend
@every_operator
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_gradients_are_those_of_finite_differences(operator, backend, decay):
    config = Config(
        (3, 0, 5),
        packed=True,
        H=1,
        group=2,
        K=3,
        V=2,
        decay=decay,
        retention="head",
        eta=0.1,
        initial_scale="each",
        initial_state=True,
    )
    tensors, options = make(config).arguments(operator)
    names = list(tensors)
    leaves = [x.double().requires_grad_() for x in tensors.values()]

    def outputs(*leaves):
        return operator(**dict(zip(names, leaves)), **options, backend=backend)

    assert torch.autograd.gradcheck(outputs, leaves)


# Factors of some inputs, each of which leaves a recurrence that neither explodes nor vanishes.
EXTREMES = {
    **{f"values-{s:g}": {"v": s, "initial_state": s} for s in (1e-20, 1e-10, 1e10)},
    **{f"queries-{s:g}": {"q": s} for s in (1e-20, 1e-10, 1e10)},
    "keys-1e-20": {"k": 1e-20},
    "keys-1e-10": {"k": 1e-10, "beta": 1e20},
    "keys-1e+10": {"k": 1e10, "beta": 1e-20},
    "beta-1e-20": {"beta": 1e-20},
    "all-1e-10": {"q": 1e-10, "k": 1e-10, "v": 1e-10, "initial_state": 1e-10},
    "small-writes": {"write_keys": 1e-10},
}


def extreme(factors: dict[str, float], **settings) -> Problem:
    sizes = {"lengths": (70,), "H": 1, "group": 2, "K": 19, "V": 6}
    problem = make(Config(**sizes | settings, retention="head", initial_state=True))
    problem.tensors["write_keys"] = problem.tensors["write_keys"] * factors.get("k", 1.0)
    for name, factor in factors.items():
        problem.tensors[name] = problem.tensors[name] * factor
    return problem


@every_backend
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("factors", EXTREMES.values(), ids=EXTREMES.keys())
def test_tiny_and_huge_inputs_agree(backend, decay, factors):
    problem = extreme(factors, decay=decay)
    want = answer(delta_rule, problem, "reference", torch.float64)
    agrees(delta_rule, problem, backend, torch.float32, want)


@every_backend
@pytest.mark.parametrize("size", [1e-20, 1e-10, 1e10])
def test_keys_of_any_size_precondition_alike(backend, size):
    problem = extreme({"k": size})
    want = answer(precondition_keys, problem, "reference", torch.float64)
    agrees(precondition_keys, problem, backend, torch.float32, want)


@pytest.mark.parametrize("backend", ["cpu", "chunkwise"])
@pytest.mark.parametrize("retention", [0.999, 0.9999])
def test_a_constant_retention_does_not_drift_over_thousands_of_tokens(backend, retention):
    """Rounded to float32, 0.9999 would be off by 2e-8, and the scale by 1e-4 after 6,000 tokens."""
    torch.manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 6000, 1, 8), dim=-1)
    beta = torch.rand(1, 6000, 1)
    options = {"eta": 1e-4, "retention": retention, "bounds": None}
    want, final = precondition_keys(k.double(), beta.double(), **options, backend="chunkwise")
    got, last = precondition_keys(k, beta, **options, backend=backend)
    assert relative_error(got, want) < 1e-5
    assert relative_error(last, final) < 1e-5


@pytest.mark.parametrize("block", [1, 4, 16])
def test_a_constant_retention_close_to_one_keeps_its_digits(block):
    """In float32, 1 - 0.9999 is wrong in the fourth digit, and over many tokens that adds up."""
    config = Config(lengths=(300,), K=16, V=4, retention="constant", prior=4.0, block=block)
    problem = make(config)
    problem.options["retention"] = 0.9999
    want = answer(newton_keys, problem, "reference", torch.float64)
    got = answer(newton_keys, problem, "cpu", torch.float32)
    assert relative_error(got["final_covariance"], want["final_covariance"]) < 1e-6
