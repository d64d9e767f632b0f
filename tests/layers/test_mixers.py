"""The mixers against `transformers`' own layers, against their formulas, and against themselves in pieces."""

import pytest
import torch
from torch.nn import functional as F
from transformers import KimiLinearConfig, OlmoHybridConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

from osdn.layers import (
    DeltaNet,
    GatedDeltaNet,
    KimiDeltaAttention,
    MixerState,
    PreconditionerConfig,
)
from osdn.layers.preconditioner import OPERATORS
from osdn.layers.updates import Comba, DeltaProduct, GatedDeltaNet2, StepOfLength

SHAPE = {"hidden_size": 20, "num_heads": 2, "head_k_dim": 6, "head_v_dim": 10}
STRONG = {"eta": 2.0}  # so that the scale reaches its bounds within a few tokens
LAYERS = [
    (DeltaNet, None, {}),
    (DeltaNet, STRONG, {}),
    (DeltaNet, STRONG | {"retention": "learned", "initial_scale": "projected"}, {}),
    (DeltaNet, STRONG | {"retention": 0.9, "initial_scale": "free", "beta_aware": False}, {}),
    (GatedDeltaNet, None, {"num_v_heads": 4}),
    (GatedDeltaNet, STRONG | {"retention": "tied"}, {"num_v_heads": 4}),
    (GatedDeltaNet, STRONG | {"bounds": None}, {"conv_size": 2}),
    (KimiDeltaAttention, None, {}),
    (KimiDeltaAttention, STRONG | {"retention": "tied"}, {}),
    (KimiDeltaAttention, STRONG | {"retention": "learned_per_channel"}, {"conv_size": 1}),
    (
        DeltaNet,
        {"rule": "newton", "block_size": 2, "prior": 2.0, "retention": "learned"},
        {"beta_bias": -1.0},
    ),
    (GatedDeltaNet, {"rule": "newton", "block_size": 6}, {"num_v_heads": 4, "write_scale": 2.0}),
    (KimiDeltaAttention, {"rule": "newton", "retention": "tied"}, {}),
    (KimiDeltaAttention, {"rule": "newton", "block_size": 3, "retention": "tied"}, {}),
    (DeltaNet, {"rule": "pgdn"}, {"write_scale": 0.5}),
    (GatedDeltaNet, {"rule": "pgdn", "squash": 2.0}, {"num_v_heads": 4, "beta_bias": 0.5}),
    (DeltaNet, None, {"update_rule": "longhorn"}),
    (GatedDeltaNet, None, {"update_rule": "efla", "num_v_heads": 4}),
    (GatedDeltaNet, None, {"update_rule": "kaczmarz", "write_scale": 2.0}),
    (DeltaNet, None, {"update_rule": "comba"}),
    (GatedDeltaNet, None, {"update_rule": "comba", "num_v_heads": 4, "beta_bias": -1.0}),
    (KimiDeltaAttention, None, {"update_rule": "comba"}),
    (GatedDeltaNet, None, {"update_rule": "gdn2", "num_v_heads": 4, "write_scale": 2.0}),
    (KimiDeltaAttention, None, {"update_rule": "gdn2", "beta_bias": -1.0}),
    (GatedDeltaNet, None, {"update_rule": "product-2", "num_v_heads": 4}),
    (KimiDeltaAttention, None, {"update_rule": "product-3", "beta_bias": -1.0}),
]
layers = pytest.mark.parametrize(("layer", "preconditioner", "shape"), LAYERS)


def make(layer, preconditioner=None, dtype=torch.float64, **shape):
    torch.manual_seed(0)
    mixer = layer(**(SHAPE | shape), preconditioner=preconditioner).to(dtype)
    with torch.no_grad():
        for p in mixer.parameters():  # away from the values they start with
            p.add_(torch.randn_like(p) * 0.3)
    return mixer


def by_hand(mixer, x):
    """The mixer's formulas, one token and one head at a time."""
    p = dict(mixer.named_parameters())
    H, HV, K, V = mixer.num_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    q, k, v = (by_hand_convolution(x @ p[f"{n}_proj.weight"].T, p[f"{n}_conv1d.weight"]) for n in "qkv")
    settings = mixer.preconditioner.config if mixer.preconditioner else None
    gate_bias = p.get("b_proj.bias", torch.zeros(()))
    update = UPDATES[type(mixer.update)] if mixer.update else None
    outputs = torch.zeros(*x.shape[:2], HV, V, dtype=x.dtype)
    for b in range(x.shape[0]):
        for h in range(HV):
            key_head = h // (HV // H)
            S, d = torch.zeros(K, V, dtype=x.dtype), torch.ones(K, dtype=x.dtype)
            write_key = BY_HAND[settings.rule](settings, p, key_head, K) if settings else None
            if isinstance(settings, PreconditionerConfig) and settings.initial_scale:
                d = p["preconditioner.log_scale"][h].exp()
                d = d.clamp(*settings.bounds) if settings.initial_scale == "projected" else d
            for t in range(x.shape[1]):
                x_t = x[b, t]
                if update:
                    gates = mixer.write_scale * (p["b_proj.weight"] @ x_t + gate_bias).sigmoid()
                    decay = by_hand_decay(mixer, p, x_t, h)
                    S, o = update(mixer, p, S, decay[:, None], q[b, t], k[b, t], v[b, t], gates, h)
                    outputs[b, t, h] = o / (o.square().mean() + 1e-6).sqrt() * p["o_norm.weight"]
                    continue
                q_t, k_t = (z[b, t, key_head * K : (key_head + 1) * K] for z in (q, k))
                q_t, k_t = (z / (z.square().sum() + 1e-6).sqrt() for z in (q_t, k_t))
                beta = mixer.write_scale * (p["b_proj.weight"] @ x_t + gate_bias)[h].sigmoid()
                decay = by_hand_decay(mixer, p, x_t, h)
                S = decay[:, None] * S
                w_t = d * k_t
                if write_key:
                    w_t = write_key(x_t, k_t, beta, by_hand_retention(settings, p, x_t, h, K, decay))
                elif settings:
                    r = by_hand_retention(settings, p, x_t, h, K, decay)
                    b_t = beta if settings.beta_aware else 1.0
                    d = r * d + settings.eta * b_t * (1 - b_t * d @ k_t**2) / max(k_t @ k_t, 1e-6) * k_t**2
                    d = d if settings.bounds is None else d.clamp(*settings.bounds)
                S = S + torch.outer(w_t, beta * (v[b, t, h * V : (h + 1) * V] - S.T @ k_t))
                o = K**-0.5 * S.T @ q_t
                outputs[b, t, h] = o / (o.square().mean() + 1e-6).sqrt() * p["o_norm.weight"]
    flat = outputs.flatten(2)
    if isinstance(mixer, GatedDeltaNet):
        flat = flat * F.silu(x @ p["g_proj.weight"].T)
    if isinstance(mixer, KimiDeltaAttention):
        flat = flat * (x @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"]).sigmoid()
    return flat @ p["o_proj.weight"].T


def head(x, i, size):
    return x[i * size : (i + 1) * size]


def unit(x):
    return x / (x.square().sum() + 1e-6).sqrt()


def by_hand_step(mixer, p, S, decay, q, k, v, gates, h):
    K, V, key_head = mixer.head_k_dim, mixer.head_v_dim, h // (mixer.num_v_heads // mixer.num_heads)
    k_t, beta, S = head(k, key_head, K), gates[h], decay * S
    n = k_t @ k_t
    step = {
        "longhorn_step": lambda: 1 / (1 / beta + n),
        "efla_step": lambda: (1 - (-beta * n).exp()) / n,
        "kaczmarz_step": lambda: beta / (n + 1e-6),
    }[mixer.update.step.__name__]()
    S = S + step * torch.outer(k_t, head(v, h, V) - S.T @ k_t)
    return S, K**-0.5 * S.T @ unit(head(q, key_head, K))


def by_hand_comba(mixer, p, S, decay, q, k, v, gates, h):
    K, V, key_head = mixer.head_k_dim, mixer.head_v_dim, h // (mixer.num_v_heads // mixer.num_heads)
    q_t, k_t = unit(head(q, key_head, K)), unit(head(k, key_head, K))
    error = head(v, h, V) - p["update.feedback"][h].sigmoid() * S.T @ k_t
    S = decay * S + gates[h] * torch.outer(k_t, error)
    return S, K**-0.5 * S.T @ (q_t - p["update.correction"][h] * k_t)


def by_hand_gdn2(mixer, p, S, decay, q, k, v, gates, h):
    K, V, key_head = mixer.head_k_dim, mixer.head_v_dim, h // (mixer.num_v_heads // mixer.num_heads)
    k_t, S = unit(head(k, key_head, K)), decay * S
    erase, write = head(gates, h, K), head(gates[mixer.num_v_heads * K :], h, V)
    S = S - torch.outer(k_t, erase * k_t) @ S + torch.outer(k_t, write * head(v, h, V))
    return S, K**-0.5 * S.T @ unit(head(q, key_head, K))


def by_hand_product(mixer, p, S, decay, q, k, v, gates, h):
    H, HV, K, V = mixer.num_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    S, key_head = decay * S, h // (HV // H)
    for i in range(mixer.update.writes):
        k_t, beta = unit(head(k, i * H + key_head, K)), gates[i * HV + h]
        S = S + beta * torch.outer(k_t, head(v, i * HV + h, V) - S.T @ k_t)
    return S, K**-0.5 * S.T @ unit(head(q, key_head, K))


UPDATES = {
    StepOfLength: by_hand_step,
    Comba: by_hand_comba,
    GatedDeltaNet2: by_hand_gdn2,
    DeltaProduct: by_hand_product,
}


def by_hand_newton(settings, p, key_head, K):
    """A whole matrix P, of which only the blocks are ever written."""
    b = settings.block_size
    same_block = torch.block_diag(*[torch.ones(b, b, dtype=torch.float64)] * (K // b))
    P = settings.prior * torch.eye(K, dtype=torch.float64)

    def write_key(x_t, k_t, beta, r):
        nonlocal P
        y = P @ k_t
        n = 1 + beta * (k_t @ y)
        P = P - beta / n * same_block * torch.outer(y, y)
        if settings.retention == "tied":
            r = r.log().unflatten(0, (-1, b)).mean(1).exp().repeat_interleave(b)
        r = torch.as_tensor(r, dtype=P.dtype).expand(K)
        P = r[:, None] * P + torch.diag(1 - r) * settings.prior
        return y / n

    return write_key


def by_hand_pgdn(settings, p, key_head, K):
    p = {name.removeprefix("preconditioner."): x for name, x in p.items() if "preconditioner" in name}
    A = torch.zeros(K, dtype=torch.float64)

    def write_key(x_t, k_t, beta, r):
        nonlocal A
        a, gain = (p[f"{n}_proj.weight"][key_head] @ x_t for n in "ab")
        g = -p["A_log"][key_head].exp() * F.softplus(a + p["dt_bias"][key_head])
        A = g.exp() * A + gain.sigmoid() * k_t**2
        z = (A + settings.eps).log() - p["center"][key_head]
        return settings.squash ** (-z / (1 + z.abs())) * k_t

    return write_key


BY_HAND = {"hypergradient": lambda *_: None, "newton": by_hand_newton, "pgdn": by_hand_pgdn}


def by_hand_convolution(x, weight):
    width = weight.shape[2]
    padded = F.pad(x, (0, 0, width - 1, 0))
    return F.silu(sum(weight[:, 0, i] * padded[:, i : i + x.shape[1]] for i in range(width)))


def by_hand_decay(mixer, p, x_t, h):
    K = mixer.head_k_dim
    if isinstance(mixer, GatedDeltaNet):
        g = -p["A_log"][h].exp() * F.softplus((p["a_proj.weight"] @ x_t)[h] + p["dt_bias"][h])
        return g.exp().expand(K)
    if isinstance(mixer, KimiDeltaAttention):
        f = p["f_proj.1.weight"] @ (p["f_proj.0.weight"] @ x_t) + p["dt_bias"]
        return (-p["A_log"][h].exp() * F.softplus(f[h * K : (h + 1) * K])).exp()
    return torch.ones(K, dtype=x_t.dtype)


def by_hand_retention(settings, p, x_t, h, K, decay):
    if settings.rule == "pgdn":
        return None
    if settings.retention == "tied":
        return decay
    if isinstance(settings.retention, str):
        r = (p["preconditioner.retention.weight"] @ x_t + p["preconditioner.retention.bias"]).sigmoid()
        return r[h] if settings.retention == "learned" else r[h * K : (h + 1) * K]
    return 1.0 if settings.retention is None else settings.retention


@layers
def test_outputs_and_gradients_follow_the_formulas(layer, preconditioner, shape):
    mixer = make(layer, preconditioner, **shape)
    x = torch.randn(2, 7, 20, dtype=torch.float64, requires_grad=True)
    y, state = mixer(x)
    assert state is None
    expected = by_hand(mixer, x)
    torch.testing.assert_close(y, expected, rtol=1e-8, atol=1e-10)
    weights = torch.randn_like(y)
    inputs = [x, *mixer.parameters()]
    ours = torch.autograd.grad((y * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-10)
    assert all(g.abs().max() > 0 for g in ours)


@pytest.mark.parametrize("num_v_heads", [2, 4])
def test_gated_deltanet_is_the_layer_of_olmo_hybrid(num_v_heads):
    mixer = make(GatedDeltaNet, dtype=torch.float32, num_v_heads=num_v_heads, norm_eps=1e-5)
    config = OlmoHybridConfig(
        hidden_size=20,
        num_attention_heads=2,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=num_v_heads,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        linear_allow_neg_eigval=False,
    )
    theirs = OlmoHybridGatedDeltaNet(config, layer_idx=0)
    weights = mixer.state_dict()
    weights["conv1d.weight"] = torch.cat([weights.pop(f"{n}_conv1d.weight") for n in "qkv"])
    theirs.load_state_dict(weights)
    x = torch.randn(2, 70, 20)
    torch.testing.assert_close(mixer(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


def test_kimi_delta_attention_is_the_layer_of_kimi_linear():
    mixer = make(KimiDeltaAttention, dtype=torch.float32, head_v_dim=6, norm_eps=1e-5)
    mixer.g_proj[1].bias.data.zero_()  # theirs has none
    config = KimiLinearConfig(
        hidden_size=20, linear_num_heads=2, linear_head_dim=6, rms_norm_eps=1e-5, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = KimiLinearDeltaAttention(config, layer_idx=0)
    weights = mixer.state_dict()
    names = {
        "f_proj.0": "forget_gate.f_a_proj",
        "f_proj.1": "forget_gate.f_b_proj",
        "dt_bias": "forget_gate.dt_bias",
    }
    names |= {"g_proj.0": "g_a_proj", "g_proj.1": "g_b_proj", "A_log": "forget_gate.A_log"}
    del weights["g_proj.1.bias"]
    for ours, name in names.items():
        weights = {key.replace(ours, name): value for key, value in weights.items()}
    weights["conv1d.weight"] = torch.cat([weights.pop(f"{n}_conv1d.weight") for n in "qkv"])
    weights["forget_gate.A_log"] = weights["forget_gate.A_log"].view(1, 1, -1, 1)
    theirs.load_state_dict(weights)
    x = torch.randn(2, 70, 20)
    torch.testing.assert_close(mixer(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


@layers
def test_pieces_and_their_gradients_are_the_whole(layer, preconditioner, shape):
    mixer = make(layer, preconditioner, **shape)
    x = torch.randn(2, 9, 20, dtype=torch.float64, requires_grad=True)
    whole, final = mixer(x, output_final_state=True)
    state, pieces = None, []
    for piece in x.split([4, 1, 1, 3], 1):
        y, state = mixer(piece, state, output_final_state=True)
        pieces.append(y)
    y = torch.cat(pieces, 1)
    torch.testing.assert_close(y, whole)
    torch.testing.assert_close(state, final)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), x)[0], torch.autograd.grad(whole.square().sum(), x)[0]
    )


@layers
def test_packed_sequences_are_each_alone(layer, preconditioner, shape):
    mixer = make(layer, preconditioner, **shape)
    lengths = [3, 0, 1, 6]
    x = torch.randn(1, 10, 20, dtype=torch.float64)
    first = torch.randn(4, 5, 20, dtype=torch.float64)
    _, state = mixer(first, output_final_state=True)
    y, last = mixer(x, state, cu_seqlens=torch.tensor([0, 3, 3, 4, 10]), output_final_state=True)
    for n, piece in enumerate(x.split(lengths, 1)):
        one = MixerState(*(None if z is None else z[n : n + 1] for z in state))
        alone, end = mixer(piece, one, output_final_state=True) if lengths[n] else (piece, one)
        torch.testing.assert_close(y[:, sum(lengths[:n]) : sum(lengths[: n + 1])], alone)
        torch.testing.assert_close(MixerState(*(None if z is None else z[n : n + 1] for z in last)), end)


def test_comba_survives_strong_decays_in_float16():
    torch.manual_seed(0)
    mixer = GatedDeltaNet(64, 2, 16, 16, update_rule="comba")
    with torch.no_grad():
        mixer.dt_bias.fill_(30.0)  # decays of exp(-30) and less
        x = torch.randn(1, 20, 64)
        want, _ = mixer(x)
        got, _ = mixer.half()(x.half())
    assert got.isfinite().all()
    assert (got.float() - want).norm() < 0.01 * want.norm()


def test_decay_parameters_start_in_their_ranges():
    torch.manual_seed(0)
    for layer, low in [(GatedDeltaNet, 0.0), (KimiDeltaAttention, 1.0)]:
        mixer = layer(hidden_size=8, num_heads=400, head_k_dim=2, head_v_dim=2)
        rates, steps = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
        assert low <= rates.min() < low + 0.5
        assert 15.5 < rates.max() <= 16.001
        assert 0.000999 < steps.min() < 0.0012
        assert 0.08 < steps.max() < 0.1001
        assert 0.007 < steps.log().mean().exp() < 0.013  # log-uniform: its middle is 0.01


def test_a_state_given_is_continued_and_returned_unless_declined():
    mixer = make(DeltaNet, {})
    x = torch.randn(2, 6, 20, dtype=torch.float64)
    whole, none = mixer(x)
    assert none is None
    parts, state = [], None
    for t in range(6):
        y, state = mixer(x[:, t : t + 1], state, output_final_state=True if state is None else None)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert mixer(x, state, output_final_state=False)[1] is None


@pytest.mark.parametrize("cuts", [None, torch.tensor([0, 2, 6])])
def test_a_state_of_another_precision_is_continued(cuts):
    mixer = make(DeltaNet, {}).float()
    x = torch.randn(1, 6, 20)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = mixer(x, cu_seqlens=cuts, output_final_state=True)
    y, _ = mixer(x, state, cu_seqlens=cuts)
    assert y.dtype == torch.float32
    assert y.isfinite().all()


def test_a_state_of_other_sequences_or_another_mixer_is_refused():
    x = torch.randn(2, 6, 20, dtype=torch.float64)
    plain, scaled = make(DeltaNet), make(DeltaNet, {})
    state, with_scale = (mixer(x, output_final_state=True)[1] for mixer in (plain, scaled))
    with pytest.raises(ValueError, match=r"state.recurrent has shape \(2, .* for 1 sequences .* be \(1, "):
        plain(x[:1], state)
    with pytest.raises(ValueError, match=r"state.recurrent has shape \(2, .* for 3 sequences"):
        plain(x[:1], state, cu_seqlens=torch.tensor([0, 1, 2, 6]))
    with pytest.raises(ValueError, match=r"state.scale has shape None"):
        scaled(x, state)
    with pytest.raises(ValueError, match=r"state.scale has shape \(2, .*must be None"):
        plain(x, with_scale)
    with pytest.raises(ValueError, match="state is a dict"):
        plain(x, {})


@pytest.mark.parametrize("name", ["num_heads", "num_v_heads", "head_k_dim", "conv_size"])
def test_sizes_of_zero_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be a positive whole number"):
        make(GatedDeltaNet, **{name: 0})


def test_wrong_arguments_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"x has shape \[5, 20\]; it must be \[B, T, 20\]"):
        make(DeltaNet)(torch.randn(5, 20, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x has shape \[1, 5, 3\]"):
        make(DeltaNet)(torch.randn(1, 5, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="backend is 'gpu'"):
        make(DeltaNet, backend="gpu")
    with pytest.raises(ValueError, match="num_v_heads is 3; it must be a multiple of num_heads, 2"):
        make(GatedDeltaNet, num_v_heads=3)
    with pytest.raises(ValueError, match="decay_lower_bound is 1; it must be below 0"):
        make(KimiDeltaAttention, decay_lower_bound=1)
    with pytest.raises(ValueError, match="output_gate_activation is 'relu'; it must be one of swish"):
        make(GatedDeltaNet, output_gate_activation="relu")
    for preconditioner in ({"bounds": (0.5, 2.0)}, {"bounds": None}, {"initial_scale": "free"}):
        with pytest.raises(ValueError, match="write strengths reach 2, so the scale must not exceed 1"):
            make(DeltaNet, allow_neg_eigval=True, preconditioner=preconditioner)
    with pytest.raises(ValueError, match="state decays"):
        make(DeltaNet, {"retention": "tied"})
    mixer = make(DeltaNet)
    with pytest.raises(ValueError, match="so B must be 1; it is 2"):
        mixer(torch.randn(2, 5, 20, dtype=torch.float64), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="must end at the number of tokens, 5"):
        mixer(torch.randn(1, 5, 20, dtype=torch.float64), cu_seqlens=torch.tensor([0, 4]))


@layers
@pytest.mark.parametrize("packed", [False, True])
def test_operator_inputs_are_what_the_recurrence_is_called_with(layer, preconditioner, shape, packed):
    mixer, seen = make(layer, preconditioner, **shape), []
    x = torch.randn(1, 11, 20, dtype=torch.float64)
    cuts = torch.tensor([0, 4, 11]) if packed else None
    with torch.no_grad():
        _, state = mixer(x, cu_seqlens=cuts, output_final_state=True)
        inputs, tails = mixer.operator_inputs(x, state, cuts, True)
        with mixer.recurrence.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            y, after = mixer(x, state, cu_seqlens=cuts)
        o, recurrent, scale = mixer.recurrence(inputs, True)
    assert inputs.rule == seen[0].rule
    torch.testing.assert_close(inputs[:-1], seen[0][:-1], rtol=0, atol=0)
    torch.testing.assert_close(tuple(after), (recurrent, scale, *tails), rtol=0, atol=0)
    o = o[:, mixer.writes - 1 :: mixer.writes]
    torch.testing.assert_close(y, mixer.o_proj(mixer.read_out(o, x).flatten(-2)), rtol=0, atol=0)
    assert (inputs.preconditioner is None) == (preconditioner is None)
    assert inputs.initial_state is state.recurrent
    assert inputs.cu_seqlens is cuts or torch.equal(inputs.cu_seqlens, mixer.writes * cuts)
    if preconditioner is not None:
        name = {"newton": "initial_covariance", "pgdn": "initial_gram"}.get(inputs.rule, "initial_scale")
        assert inputs.preconditioner[name] is state.scale


@pytest.mark.parametrize(
    "settings", [{"eta": 3.0}, {"eta": 3.0, "retention": 0.9}, {"rule": "newton", "prior": 9.0}]
)
@torch.no_grad()
def test_strong_writes_keep_the_state_stable(settings):
    """With write strengths up to 2, no write multiplies what is stored by less than -1."""
    mixer = make(DeltaNet, allow_neg_eigval=True, preconditioner=settings)
    mixer.b_proj.weight.mul_(100)  # strengths near 0 and near 2
    inputs, _ = mixer.operator_inputs(torch.randn(2, 300, mixer.hidden_size).to(mixer.o_proj.weight))
    assert inputs.beta.max() > 1.99
    keys, _ = OPERATORS[inputs.rule][0](inputs.k, inputs.beta, **inputs.preconditioner)
    factors = 1 - inputs.beta * (keys * inputs.k).sum(-1)
    assert factors.min() > -1.0001
    assert factors.max() < 1.0001
    assert (factors.min() < -0.9) == ("rule" not in settings)  # Newton's never reverse a sign
