"""Every row against an independent formulation: masked attention, a convolution, a solved system, the code
of `transformers` or this project's own operators."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
from transformers.models.xlstm.modeling_xlstm import mlstm_recurrent_sequence_native

from osdn.ops import online_scaled_delta_rule
from osdn.zoo import RECURRENCES
from tests.zoo.conftest import make_case

# --------------------------------------------------------------------------------- independent formulations


def survival(gates: Tensor) -> Tensor:
    """What is left at t of a write at i: the product of gates after i, `[..., t, i, axes]`, 0 for i > t."""
    total = gates.log().cumsum(-2)
    gap = total.unsqueeze(-2) - total.unsqueeze(-3)
    T = gates.shape[-2]
    past = torch.ones(T, T, dtype=torch.bool).tril()[..., None]
    return torch.where(past, gap, -torch.inf).exp()


def attention(q, k, v, gates=None, value_gates=None):
    """sum_i <q_t, survival_ti * k_i> v_i, with survival over key channels, value channels or both."""
    ones = torch.ones(q.shape[-2], 1, dtype=q.dtype)
    keep_k = survival(ones if gates is None else gates)  # [..., t, i, K or 1]
    keep_v = survival(ones if value_gates is None else value_gates)
    weights = (q.unsqueeze(-2) * k.unsqueeze(-3) * keep_k).sum(-1, keepdim=True)
    return (weights * keep_v * v.unsqueeze(-3)).sum(-2)


def phi(x):
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def normalised(q, k, v):
    scores = (phi(q) @ phi(k).mT).tril()
    return scores / scores.sum(-1, keepdim=True) @ v


def gated_rfa(q, k, v, g):
    numerator = attention(q, (1 - g) * k, v, g)
    return numerator / attention(q, (1 - g) * k, torch.ones_like(v[..., :1]), g)


def s4(v, alpha, A, B, C, D):
    """The convolution with the kernel sum_n C_n B_n exp(-alpha exp(A_n) l), by FFT."""
    T = v.shape[-2]
    rate = alpha[..., None] * A.exp()  # [H, V, K]
    kernel = (C * B * (-rate * torch.arange(T)[:, None, None, None]).exp()).sum(-1)  # [T, H, V]
    spectrum = torch.fft.rfft(kernel.transpose(0, 1), 2 * T, -2) * torch.fft.rfft(v, 2 * T, -2)
    return torch.fft.irfft(spectrum, 2 * T, -2)[..., :T, :] + D[..., None, :] * v


def slots(q, k, v, phi_t, alpha=None):
    """Attention over slots: the slots at t are weighted sums of the keys and values so far."""
    gates = torch.ones_like(phi_t) if alpha is None else alpha
    weights = survival(gates) * phi_t.unsqueeze(-3)  # [..., t, i, M]
    keys, values = (torch.einsum("...tim,...ix->...tmx", weights, x) for x in (k, v))
    return F.scaled_dot_product_attention(q.unsqueeze(-2), keys, values, scale=1.0).squeeze(-2)


def mamba(q, k, v, alpha, A, D):
    gates = (-alpha[..., None] * A.exp()[:, None]).exp()  # [..., T, V, K]
    keep = survival(gates.flatten(-2)).unflatten(-1, gates.shape[-2:])  # [..., t, i, V, K]
    writes = (alpha * v)[..., None] * k[..., None, :]
    return torch.einsum("...tivk,...ivk,...tk->...tv", keep, writes, q) + D[:, None] * v


def rwkv6(q, k, v, alpha, D):
    """wkv_t = sum_{i<t} (prod_{i<j<t} w_j) k_i v_i + u k_t v_t, with u on key channels (arXiv:2404.05892)."""
    keep = F.pad(survival(alpha)[..., :-1, :, :], (0, 0, 0, 0, 1, 0))  # the state before token t
    keep = keep + torch.eye(k.shape[-2], dtype=k.dtype)[..., None] * D[:, None, None]
    weights = (q.unsqueeze(-2) * k.unsqueeze(-3) * keep).sum(-1)
    return weights @ v


def mlstm(q, k, v, f, i):
    numerator = attention(q, i * k, v, f)
    return numerator / attention(q, i * k, torch.ones_like(v[..., :1]), f).abs().clamp_min(1)


def delta(q, k, v, beta, gates=None):
    """The writes u solve (I + beta tril(K K', -1)) u = beta v; gates weigh the products of keys."""
    gates = torch.ones_like(beta) if gates is None else gates
    keep = survival(gates)
    gram = (k.unsqueeze(-2) * k.unsqueeze(-3) * keep).sum(-1)
    u = torch.linalg.solve(torch.eye(k.shape[-2], dtype=k.dtype) + beta * gram.tril(-1), beta * v)
    return (q.unsqueeze(-2) * k.unsqueeze(-3) * keep).sum(-1) @ u


def online_scaled(q, k, v, beta, alpha=None, r=None):
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
    decay = None if alpha is None else alpha.log().transpose(1, 2)
    decay = decay[..., 0] if decay is not None and decay.shape[-1] == 1 else decay
    retention = None if r is None else r[..., 0].transpose(1, 2)
    o, _, _ = online_scaled_delta_rule(
        q, k, v, beta[..., 0], log_decay=decay, retention=retention, scale=1.0, backend="reference"
    )
    return o.transpose(1, 2)


def longhorn(q, k, v, beta):
    """argmin |S - S_{t-1}|² + |S k - v|²_beta: for each value channel a small least-squares problem."""
    K = k.shape[-1]
    S, outputs = torch.zeros(*v.shape[:-2], v.shape[-1], K, dtype=v.dtype), []
    for t in range(v.shape[-2]):
        weight = beta[..., t, :].sqrt()
        rows = weight[..., None, None] * k[..., t, :][..., None, None, :]  # [..., V, 1, K]
        A = torch.cat([torch.eye(K, dtype=v.dtype).expand(*rows.shape[:-2], K, K), rows], -2)
        b = torch.cat([S, (weight * v[..., t, :])[..., None]], -1)[..., None]
        S = torch.linalg.lstsq(A, b).solution[..., 0]
        outputs.append((S * q[..., t, None, :]).sum(-1))
    return torch.stack(outputs, -2)


def mesa_net(q, k, v, beta, gamma, Lambda):
    """Regularised weighted least squares over the whole prefix, solved from scratch at every token."""
    weights = (survival(gamma) * beta.unsqueeze(-3))[..., 0].clamp_min(1e-300).sqrt()  # [..., t, i]
    outputs = []
    for t in range(v.shape[-2]):
        w = weights[..., t, : t + 1, None]
        ridge = Lambda.sqrt().diag_embed().expand(*k.shape[:-2], -1, -1)
        A = torch.cat([w * k[..., : t + 1, :], ridge], -2)
        b = torch.cat(
            [w * v[..., : t + 1, :], torch.zeros(*ridge.shape[:-1], v.shape[-1], dtype=v.dtype)], -2
        )
        outputs.append((torch.linalg.lstsq(A, b).solution.mT @ q[..., t, :, None])[..., 0])
    return torch.stack(outputs, -2)


def efla(q, k, v, beta):
    """A token's flow dS/dt = (v - S k) k' for time beta, as a joint matrix exponential of [S, v]."""
    K = k.shape[-1]
    S, outputs = torch.zeros(*v.shape[:-2], v.shape[-1], K, dtype=v.dtype), []
    for t in range(v.shape[-2]):
        key = k[..., t, :, None]
        flow = torch.cat([-key @ key.mT, key.mT], -2)  # d[S, v]/dt = [S, v] flow, and v stays
        flow = torch.cat([flow, torch.zeros_like(flow[..., :1])], -1)
        after = torch.cat([S, v[..., t, :, None]], -1) @ torch.linalg.matrix_exp(beta[..., t, :, None] * flow)
        S = after[..., :K]
        outputs.append((S * q[..., t, None, :]).sum(-1))
    return torch.stack(outputs, -2)


def comba(q, k, v, beta, alpha, b, D):
    """The writes u solve (I + beta b K S) u = beta v, where S_ti is what is left at t - 1 of a write at i."""
    keep = survival(alpha)[..., 0]
    before = F.pad(keep[..., :-1, :], (0, 0, 1, 0))  # nothing has decayed at t yet
    b, D = b[:, None, :], D[:, None, :]
    system = torch.eye(k.shape[-2], dtype=k.dtype) + beta * b * (k @ k.mT * before).tril(-1)
    return ((q - D * k) @ k.mT * keep) @ torch.linalg.solve(system, beta * v)


def gdn2(q, k, v, b, w, alpha):
    """The writes u solve (I + tril((b K) K', -1)) u = w v; the decay weighs the products of keys."""
    keep = survival(alpha)
    gram = ((b * k).unsqueeze(-2) * k.unsqueeze(-3) * keep).sum(-1)
    u = torch.linalg.solve(torch.eye(k.shape[-2], dtype=k.dtype) + gram.tril(-1), w * v)
    return (q.unsqueeze(-2) * k.unsqueeze(-3) * keep).sum(-1) @ u


def delta_product(q, k, v, beta, k2, v2, beta2, alpha):
    """The delta rule over twice as many tokens, reading every second one."""

    def between(a, b):
        return torch.stack([a, b], -2).flatten(-3, -2)

    none = torch.zeros_like(q)
    gates = between(alpha, torch.ones_like(alpha))
    return delta(between(none, q), between(k, k2), between(v, v2), between(beta, beta2), gates)[..., 1::2, :]


FORMULATIONS = {
    "linear_attention": lambda q, k, v: (q @ k.mT).tril() @ v,
    "linear_attention-kernel": lambda q, k, v: (phi(q) @ phi(k).mT).tril() @ v,
    "linear_attention-normalised": normalised,
    "gated_rfa": gated_rfa,
    "s4": s4,
    "abc": slots,
    "dfw": lambda q, k, v, beta, alpha: attention(q, k, v, alpha, beta),
    "retnet": lambda q, k, v, gamma: attention(q, k, v, gamma[:, None].expand(*v.shape[:-1], 1)),
    "mamba": mamba,
    "gla": lambda q, k, v, alpha: attention(q, k, v, alpha),
    "rwkv6": rwkv6,
    "hgrn2": lambda q, v, alpha: attention(q, 1 - alpha, v, alpha),
    "mlstm": mlstm,
    "mamba2": lambda q, k, v, gamma: attention(q, k, v, gamma),
    "gsa": slots,
    "delta_net": delta,
    "osdn": online_scaled,
    "osdn-apf": online_scaled,
    "gdn": lambda q, k, v, beta, alpha: delta(q, k, v, beta, alpha),
    "osgdn": online_scaled,
    "kda": lambda q, k, v, beta, alpha: delta(q, k, v, beta, alpha),
    "oskda": online_scaled,
    "longhorn": longhorn,
    "mesa_net": mesa_net,
    "efla": efla,
    "kaczmarz": lambda q, k, v, beta, alpha: delta(q, k, v, beta / (k.square().sum(-1, True) + 1e-6), alpha),
    "comba": comba,
    "gdn2": gdn2,
    "delta_product": delta_product,
}

# ---------------------------------------------------------------------------------------------- every row


def test_forward_and_gradient_match_an_independent_formulation(name):
    case = make_case(name)
    o, _ = case.recurrence.scan(case.inputs, case.weights, stepwise=True)
    expected = FORMULATIONS[name](**case.inputs, **case.weights)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-10)

    probe = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1))
    leaves = list(case.leaves.values())
    got = torch.autograd.grad((o * probe).sum(), leaves)
    wanted = torch.autograd.grad((expected * probe).sum(), leaves)
    for leaf, a, b in zip(case.leaves, got, wanted):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8, msg=lambda m, leaf=leaf: f"{leaf}: {m}")


def test_the_gradient_of_a_step_matches_finite_differences(name):
    case = make_case(name, T=3, K=3, V=2, M=2, batch=(1, 1))
    names = list(case.leaves)

    def outputs(*leaves):
        case.leaves = dict(zip(names, leaves))
        return case.recurrence.scan(case.inputs, case.weights, stepwise=True)[0]

    assert torch.autograd.gradcheck(outputs, tuple(case.leaves.values()), atol=1e-6)


def test_a_later_token_never_changes_an_earlier_output(name):
    case, other = make_case(name, seed=0), make_case(name, seed=1)
    cut = 6
    mixed = {
        x: torch.cat([a[..., :cut, :], other.inputs[x][..., cut:, :]], -2) for x, a in case.inputs.items()
    }
    before, _ = case.recurrence.scan(case.inputs, case.weights)
    after, _ = case.recurrence.scan(mixed, case.weights)
    assert torch.equal(before[..., :cut, :], after[..., :cut, :])
    assert not torch.allclose(before[..., cut:, :], after[..., cut:, :])


def test_cutting_and_continuing_gives_the_same_output_and_state(name):
    case = make_case(name)
    whole, last = case.recurrence.scan(case.inputs, case.weights, stepwise=True)
    pieces, state = [], None
    for cut in (slice(0, 4), slice(4, 4), slice(4, 5), slice(5, None)):
        piece = {x: a[..., cut, :] for x, a in case.inputs.items()}
        o, state = case.recurrence.scan(piece, case.weights, state, stepwise=True)
        pieces.append(o)
    assert torch.equal(torch.cat(pieces, -2), whole)
    assert all(torch.equal(state[x], last[x]) for x in last)


def test_the_reported_state_size_is_what_the_state_holds(name):
    case = make_case(name, K=7, V=5, M=3, batch=(2, 1))
    _, state = case.recurrence.scan(case.inputs, case.weights)
    start = case.recurrence.initial_state(2, 1, K=7, V=5, M=3)
    assert {x: a.shape for x, a in state.items()} == {x: a.shape for x, a in start.items()}
    assert sum(a.numel() for a in state.values()) == 2 * case.recurrence.state_size(K=7, V=5, M=3)


def test_a_missing_input_is_named():
    case = make_case("gla")
    inputs = case.inputs
    del inputs["alpha"]
    with pytest.raises(ValueError, match="gla also needs alpha"):
        case.recurrence.scan(inputs)


@pytest.mark.parametrize(
    ("name", "size", "formula"),
    [
        ("linear_attention", 128 * 256, "VK"),
        ("mlstm", 128 * 256 + 128, "VK + K"),
        ("osdn", 128 * 256 + 128, "VK + K"),
        ("gsa", 64 * (128 + 256), "KM + VM"),
        ("mesa_net", 128 * 256 + 128 * 128, "VK + K²"),
    ],
)
def test_state_sizes_of_known_rows(name, size, formula):
    row = RECURRENCES[name]
    assert row.state_size(K=128, V=256, M=64) == size
    assert row.state_formula == formula


# --------------------------------------------------------------------------------- other implementations


def test_mamba_matches_transformers():
    case = make_case("mamba", K=4, V=6, batch=(2, 1))
    x = {n: a.detach() for n, a in case.inputs.items()}
    w = {n: a.detach()[0] for n, a in case.weights.items()}
    o, _ = case.recurrence.scan(case.inputs, case.weights)
    v, dt, B, C = (x[n][:, 0].mT for n in ("v", "alpha", "k", "q"))
    expected = mamba_selective_scan(v, dt, -w["A"].exp(), B, C, w["D"])
    torch.testing.assert_close(o[:, 0].mT, expected, rtol=1e-5, atol=1e-5)


def test_mamba2_matches_transformers_chunked_scan():
    case = make_case("mamba2", T=13)
    x = {n: a.detach().transpose(1, 2).float() for n, a in case.inputs.items()}  # [B, T, H, ...]
    A = -torch.tensor([0.5, 1.0, 2.0])
    dt = x["gamma"][..., 0].log() / A
    expected = mamba2_chunk_scan(x["v"] / dt[..., None], dt, A, x["k"], x["q"], chunk_size=4)
    o, _ = case.recurrence.scan(case.inputs)
    torch.testing.assert_close(o.transpose(1, 2).float(), expected, rtol=1e-4, atol=1e-4)


def test_mlstm_matches_transformers_stabilised_form():
    case = make_case("mlstm", K=4)
    x = case.inputs
    fgate = (x["f"] / (1 - x["f"])).log()[..., 0]
    expected = mlstm_recurrent_sequence_native(
        x["q"] * 4**0.5, x["k"], x["v"], x["i"].log()[..., 0], fgate, eps=0.0, dtype_state=torch.float64
    )
    expected = expected[0] if isinstance(expected, tuple) else expected
    o, _ = case.recurrence.scan(x)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "function"), [("gdn", torch_recurrent_gated_delta_rule), ("kda", recurrent_kimi_delta_attention)]
)
def test_gated_delta_rules_match_transformers(name, function):
    case = make_case(name)
    x = {n: a.transpose(1, 2) for n, a in case.inputs.items()}
    g = x["alpha"].log()
    expected, _ = function(
        x["q"] * 5**0.5, x["k"], x["v"], g[..., 0] if name == "gdn" else g, x["beta"][..., 0], None, False
    )
    o, _ = case.recurrence.scan(case.inputs)
    torch.testing.assert_close(o.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------- where the printed table is not the model


def test_rwkv6_as_printed_is_not_the_cited_model():
    """The table's (d * v) k' differs from the cited v (d * k)' as soon as d is not constant."""
    case = make_case("rwkv6", K=3, V=3)
    x, D = case.inputs, case.weights["D"]
    cited = FORMULATIONS["rwkv6"](**x, D=D)
    past = FORMULATIONS["rwkv6"](**x, D=torch.zeros_like(D))
    printed = past + D[:, None] * x["v"] * (x["k"] * x["q"]).sum(-1, keepdim=True)
    o, _ = case.recurrence.scan(x, case.weights)
    torch.testing.assert_close(o, cited)
    assert not torch.allclose(o, printed)


def test_gsa_with_complementary_gates_is_the_cited_model():
    """arXiv:2409.07146 writes slots as convex combinations: slot <- alpha slot + (1 - alpha) key."""
    case = make_case("gsa", batch=(1,))
    x = case.inputs
    x["phi_t"] = 1 - x["alpha"]
    _, state = case.recurrence.scan(x)
    keys = torch.zeros(1, 4, 5, dtype=torch.float64)
    for t in range(x["q"].shape[-2]):
        keys = torch.lerp(x["k"][:, t, None, :], keys, x["alpha"][:, t, :, None])
    torch.testing.assert_close(state["Sk"].mT, keys)
    assert state["Sk"].abs().max() <= x["k"].abs().max()


def test_longhorn_without_the_proximal_term_is_not_determined():
    """Every S with S k = v minimises the printed loss, regardless of the past."""
    case = make_case("longhorn", batch=(1,), T=2)
    k, v = case.inputs["k"][0, 1], case.inputs["v"][0, 1]
    minimiser = torch.outer(v, k) / k.square().sum()
    null = torch.outer(torch.ones_like(v), torch.linalg.svd(k[None]).Vh[-1])
    for S in (minimiser, minimiser + 5 * null):
        torch.testing.assert_close(S @ k, v)
