"""flash-linear-attention on a CPU, with our kernels in its registry; needs an environment with it."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import osdn
from osdn.layers import GatedDeltaNet, KimiDeltaAttention
from tests.hosts.families import make, tokens
from tests.ops.problems import relative_error

fla = pytest.importorskip("fla")

from fla.layers import GatedDeltaNet as FlaGatedDeltaNet  # noqa: E402
from fla.layers import KimiDeltaAttention as FlaKimiDeltaAttention  # noqa: E402
from fla.models import (  # noqa: E402
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    KDAConfig,
    KDAForCausalLM,
)
from fla.ops.gated_delta_rule import (  # noqa: E402
    chunk_gated_delta_rule,
    fused_recurrent,
    fused_recurrent_gated_delta_rule,
    naive_recurrent_gated_delta_rule,
)
from fla.ops.gated_delta_rule.gate import naive_gdn_gate  # noqa: E402
from fla.ops.kda import chunk_kda, fused_recurrent_kda  # noqa: E402
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate  # noqa: E402
from fla.ops.kda.naive import naive_recurrent_kda  # noqa: E402

B, T, H, HV, K, V = 2, 21, 2, 4, 9, 6
LAYERS = [(FlaGatedDeltaNet, GatedDeltaNet), (FlaKimiDeltaAttention, KimiDeltaAttention)]


def problem(per_channel):
    """q, k, v, g, beta, A_log, dt_bias and an initial state; g and beta as projections would give them."""
    g = torch.Generator().manual_seed(0)
    decays = (K,) if per_channel else ()
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV, *decays), (B, T, HV), (HV,)]
    shapes += [(HV * K if per_channel else HV,), (B, HV, K, V)]
    return [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]


def truth(per_channel, inputs, bound=None, scale=None):
    """The results of fla's own reference functions."""
    q, k, v, g, beta, A_log, dt_bias, state = inputs
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    beta = 2 * beta.sigmoid()
    if not per_channel:
        q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
        g = naive_gdn_gate(g, A_log, dt_bias)
        return naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale, state, True)
    g = (
        naive_kda_gate(g, A_log, dt_bias)
        if bound is None
        else naive_kda_lowerbound_gate(g, A_log, dt_bias, bound)
    )
    return naive_recurrent_kda(q, k, v, g, beta, scale, state, True)


def raw(inputs):
    """Arguments that make fla's functions compute everything that `truth` does."""
    q, k, v, g, beta, A_log, dt_bias, state = inputs
    flags = (
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
    )
    settings = dict.fromkeys((*flags, "output_final_state"), True)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    return given | settings | {"initial_state": state}


def with_gradients(results, inputs):
    outputs, state = results
    loss = (outputs * torch.linspace(-1, 1, outputs.numel()).view_as(outputs)).sum() + state.square().sum()
    return [outputs, state, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize(
    ("function", "options"),
    [(chunk_gated_delta_rule, {}), (chunk_kda, {}), (chunk_kda, {"lower_bound": -5.0, "safe_gate": True})],
)
@pytest.mark.parametrize("v_first", [False, True])
def test_functions_and_gradients_are_their_reference(function, options, v_first):
    osdn.accelerate()
    per_channel, inputs = function is chunk_kda, problem(function is chunk_kda)
    settings = raw(inputs) | options | {"scale": 0.3}
    if v_first:
        settings |= {"initial_state": settings["initial_state"].mT, "state_v_first": True}
    out, state = function(**settings)
    ours = with_gradients((out, state.mT if v_first else state), inputs)
    expected = with_gradients(truth(per_channel, inputs, options.get("lower_bound"), 0.3), inputs)
    for got, exact in zip(ours, expected, strict=True):
        assert relative_error(got.detach(), exact.detach().double()) < 1e-5


@pytest.mark.parametrize("per_channel", [False, True])
@torch.no_grad()
def test_single_steps_continue(per_channel):
    osdn.accelerate()
    inputs = problem(per_channel)
    function = fused_recurrent_kda if per_channel else fused_recurrent_gated_delta_rule
    expected, final = truth(per_channel, inputs)
    settings, outs = raw(inputs), []
    for t in range(T):
        part = {name: settings[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        out, settings["initial_state"] = function(**settings | part)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(settings["initial_state"], final, rtol=1e-4, atol=1e-5)


def test_packed_sequences_and_positional_arguments():
    osdn.accelerate()
    q, k, v, g, beta, *_ = (x.detach() for x in problem(False))
    given = (q, k, v, F.logsigmoid(g), beta.sigmoid())
    rows = [x.flatten(0, 1)[None] for x in given]
    packed, state = chunk_gated_delta_rule(
        *rows, None, None, True, True, cu_seqlens=torch.tensor([0, T, 2 * T])
    )
    alone, states = chunk_gated_delta_rule(*given, None, None, True, True)
    torch.testing.assert_close(packed.view_as(alone), alone)
    torch.testing.assert_close(state, states)


@pytest.mark.parametrize(("theirs", "ours"), LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_ours(theirs, ours, dtype):
    osdn.accelerate()
    torch.manual_seed(0)
    layer = theirs(hidden_size=32, head_dim=8, num_heads=2, expand_v=1, norm_eps=1e-6).to(dtype)
    mixer = ours(32, num_heads=2, head_k_dim=8, head_v_dim=8)
    mixer.load_state_dict(layer.state_dict())
    mixer.double()
    x = torch.randn(2, 70, 32, dtype=dtype)
    results = []
    for module, given in ((layer, x.clone()), (mixer, x.double())):
        y = module(given.requires_grad_())[0]
        y.square().sum().backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        results.append({"outputs": y.detach(), "inputs": given.grad, **grads})
    bound = 1e-5 if dtype == torch.float32 else 0.05
    got, expected = results
    assert got.keys() == expected.keys()
    assert all(relative_error(got[name], exact) < bound for name, exact in expected.items())


@pytest.mark.parametrize(
    ("config", "model"), [(GatedDeltaNetConfig, GatedDeltaNetForCausalLM), (KDAConfig, KDAForCausalLM)]
)
def test_models_train_and_generate(config, model):
    osdn.accelerate()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16, "vocab_size": 61}
    # without its fused norms and losses, which only exist on GPUs
    network = model(config(**sizes, fuse_norm=False, fuse_cross_entropy=False, pad_token_id=0))
    ids = tokens(2, 19)
    network(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    network.eval()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # padded on the left
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    cached = network.generate(ids, **settings)
    assert torch.equal(cached, network.generate(ids, use_cache=False, **settings))
    alone = network.generate(ids[1:, 4:], max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(cached[1:, 4:], alone)


def test_undo_stops_handling_calls():
    q, k, v, g, beta, *_ = problem(False)
    call = (q, k, v, F.logsigmoid(g), beta.sigmoid())
    before = fused_recurrent.fused_recurrent_gated_delta_rule_fwd
    with pytest.raises(RuntimeError, match="active drivers"):  # Triton finds no GPU
        chunk_gated_delta_rule(*call)
    assert osdn.accelerate()[-1] == "fla"
    chunk_gated_delta_rule(*call)
    assert osdn.accelerate(undo=True)[-1] == "fla"
    with pytest.raises(RuntimeError, match="active drivers"):
        chunk_gated_delta_rule(*call)
    assert fused_recurrent.fused_recurrent_gated_delta_rule_fwd is before


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_models_of_transformers_work_alongside(family):
    model, ids = make(family), tokens(2, 11)
    with pytest.raises(RuntimeError, match="active drivers"):
        model(ids)
    osdn.accelerate()
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


def test_a_later_import_is_accelerated():
    code = (
        "import osdn, sys\n"
        "assert osdn.accelerate() == [] and 'fla' not in sys.modules\n"
        "import fla\n"
        "assert osdn.accelerate() == ['fla'], osdn.accelerate()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
