"""The compiled decoding step gives what the layer gives, as closely as its dtype can say it."""

import copy

import pytest
import torch

from osdn.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention, decoding
from osdn.layers.mixers import Recurrence
from osdn.layers.precision import RMSNorm
from osdn.ops import available_backends
from osdn.ops.cpu import decode_step
from tests.ops.problems import relative_error, threads

pytestmark = pytest.mark.skipif("cpu" not in available_backends(), reason="no C++ compiler here")

SMALL = {"num_heads": 2, "head_k_dim": 9, "head_v_dim": 21}
WHOLE = {"num_heads": 3, "head_k_dim": 32, "head_v_dim": 64}  # of vectors
LARGE_STEP = {"eta": 0.2}
NEWTON = {"rule": "newton", "prior": 1.7}
VARIANTS = {
    "delta_net": (DeltaNet, None, WHOLE),
    "osdn": (DeltaNet, LARGE_STEP, WHOLE),
    "osdn-apf": (DeltaNet, LARGE_STEP | {"retention": "learned"}, SMALL),
    "gdn": (GatedDeltaNet, None, SMALL),
    "osgdn": (GatedDeltaNet, LARGE_STEP, SMALL),
    "osgdn-apf": (GatedDeltaNet, LARGE_STEP | {"retention": "tied"}, WHOLE),
    "kda": (KimiDeltaAttention, None, SMALL),
    "oskda": (KimiDeltaAttention, LARGE_STEP | {"retention": 0.9}, WHOLE),
    "oskda-apf": (KimiDeltaAttention, LARGE_STEP | {"retention": "learned"}, WHOLE),
    "oskda, tied": (KimiDeltaAttention, LARGE_STEP | {"retention": "tied"}, SMALL),
    "oskda, per channel": (KimiDeltaAttention, LARGE_STEP | {"retention": "learned_per_channel"}, SMALL),
    "newton": (DeltaNet, NEWTON | {"retention": 0.9}, SMALL),
    "newton, blocks": (DeltaNet, NEWTON | {"block_size": 8}, WHOLE),
    "newton, wide blocks": (DeltaNet, NEWTON | {"block_size": 32, "retention": "learned"}, WHOLE),
    "newton, odd blocks": (GatedDeltaNet, NEWTON | {"block_size": 3, "retention": "tied"}, SMALL),
    "newton, decay per channel": (KimiDeltaAttention, NEWTON | {"block_size": 3, "retention": "tied"}, SMALL),
    "newton, grouped": (
        GatedDeltaNet,
        NEWTON | {"block_size": 4, "retention": "learned"},
        WHOLE | {"num_v_heads": 6},
    ),
    "grouped": (GatedDeltaNet, LARGE_STEP, SMALL | {"num_v_heads": 6}),
    "write bias": (DeltaNet, None, SMALL | {"beta_bias": -2.0, "write_scale": 0.3, "norm_eps": 0.1}),
    "no box": (DeltaNet, {"bounds": None, "beta_aware": False, "initial_scale": "free"}, SMALL),
    "width 1": (DeltaNet, None, SMALL | {"conv_size": 1}),
    "width 6": (GatedDeltaNet, LARGE_STEP, SMALL | {"conv_size": 6}),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
STEPS, BATCH = 5, 2


def make(variant, dtype):
    kind, preconditioner, sizes = VARIANTS[variant]
    torch.manual_seed(0)
    mixer = kind(48, **sizes, preconditioner=preconditioner)
    with torch.no_grad():
        for parameter in mixer.parameters():  # nothing may hide behind a zero, a one or a small step
            parameter.add_(torch.randn(parameter.shape).mul(0.2))
    x = torch.randn(BATCH, 8 + STEPS, 48)
    mixer, x = mixer.to(dtype), x.to(dtype)
    return mixer, x


@torch.no_grad()
def decode(mixer, x, fused, monkeypatch):
    """Outputs of the last tokens one by one, and the last state."""
    calls = []
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(decoding, "fused", lambda *_: False)
        patch.setattr(decoding, "step", _counting(decoding.step, calls))
        _, state = mixer(x[:, :-STEPS], output_final_state=True)
        outputs = []
        for t in range(x.shape[1] - STEPS, x.shape[1]):
            y, state = mixer(x[:, t : t + 1], state)
            outputs.append(y)
    assert len(calls) == (STEPS if fused else 0)
    state = {name: s for name, s in state._asdict().items() if s is not None}
    return {"y": torch.cat(outputs, 1), **state}


def _counting(function, calls):
    def counted(*arguments):
        calls.append(1)
        return function(*arguments)

    return counted


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_are_those_of_the_layer(variant, dtype, monkeypatch):
    mixer, x = make(variant, dtype)
    got = decode(mixer, x, True, monkeypatch)
    want = decode(copy.deepcopy(mixer).double(), x.double(), False, monkeypatch)
    for name in want:
        assert got[name].dtype == dtype
        assert relative_error(got[name], want[name]) < (3e-6 if dtype == torch.float32 else 1e-13), name


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_they_are_rounded_where_the_layer_rounds(variant, dtype, monkeypatch):
    mixer, x = make(variant, dtype)
    got, layer = (decode(mixer, x, fused, monkeypatch) for fused in (True, False))
    exact = decode(copy.deepcopy(mixer).double(), x.double(), False, monkeypatch)
    for name in exact:
        assert got[name].dtype == layer[name].dtype
        own, theirs = (relative_error(r[name], exact[name]) for r in (got, layer))
        assert own < 1.1 * theirs + 1e-6, name
        assert relative_error(got[name], layer[name]) < torch.finfo(dtype).eps / 2, (
            name
        )  # few roundings differ


def test_threads_share_the_heads(monkeypatch):
    mixer = GatedDeltaNet(64, num_heads=4, head_k_dim=64, head_v_dim=128, num_v_heads=8, preconditioner={})
    x = torch.randn(3, 8 + STEPS, 64)
    alone = decode(mixer, x, True, monkeypatch)
    with threads(2):
        together = decode(mixer, x, True, monkeypatch)
    assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_a_state_given_is_left_as_it_was():
    mixer, x = make("osgdn", torch.float32)
    with torch.no_grad():
        _, state = mixer(x, output_final_state=True)
        before = [s.clone() for s in state]
        mixer(x[:, :1], state)
    assert all(torch.equal(a, b) for a, b in zip(state, before))


@every_variant
@torch.no_grad()
def test_a_state_may_be_moved_on_where_it_lies(variant):
    mixer, x = make(variant, torch.bfloat16)
    _, state = mixer(x, output_final_state=True)
    kept = state.map(torch.clone)
    for t in range(STEPS):
        want, kept = mixer(x[:, t : t + 1], kept)
        got, moved = mixer(x[:, t : t + 1], state, overwrite_state=True)
        assert all(a is b for a, b in zip(moved, state))
        assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(state, kept) if a is not None)


@torch.no_grad()
def test_a_scattered_state_is_copied():
    mixer, x = make("osdn", torch.float32)
    _, state = mixer(x, output_final_state=True)
    scattered = state.map(lambda s: torch.stack([s, s], -1)[..., 0])
    want, _ = mixer(x[:, :1], state)
    got, after = mixer(x[:, :1], scattered, overwrite_state=True)
    assert torch.equal(got, want)
    assert torch.equal(scattered.recurrent, state.recurrent)
    assert after.recurrent is not scattered.recurrent


@torch.no_grad()
def test_a_state_of_another_precision_is_continued():
    mixer, x = make("osdn", torch.bfloat16)
    _, state = mixer(x, output_final_state=True)
    y, after = mixer(x[:, :1], type(state)(*(s.double() for s in state)))
    want, _ = mixer(x[:, :1], state)
    assert torch.equal(y, want)
    assert after.q_tail.dtype == torch.bfloat16
    assert after.recurrent.dtype == torch.float32


def test_whoever_looks_inside_sees_the_layer():
    """Gradients, hooks, packed sequences, other backends and several tokens take the layer's own path."""
    mixer, x = make("osgdn", torch.float32)
    one = x[:, :1]
    assert not decoding.fused(mixer, one, None)  # a gradient may be asked for
    with torch.no_grad():
        assert decoding.fused(mixer, one, None)
        assert not decoding.fused(mixer, x, None)
        assert not decoding.fused(mixer, one[:1], torch.tensor([0, 1]))
        handle = mixer.recurrence.register_forward_hook(lambda *_: None)
        assert not decoding.fused(mixer, one, None)
        handle.remove()
        mixer.recurrence.backend = "chunkwise"
        assert not decoding.fused(mixer, one, None)
        mixer.recurrence.backend = "cpu"
        handle = mixer.g_proj.register_forward_pre_hook(lambda *_: None)
        assert not decoding.fused(mixer, one, None)
        handle.remove()
        assert decoding.fused(mixer, one, None)
        with torch.autocast("cpu", torch.bfloat16):
            assert not decoding.fused(mixer, one, None)
        other = DeltaNet(48, 2, 8, 8, preconditioner={"rule": "pgdn"})
        assert not decoding.fused(other, one, None)


def other_norm(mixer):
    mixer.o_norm = RMSNorm(mixer.head_v_dim, 1e-6)


def other_recurrence(mixer):
    class Louder(Recurrence):
        def forward(self, *arguments):
            out, *rest = super().forward(*arguments)
            return 2 * out, *rest

    mixer.recurrence = Louder()


def subclass(mixer):
    class Louder(DeltaNet):
        def read_out(self, o, x):
            return 2 * super().read_out(o, x)

    mixer.__class__ = Louder


def wider_norm(mixer):
    mixer.o_norm.double()


@pytest.mark.parametrize("change", [other_norm, other_recurrence, subclass, wider_norm])
def test_a_layer_that_was_changed_decodes_as_it_is_now(change):
    mixer, x = make("osdn", torch.float32)
    change(mixer)
    with torch.no_grad():
        whole, _ = mixer(x)
        _, state = mixer(x[:, :-1], output_final_state=True)
        last, _ = mixer(x[:, -1:], state)
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-4, atol=1e-5)


def test_parameters_of_a_precision_that_the_step_cannot_read_take_the_layers_path():
    """A norm in float32 in a mixer in float64, and a decay in float64 in one in float32."""
    for dtype, other in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        mixer, x = make("gdn", dtype)
        mixer.o_norm.to(other)
        with torch.no_grad():
            assert not decoding.fused(mixer, x[:, :1], None)
        mixer, x = make("gdn", dtype)
        mixer.A_log.data = mixer.A_log.data.to(other)
        with torch.no_grad():
            assert not decoding.fused(mixer, x[:, :1], None)


@torch.no_grad()
def test_a_step_can_be_traced():
    mixer, x = make("oskda-apf", torch.float32)
    _, state = mixer(x, output_final_state=True)
    want, _ = mixer(x[:, :1], state)
    graph = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    got, _ = graph(x[:, :1], state)
    torch.testing.assert_close(got, want)


def inputs(**changes):
    z = torch.zeros
    fields = {
        **{name: z(2, 8) for name in ("q", "k")},
        **{name: z(8, 4) for name in ("q_taps", "k_taps")},
        **{name: z(2, 3, 8) for name in ("q_tail", "k_tail")},
        "v": z(2, 10),
        "v_taps": z(10, 4),
        "v_tail": z(2, 3, 10),
        "beta": z(2, 2),
        "norm": z(5),
        "state": z(2, 2, 4, 5),
    }
    return decode_step.StepInputs(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": torch.zeros(2, 9)}, "v has shape"),
        ({"k_tail": torch.zeros(2, 2, 8)}, "k_tail has shape"),
        ({"q": torch.zeros(2, 12)}, "do not fit"),
        ({"scale": torch.zeros(2, 2, 3)}, "scale has shape"),
        ({"state": torch.zeros(2, 2, 4, 5).bfloat16()}, "state has dtype"),
        ({"beta": torch.zeros(2, 2).bfloat16()}, "beta has dtype"),
        ({"k": torch.zeros(2, 8, dtype=torch.int32)}, "k has dtype"),
        ({"norm": torch.zeros(5, dtype=torch.float64)}, "norm is torch.float64; with q in torch.float32 it"),
        ({"decay": torch.zeros(2, 2)}, "come together"),
        ({"gate": torch.zeros(2, 10)}, "activation is None"),
        (
            {"decay": torch.zeros(2, 2), "A_log": torch.zeros(2), "dt_bias": torch.zeros(8)},
            "dt_bias has shape",
        ),
    ],
)
def test_bad_input_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        decode_step.decode_step(inputs(**changes), decode_step.StepSettings())


def test_blocks_must_fit():
    for changes, size in (({}, 2), ({"scale": torch.ones(2, 2, 4)}, 3), ({"scale": torch.ones(2, 2, 4)}, 0)):
        with pytest.raises(
            ValueError, match=f"block_size is {size}; it needs a scale, and must divide the 4"
        ):
            decode_step.decode_step(inputs(**changes), decode_step.StepSettings(block_size=size))
    newton = decode_step.StepSettings(block_size=2)
    with pytest.raises(ValueError, match=r"scale has shape \[2, 2, 4\]"):
        decode_step.decode_step(inputs(scale=torch.ones(2, 2, 4)), newton)
    blocks, retention = torch.ones(2, 2, 2, 2, 2), torch.ones(2, 8)
    with pytest.raises(ValueError, match="retention has a number per channel"):
        decode_step.decode_step(inputs(scale=blocks, retention=retention), newton)


def test_the_operator_is_what_pytorch_expects_of_one():
    arguments = (*inputs(scale=torch.ones(2, 2, 4)), decode_step.StepSettings().numbers(4))
    torch.library.opcheck(torch.ops.osdn.cpu_decode_step, arguments)
