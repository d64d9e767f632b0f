"""The kernels give what the float64 reference gives: outputs, states and every gradient."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings

from osdn.ops import (
    delta_rule,
    newton_delta_rule,
    newton_keys,
    online_scaled_delta_rule,
    pgdn_keys,
    precondition_keys,
)
from osdn.ops.triton import autograd, phase1
from tests.ops.problems import BOTH, Config, assert_close, make, relative_error
from tests.ops.test_agreement import (
    BOXES,
    EXTREMES,
    SINGLE,
    TAME,
    configs,
    every_operator,
    extreme,
    well_posed,
)
from tests.ops.triton.device import DEVICE, kernels, rounded, truth

PACKED = {"lengths": (70, 0, 1, 64), "packed": True, "initial_state": True, "initial_scale": "each"}
ROW = {"lengths": (67,), "H": 1, "K": 29, "V": 40}
CONFIGS = {
    "delta_net": Config((67, 67), H=1, group=2, K=29, V=40),
    "delta_net, packed": Config(**PACKED, H=1, K=70, V=17, scale=1.0, alike=3.0),
    "one token": Config((1,), K=1, V=1),
    "long keys, chunks of 32": Config((70,), H=1, K=130, V=40, decay="head"),
    "long keys, channel decay": Config((70,), H=1, K=130, V=17, decay="channel", strength="mixed"),
    **{
        f"{decay} decay, {strength}": Config(
            **ROW, decay=decay, strength=strength, initial_state=True, alike=0.5
        )
        for decay in ("head", "channel")
        for strength in ("weak", "strong", "mixed", "constant")
    },
    "head decay, packed": Config(**PACKED, H=1, group=2, K=13, V=33, decay="head"),
    "channel decay, packed": Config(**PACKED, H=1, K=40, V=16, decay="channel", strength="mixed"),
}
RETENTIONS = {
    "none": Config((70, 70), H=1, group=2, K=20),
    "constant": Config((3, 66), packed=True, H=1, K=33, retention="constant", initial_scale="each"),
    "head": Config((66,), H=1, group=2, K=8, retention="head", beta_aware=False),
    "channel": Config((66,), H=1, K=16, retention="channel", initial_scale="shared"),
    "tied": Config((66,), H=1, K=16, decay="head", retention="tied", eta=0.1),
    "no box": Config((70,), H=1, K=29, retention="head", eta=0.7, bounds=None),
    "a box that binds": Config((70,), H=1, K=5, eta=0.7, bounds=(0.9, 1.1), initial_scale="each"),
}


def agrees(operator, config: Config) -> None:
    problem = make(config)
    assert_close(kernels(operator, problem), truth(operator, problem), **SINGLE)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_phase_2_is_that_of_the_reference(config):
    agrees(delta_rule, config)


@pytest.mark.parametrize("config", RETENTIONS.values(), ids=RETENTIONS.keys())
def test_phase_1_token_by_token_is_that_of_the_reference(config):
    agrees(precondition_keys, config)


@pytest.mark.parametrize("operator", [newton_keys, pgdn_keys], ids=lambda f: f.__name__)
@pytest.mark.parametrize("retention", ["none", "constant", "head", "channel"])
def test_other_rules_token_by_token_are_those_of_the_reference(operator, retention):
    agrees(operator, replace(RETENTIONS[retention], prior=2.0, squash=2.0, lengths=(66, 0, 3), packed=True))


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_both_phases_are_those_of_the_reference(decay):
    agrees(online_scaled_delta_rule, Config(**PACKED, H=1, K=12, V=9, decay=decay, retention="head"))


@pytest.mark.parametrize("block", [1, 3])
def test_blocks_without_a_kernel_are_those_of_the_reference(block):
    agrees(
        newton_delta_rule, Config(**PACKED, H=1, K=12, V=9, block=block, decay="head", retention="channel")
    )


# The gradient of beta jumps where a step outward from a bound is smaller than float32's spacing; a tight box
# has many of those, so it is left to keys alone.
@pytest.mark.parametrize(
    ("bounds", "beta_aware"),
    [(None, True), (None, False), ((0.5, 2.0), True), ((0.5, 2.0), False), ((0.8, 1.2), False)],
)
def test_phase_1_by_chunks_is_that_of_the_reference(monkeypatch, bounds, beta_aware):
    monkeypatch.setattr(phase1, "PARALLEL_FROM", 1)
    config = Config((150, 0, 66), packed=True, H=1, K=29, bounds=bounds, beta_aware=beta_aware)
    agrees(precondition_keys, replace(config, eta=0.3, initial_scale="each"))


def test_phase_1_by_chunks_of_32_is_that_of_the_reference(monkeypatch):
    monkeypatch.setattr(phase1, "PARALLEL_FROM", 1)
    agrees(precondition_keys, Config((70, 33), packed=True, H=1, K=130, eta=0.3, initial_scale="each"))


def test_chunks_in_which_the_box_binds_are_redone_and_no_others(monkeypatch):
    """A key that repeats drives its channels up to the bound, after it has come and before it leaves."""
    monkeypatch.setattr(phase1, "PARALLEL_FROM", 1)
    problem = make(Config((256,), H=1, K=64, eta=0.05, bounds=(0.5, 1.5)))
    problem.tensors["k"][:] = 0
    problem.tensors["k"][..., :4] = torch.tensor([0.5, 0.5, 0.5, 0.5])
    problem.tensors["k"][:, 64:128, :, :4] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    problem.tensors["beta"][:] = torch.linspace(0.3, 0.8, 256)[:, None]
    seen = []
    forward = phase1.forward
    monkeypatch.setattr(phase1, "forward", lambda i: seen.append(forward(i)) or seen[-1])
    got, want = kernels(precondition_keys, problem), truth(precondition_keys, problem)
    assert_close(got, want, **SINGLE)
    bound = seen[0][2].bound[:4, 0].tolist()
    reached = [(want["write_keys"][0, t : t + 64, 0, 0] >= 1.5 * 0.5 - 1e-6).any() for t in range(0, 256, 64)]
    assert bound[0] == 0
    assert 1 in bound
    assert all(flag for flag, hit in zip(bound, reached) if hit)


def test_lengths_choose_between_tokens_and_chunks():
    """Both sides of the threshold, which no test here moves."""
    for T in (phase1.PARALLEL_FROM - 1, phase1.PARALLEL_FROM):
        problem = make(Config((T,), H=1, K=3))
        tensors, options = problem.arguments(precondition_keys)
        with torch.no_grad():
            w, d = precondition_keys(
                **{name: x.to(DEVICE) for name, x in tensors.items()}, **options, backend="triton"
            )
        want = truth(precondition_keys, problem)
        assert relative_error(w.cpu(), want["write_keys"]) < 1e-6
        assert relative_error(d.cpu(), want["final_scale"]) < 1e-6


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_decay_of_minus_infinity_forgets_everything(decay):
    problem = make(Config((70,), H=1, decay=decay, initial_state=True))
    problem.tensors["log_decay"][:, 33] = -torch.inf
    assert_close(kernels(delta_rule, problem), truth(delta_rule, problem), **SINGLE)


@pytest.mark.parametrize(
    ("kind", "decay"),
    [
        ("values-1e-20", "head"),
        ("values-1e+10", "channel"),
        ("queries-1e-20", "none"),
        ("keys-1e-20", "channel"),
        ("keys-1e-10", "none"),
        ("keys-1e+10", "head"),
        ("all-1e-10", "channel"),
    ],
)
def test_tiny_and_huge_inputs_agree(kind, decay):
    problem = extreme(EXTREMES[kind], decay=decay)
    assert_close(kernels(delta_rule, problem), truth(delta_rule, problem), **SINGLE)


@pytest.mark.parametrize("size", [1e-20, 1e10])
def test_keys_of_any_size_precondition_alike(size):
    problem = extreme({"k": size})
    assert_close(kernels(precondition_keys, problem), truth(precondition_keys, problem), **SINGLE)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_nan_stays_in_its_sequence_and_head(decay):
    problem = make(Config((66, 5), packed=True, H=2, K=6, V=5, decay=decay, retention="head"))
    problem.tensors["v"][0, 3, 0] = torch.nan
    problem.tensors["k"][0, 40, 0] = torch.nan
    got = kernels(online_scaled_delta_rule, problem)
    assert got["o"][:, :66, 0].isnan().any()
    assert not got["o"][:, :, 1].isnan().any()
    assert not got["o"][:, 66:].isnan().any()
    assert got["final_scale"][0, 0].isnan().any()
    assert not got["final_scale"][1].isnan().any()
    assert not got["grad_v"][:, :, 1].isnan().any()
    assert not got["grad_v"][:, 66:].isnan().any()


BOUNDS = {
    torch.float32: SINGLE,
    torch.float16: {"outputs": 3e-3, "gradients": 1e-2},
    torch.bfloat16: {"outputs": 2e-2, "gradients": 8e-2},
}


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_float16_is_as_good_as_its_digits(decay):
    problem = rounded(Config(**ROW, decay=decay, initial_state=True), torch.float16)
    got = kernels(online_scaled_delta_rule, problem, torch.float16)
    assert_close(got, truth(online_scaled_delta_rule, problem), **BOUNDS[torch.float16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", ["none", "channel"])
@pytest.mark.parametrize("alike", [0.0, 3.0])
def test_the_rounding_of_tensor_cores_is_within_the_contract(tensor_cores, monkeypatch, dtype, decay, alike):
    monkeypatch.setattr(phase1, "PARALLEL_FROM", 1)
    config = Config((80,), H=1, K=64, V=20, decay=decay, strength="mixed", initial_state=True, alike=alike)
    problem = rounded(config, dtype)
    got = kernels(online_scaled_delta_rule, problem, dtype)
    assert_close(got, truth(online_scaled_delta_rule, problem), **BOUNDS[dtype])
    assert min(tensor_cores.values()) > 0 or dtype == torch.float32


SMALL = configs(TAME, [*BOXES, None], longest=140, sizes=(31, 32, 33, 64, 65, 72))
LARGE = configs(TAME, [*BOXES, None], longest=140)


def agrees_if_well_posed(operator, config: Config, dtype: torch.dtype = torch.float32) -> None:
    problem = rounded(config, dtype)
    want = truth(operator, problem)
    assume(well_posed(operator, problem, want))
    # Decays of e^-20 make gradients that float16 cannot have: no digits below its smallest normal number.
    bounds = BOUNDS[dtype] | ({"underflow": torch.finfo(dtype).tiny} if dtype == torch.float16 else {})
    assert_close(kernels(operator, problem, dtype), want, **bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@every_operator
@settings(max_examples=4)
@given(config=SMALL)
def test_random_configurations_agree(operator, dtype, config):
    agrees_if_well_posed(operator, config, dtype)


@settings(max_examples=12)
@given(config=SMALL)
def test_random_configurations_agree_by_chunks(config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase1, "PARALLEL_FROM", 1)
        agrees_if_well_posed(precondition_keys, replace(config, retention="none"))


@pytest.mark.slow
@every_operator
@settings(max_examples=30)
@given(config=LARGE)
def test_random_configurations_of_every_size_agree(operator, config):
    agrees_if_well_posed(operator, config)


@pytest.mark.slow
@pytest.mark.parametrize("strength", ["strong", "mixed", "constant"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decay_loses_no_digits_over_hundreds_of_tokens(decay, strength):
    config = Config((300, 300), H=1, K=29, V=13, decay=decay, strength=strength, initial_state=True)
    agrees(online_scaled_delta_rule, config)


# Each is some fifteen kernels to compile, so not every dtype comes at every size.
@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize(
    ("dtype", "K", "V"),
    [
        (torch.bfloat16, 128, 128),
        (torch.bfloat16, 128, 256),
        (torch.bfloat16, 100, 72),
        (torch.float16, 64, 64),
        (torch.float32, 128, 128),
        (torch.float32, 256, 256),
    ],
    ids=str,
)
def test_on_a_gpu_at_the_sizes_of_models(dtype, decay, K, V):
    config = Config((700, 0, 1, 300), packed=True, group=2, K=K, V=V, decay=decay, initial_state=True)
    problem = rounded(config, dtype)
    got = kernels(online_scaled_delta_rule, problem, dtype)
    assert_close(got, truth(online_scaled_delta_rule, problem), **BOUNDS[dtype])


@pytest.mark.parametrize("T", [200, pytest.param(2**23, marks=pytest.mark.gpu)])
def test_what_lies_far_into_a_tensor_is_found(T):
    """2**23 tokens of 2 heads and 130 channels are more numbers than 31 bits count."""
    size = 2 * T * 2 * 130
    if T > 200 and torch.cuda.mem_get_info()[0] < 8 * size:
        pytest.skip("takes a GPU with more free memory")
    tensors, options = make(Config((100,), H=1, group=2, K=16, V=130, decay="head")).arguments(delta_rule)
    tail = {name: x.to(DEVICE, torch.float16) for name, x in tensors.items()}
    whole = {name: x.new_zeros(1, T, *x.shape[2:]) for name, x in tail.items()}
    for name, x in tail.items():
        whole[name][:, -100:] = x
    cuts = torch.tensor([0, T - 100, T])
    with torch.no_grad():
        o, state = delta_rule(**whole, **options, cu_seqlens=cuts, backend="triton")
        want, last = delta_rule(**tail, **options, backend="triton")
    assert torch.equal(o[:, -100:], want)
    assert torch.equal(state[1], last[0])


@pytest.mark.parametrize("operator", BOTH, ids=lambda f: f.__name__)
def test_short_sequences_take_the_recurrent_kernel(monkeypatch, operator):
    """The same answer with and without a gradient, though the kernels differ."""
    problem = make(Config((9,), H=1, K=8, V=8, decay="head", retention="head", initial_scale="each"))
    tensors, options = problem.arguments(operator)
    tensors = {name: x.to(DEVICE) for name, x in tensors.items()}
    calls = []
    monkeypatch.setattr(autograd.decode, "forward", _counting(autograd.decode.forward, calls))
    with torch.no_grad():
        recurrent = operator(**tensors, **options, backend="triton")
    assert len(calls) == 1
    tensors["v"].requires_grad_()
    for a, b in zip(recurrent, operator(**tensors, **options, backend="triton")):
        assert relative_error(a, b.detach()) < 1e-6
    assert len(calls) == 1


def _counting(function, calls):
    return lambda *args, **kwargs: calls.append(args) or function(*args, **kwargs)
