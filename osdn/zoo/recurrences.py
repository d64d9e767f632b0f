"""The paper's two taxonomy tables as running code: a step function of a few lines for every row.

Five more rows are rivals of the paper's rule that its tables leave out.  The functions follow the tables'
notation: S is `[V, K]` and is read by S q, except in KDA, its online-scaled form and Gated DeltaNet-2, where
S is `[K, V]`; a state of slots is `[K, M]` or `[V, M]`.  All of them broadcast over leading dimensions.
`RECURRENCES` maps a name to its row.  Where the printed row differs from the model it cites, the code follows
the cited model and the row's `note` names the difference.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, expm1, linalg

from osdn.zoo import fast as at_once
from osdn.zoo.recurrence import Input, Recurrence

Tensors = tuple[Tensor, ...]  # the new state, then the output

RECURRENCES: dict[str, Recurrence] = {}

# The settings of phase 1 in the paper's runs.
ETA, LOW, HIGH, EPS = 0.003, 0.5, 2.0, 1e-6

Q, KEY, VALUE = Input("K"), Input("K"), Input("V")
QKV = {"q": Q, "k": KEY, "v": VALUE}
DELTA = {"q": Input("K", "unit"), "k": Input("K", "unit"), "v": VALUE, "beta": Input("1", "gate")}
MATRIX = {"S": "VK"}
SCALED = {"S": "VK", "d": "K"}


def row(
    name: str,
    title: str,
    citation: str,
    update: str,
    readout: str = r"S_t q_t",
    *,
    state: dict[str, str] = MATRIX,
    inputs: dict[str, Input] = QKV,
    weights: dict[str, Input] | None = None,
    note: str = "",
    fast: Callable[..., Tensors] | None = None,
) -> Callable[[Callable[..., Tensors]], Callable[..., Tensors]]:
    """Register the decorated step function as a row of the table."""

    def register(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
        RECURRENCES[name] = Recurrence(
            name, title, citation, update, readout, state, inputs, weights or {}, function, note, fast
        )
        return function

    return register


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def read(S: Tensor, q: Tensor) -> Tensor:
    return (S @ q[..., None])[..., 0]


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def phi(x: Tensor) -> Tensor:
    """The positive feature map of Katharopoulos et al."""
    return F.elu(x) + 1


# ---------------------------------------------------------------------------- additive and gated writes


@row(
    "linear_attention",
    "Linear Attention",
    "Katharopoulos et al., 2020, arXiv:2006.16236",
    r"S_t = S_{t-1} + v_t k_t^\top",
)
def linear_attention(S: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    S = S + outer(v, k)
    return S, read(S, q)


@row(
    "linear_attention-kernel",
    "Linear Attention + Kernel",
    "Katharopoulos et al., 2020, arXiv:2006.16236",
    r"S_t = S_{t-1} + v_t \phi(k_t)^\top",
    r"S_t \phi(q_t)",
)
def linear_attention_kernel(S: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    S = S + outer(v, phi(k))
    return S, read(S, phi(q))


@row(
    "linear_attention-normalised",
    "Linear Attention + Normalised",
    "Katharopoulos et al., 2020, arXiv:2006.16236",
    r"S_t = S_{t-1} + v_t \phi(k_t)^\top,\ z_t = z_{t-1} + \phi(k_t)",
    r"S_t \phi(q_t) / (z_t^\top \phi(q_t))",
    state={"S": "VK", "z": "K"},
)
def linear_attention_normalised(S: Tensor, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    S = S + outer(v, phi(k))
    z = z + phi(k)
    return S, z, read(S, phi(q)) / dot(z, phi(q))


@row(
    "gated_rfa",
    "Gated RFA",
    "Peng et al., 2021, arXiv:2103.02143",
    r"S_t = g_t S_{t-1} + (1-g_t) v_t k_t^\top,\ z_t = g_t z_{t-1} + (1-g_t) k_t",
    r"S_t q_t / (z_t^\top q_t)",
    state={"S": "VK", "z": "K"},
    inputs={"q": Input("K", "positive"), "k": Input("K", "positive"), "v": VALUE, "g": Input("1", "decay")},
    note="q and k are random features in the cited paper; positive ones keep the normaliser away from 0.",
)
def gated_rfa(S: Tensor, z: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensors:
    S = g[..., None] * S + (1 - g)[..., None] * outer(v, k)
    z = g * z + (1 - g) * k
    return S, z, read(S, q) / dot(z, q)


@row(
    "s4",
    "S4",
    "Gu et al., 2021, arXiv:2111.00396; Smith et al., 2022, arXiv:2208.04933",
    r"S_t = S_{t-1} \odot \exp(-(\alpha \mathbf{1}^\top) \odot \exp(A)) + B \odot (v_t \mathbf{1}^\top)",
    r"(S_t \odot C)\mathbf{1} + d \odot v_t",
    inputs={"v": VALUE},
    weights={
        "alpha": Input("V", "timestep"),
        "A": Input("VK"),
        "B": Input("VK"),
        "C": Input("VK"),
        "D": Input("V"),
    },
    note="Real and diagonal, as printed; S4 itself has complex poles.  The skip weight d is named D here.",
)
def s4(S: Tensor, v: Tensor, alpha: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensors:
    S = S * (-alpha[..., None] * A.exp()).exp() + B * v[..., None]
    return S, (S * C).sum(-1) + D * v


@row(
    "abc",
    "ABC",
    "Peng et al., 2022, arXiv:2110.02488",
    r"S_t^k = S_{t-1}^k + k_t \phi_t^\top,\ S_t^v = S_{t-1}^v + v_t \phi_t^\top",
    r"S_t^v \operatorname{softmax}((S_t^k)^\top q_t)",
    state={"Sk": "KM", "Sv": "VM"},
    inputs={**QKV, "phi_t": Input("M", "simplex")},
    note="The read-out needs the transpose of the key slots, which the table leaves out.",
)
def abc(Sk: Tensor, Sv: Tensor, q: Tensor, k: Tensor, v: Tensor, phi_t: Tensor) -> Tensors:
    Sk = Sk + outer(k, phi_t)
    Sv = Sv + outer(v, phi_t)
    return Sk, Sv, read(Sv, read(Sk.mT, q).softmax(-1))


@row(
    "dfw",
    "DFW",
    "Mao, 2022, arXiv:2210.04243",
    r"S_t = S_{t-1} \odot (\beta_t \alpha_t^\top) + v_t k_t^\top",
    inputs={**QKV, "beta": Input("V", "decay"), "alpha": Input("K", "decay")},
)
def dfw(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensors:
    S = S * outer(beta, alpha) + outer(v, k)
    return S, read(S, q)


@row(
    "retnet",
    "RetNet",
    "Sun et al., 2023, arXiv:2307.08621",
    r"S_t = \gamma S_{t-1} + v_t k_t^\top",
    weights={"gamma": Input("1", "decay")},
    note="The second table multiplies the write by β; neither the first table nor RetNet has such a gate.",
)
def retnet(S: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensors:
    S = gamma[..., None] * S + outer(v, k)
    return S, read(S, q)


@row(
    "mamba",
    "Mamba",
    "Gu and Dao, 2023, arXiv:2312.00752",
    r"S_t = S_{t-1} \odot \exp(-(\alpha_t \mathbf{1}^\top) \odot \exp(A)) + (\alpha_t \odot v_t) k_t^\top",
    r"S_t q_t + d \odot v_t",
    inputs={**QKV, "alpha": Input("V", "timestep")},
    weights={"A": Input("VK"), "D": Input("V")},
    note="The skip weight d is named D here.",
)
def mamba(S: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, A: Tensor, D: Tensor) -> Tensors:
    S = S * (-alpha[..., None] * A.exp()).exp() + outer(alpha * v, k)
    return S, read(S, q) + D * v


@row(
    "gla",
    "GLA",
    "Yang et al., 2024, arXiv:2312.06635",
    r"S_t = S_{t-1} \operatorname{Diag}(\alpha_t) + v_t k_t^\top",
    inputs={**QKV, "alpha": Input("K", "decay")},
)
def gla(S: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensors:
    S = S * alpha[..., None, :] + outer(v, k)
    return S, read(S, q)


@row(
    "rwkv6",
    "RWKV-6",
    "Peng et al., 2024, arXiv:2404.05892",
    r"S_t = S_{t-1} \operatorname{Diag}(\alpha_t) + v_t k_t^\top",
    r"(S_{t-1} + v_t (d \odot k_t)^\top) q_t",
    inputs={**QKV, "alpha": Input("K", "decay")},
    weights={"D": Input("K")},
    note="The bonus for the current token weights key channels; the table weights value channels, "
    "(d ⊙ v) kᵀ.  The weight d is named D here.",
)
def rwkv6(S: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, D: Tensor) -> Tensors:
    o = read(S + outer(v, D * k), q)
    return S * alpha[..., None, :] + outer(v, k), o


@row(
    "hgrn2",
    "HGRN-2",
    "Qin et al., 2024, arXiv:2404.07904",
    r"S_t = S_{t-1} \operatorname{Diag}(\alpha_t) + v_t (1-\alpha_t)^\top",
    inputs={"q": Q, "v": VALUE, "alpha": Input("K", "decay")},
)
def hgrn2(S: Tensor, q: Tensor, v: Tensor, alpha: Tensor) -> Tensors:
    S = S * alpha[..., None, :] + outer(v, 1 - alpha)
    return S, read(S, q)


@row(
    "mlstm",
    "mLSTM",
    "Beck et al., 2024, arXiv:2405.04517",
    r"S_t = f_t S_{t-1} + i_t v_t k_t^\top,\ z_t = f_t z_{t-1} + i_t k_t",
    r"S_t q_t / \max\{1, |z_t^\top q_t|\}",
    state={"S": "VK", "z": "K"},
    inputs={**QKV, "f": Input("1", "decay"), "i": Input("1", "positive")},
)
def mlstm(S: Tensor, z: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensors:
    S = f[..., None] * S + i[..., None] * outer(v, k)
    z = f * z + i * k
    return S, z, read(S, q) / dot(z, q).abs().clamp_min(1)


@row(
    "mamba2",
    "Mamba-2",
    "Dao and Gu, 2024, arXiv:2405.21060",
    r"S_t = \gamma_t S_{t-1} + v_t k_t^\top",
    inputs={**QKV, "gamma": Input("1", "decay")},
    note="v is already multiplied by the time step.",
)
def mamba2(S: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensors:
    S = gamma[..., None] * S + outer(v, k)
    return S, read(S, q)


@row(
    "gsa",
    "GSA",
    "Zhang et al., 2024, arXiv:2409.07146",
    r"S_t^k = S_{t-1}^k \operatorname{Diag}(\alpha_t) + k_t \phi_t^\top,\ "
    r"S_t^v = S_{t-1}^v \operatorname{Diag}(\alpha_t) + v_t \phi_t^\top",
    r"S_t^v \operatorname{softmax}((S_t^k)^\top q_t)",
    state={"Sk": "KM", "Sv": "VM"},
    inputs={**QKV, "alpha": Input("M", "decay"), "phi_t": Input("M", "simplex")},
    note="The cited paper has φ = 1 - α.  The read-out needs a transpose, which the table leaves out.",
)
def gsa(Sk: Tensor, Sv: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, phi_t: Tensor) -> Tensors:
    Sk = Sk * alpha[..., None, :] + outer(k, phi_t)
    Sv = Sv * alpha[..., None, :] + outer(v, phi_t)
    return Sk, Sv, read(Sv, read(Sk.mT, q).softmax(-1))


# ------------------------------------------------------------------------------------------- delta rules


def next_scale(d: Tensor, k: Tensor, beta: Tensor, retention: Tensor | float = 1.0) -> Tensor:
    """The scale after a token: one projected gradient step on the hypergradient feedback."""
    step = ETA * beta * (1 - beta * dot(d, k**2)) / dot(k, k).clamp_min(EPS)
    return (retention * d + step * k**2).clamp(LOW, HIGH)


@row(
    "delta_net",
    "DeltaNet",
    "Schlag et al., 2021, arXiv:2102.11174; Yang et al., 2024, arXiv:2406.06484",
    r"S_t = S_{t-1}(I - \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top",
    inputs=DELTA,
    fast=at_once.delta_net,
)
def delta_net(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensors:
    S = S + outer(beta * (v - read(S, k)), k)
    return S, read(S, q)


@row(
    "osdn",
    "DeltaNet + Online Scaling",
    "OSDN",
    r"S_t = S_{t-1}(I - \beta_t k_t \tilde{k}_t^\top) + \beta_t v_t \tilde{k}_t^\top",
    state=SCALED,
    inputs=DELTA,
    fast=at_once.osdn,
)
def osdn(S: Tensor, d: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensors:
    S = S + outer(beta * (v - read(S, k)), d * k)
    return S, next_scale(d, k, beta), read(S, q)


@row(
    "osdn-apf",
    "DeltaNet + Online Scaling, APF",
    "OSDN",
    r"S_t\ \text{as OSDN},\ d_{t+1} = r_t \odot d_t - \eta\,\nabla_d h_t",
    state=SCALED,
    inputs={**DELTA, "r": Input("1", "retention")},
    fast=at_once.osdn,
)
def osdn_apf(S: Tensor, d: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, r: Tensor) -> Tensors:
    S = S + outer(beta * (v - read(S, k)), d * k)
    return S, next_scale(d, k, beta, r), read(S, q)


@row(
    "gdn",
    "Gated DeltaNet",
    "Yang et al., 2024, arXiv:2412.06464",
    r"S_t = S_{t-1}(\alpha_t (I - \beta_t k_t k_t^\top)) + \beta_t v_t k_t^\top",
    inputs={**DELTA, "alpha": Input("1", "decay")},
    fast=at_once.gdn,
)
def gdn(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensors:
    S = alpha[..., None] * S
    S = S + outer(beta * (v - read(S, k)), k)
    return S, read(S, q)


@row(
    "osgdn",
    "Gated DeltaNet + Online Scaling",
    "OSDN",
    r"S_t = S_{t-1}(\alpha_t (I - \beta_t k_t \tilde{k}_t^\top)) + \beta_t v_t \tilde{k}_t^\top",
    state=SCALED,
    inputs={**DELTA, "alpha": Input("1", "decay")},
    fast=at_once.osdn,
)
def osgdn(S: Tensor, d: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensors:
    S = alpha[..., None] * S
    S = S + outer(beta * (v - read(S, k)), d * k)
    return S, next_scale(d, k, beta), read(S, q)


@row(
    "kda",
    "KDA",
    "Kimi Team, 2025, arXiv:2510.26692",
    r"S_t = (I - \beta_t k_t k_t^\top) \operatorname{Diag}(\alpha_t) S_{t-1} + \beta_t k_t v_t^\top",
    r"S_t^\top q_t",
    state={"S": "KV"},
    inputs={**DELTA, "alpha": Input("K", "decay")},
    fast=at_once.gdn,
)
def kda(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensors:
    S = alpha[..., None] * S
    S = S + outer(k, beta * (v - read(S.mT, k)))
    return S, read(S.mT, q)


@row(
    "oskda",
    "KDA + Online Scaling",
    "OSDN",
    r"S_t = (I - \beta_t \tilde{k}_t k_t^\top) \operatorname{Diag}(\alpha_t) S_{t-1} "
    r"+ \beta_t \tilde{k}_t v_t^\top",
    r"S_t^\top q_t",
    state={"S": "KV", "d": "K"},
    inputs={**DELTA, "alpha": Input("K", "decay")},
    fast=at_once.osdn,
)
def oskda(S: Tensor, d: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensors:
    S = alpha[..., None] * S
    S = S + outer(d * k, beta * (v - read(S.mT, k)))
    return S, next_scale(d, k, beta), read(S.mT, q)


# ---------------------------------------------------------------------------------------- solved problems


@row(
    "longhorn",
    "Longhorn",
    "Liu et al., 2024, arXiv:2407.14207",
    r"S_t = \arg\min_S \|S - S_{t-1}\|_F^2 + \|S k_t - v_t\|_{\operatorname{Diag}(\beta_t)}^2",
    inputs={**QKV, "beta": Input("V", "positive")},
    note="The table drops the proximal term, without which the minimiser is not unique and does not depend "
    "on the past.  The cited layer keeps only the diagonal of the closed form; this row keeps all of it.",
    fast=at_once.longhorn,
)
def longhorn(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensors:
    step = beta / (1 + beta * dot(k, k))  # Sherman-Morrison
    S = S + outer(step * (v - read(S, k)), k)
    return S, read(S, q)


@row(
    "mesa_net",
    "MesaNet",
    "von Oswald et al., 2025, arXiv:2506.05233",
    r"G_t = \gamma_t G_{t-1} + \beta_t v_t k_t^\top,\ H_t = \gamma_t H_{t-1} + \beta_t k_t k_t^\top",
    r"G_t (H_t + \Lambda)^{-1} q_t",
    state={"G": "VK", "H": "KK"},
    inputs={**DELTA, "gamma": Input("1", "decay")},
    weights={"Lambda": Input("K", "positive")},
    note="The table omits the weights β and the decay inside the sum, and its Tr(SᵀΛS) is Tr(SΛSᵀ) for a "
    "[V, K] state.  Solved exactly here; the cited layer runs a few steps of conjugate gradient.",
)
def mesa_net(
    G: Tensor, H: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gamma: Tensor, Lambda: Tensor
) -> Tensors:
    G = gamma[..., None] * G + outer(beta * v, k)
    H = gamma[..., None] * H + outer(beta * k, k)
    return G, H, read(G, linalg.solve(H + Lambda.diag_embed(), q))


# ------------------------------------------------------------------------------------------------- rivals

REAL = {**QKV, "beta": Input("1", "gate")}  # keys are not normalised


@row(
    "efla",
    "EFLA",
    "Lei et al., 2025, arXiv:2512.12602",
    r"S_t = S_{t-1}(I - \beta'_t k_t k_t^\top) + \beta'_t v_t k_t^\top,\ "
    r"\beta'_t = (1 - e^{-\beta_t \|k_t\|^2}) / \|k_t\|^2",
    inputs=REAL,
    note="Not in the paper's tables.  The delta rule as a differential equation, solved exactly for time β.",
    fast=at_once.efla,
)
def efla(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensors:
    n = dot(k, k)
    S = S + outer(-expm1(-beta * n) / n * (v - read(S, k)), k)
    return S, read(S, q)


@row(
    "kaczmarz",
    "Kaczmarz Linear Attention",
    "Zou et al., 2026, arXiv:2605.08587",
    r"S_t = S_{t-1}(\alpha_t (I - \beta'_t k_t k_t^\top)) + \beta'_t v_t k_t^\top,\ "
    r"\beta'_t = \beta_t / (\|k_t\|^2 + \epsilon)",
    inputs={**REAL, "alpha": Input("1", "decay")},
    note="Not in the paper's tables.",
    fast=at_once.kaczmarz,
)
def kaczmarz(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensors:
    S = alpha[..., None] * S
    S = S + outer(beta / (dot(k, k) + EPS) * (v - read(S, k)), k)
    return S, read(S, q)


@row(
    "comba",
    "Comba",
    "Hu et al., 2025, arXiv:2506.02475",
    r"S_t = S_{t-1}(\alpha_t I - b \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top",
    r"S_t (q_t - d k_t)",
    inputs={**DELTA, "alpha": Input("1", "decay")},
    weights={"b": Input("1", "gate"), "D": Input("1")},
    note="Not in the paper's tables.  The weight d is named D here.",
    fast=at_once.comba,
)
def comba(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor, b: Tensor, D: Tensor
) -> Tensors:
    error = v - b * read(S, k)  # of the state before its decay
    S = alpha[..., None] * S + outer(beta * error, k)
    return S, read(S, q - D * k)


@row(
    "gdn2",
    "Gated DeltaNet-2",
    "Hatamizadeh et al., 2026, arXiv:2605.22791",
    r"S_t = (I - k_t (b_t \odot k_t)^\top) \operatorname{Diag}(\alpha_t) S_{t-1} + k_t (w_t \odot v_t)^\top",
    r"S_t^\top q_t",
    state={"S": "KV"},
    inputs={
        "q": Input("K", "unit"),
        "k": Input("K", "unit"),
        "v": VALUE,
        "b": Input("K", "gate"),
        "w": Input("V", "gate"),
        "alpha": Input("K", "decay"),
    },
    note="Not in the paper's tables.",
    fast=at_once.gdn2,
)
def gdn2(S: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor, w: Tensor, alpha: Tensor) -> Tensors:
    S = alpha[..., None] * S
    S = S + outer(k, w * v - read(S.mT, b * k))
    return S, read(S.mT, q)


@row(
    "delta_product",
    "Gated DeltaProduct, two writes",
    "Siems et al., 2025, arXiv:2502.10297",
    r"S_t = S_{t-1} \alpha_t \prod_{j=1}^{2} (I - \beta_{t,j} k_{t,j} k_{t,j}^\top) + \dots",
    inputs={
        **DELTA,
        "k2": Input("K", "unit"),
        "v2": VALUE,
        "beta2": Input("1", "gate"),
        "alpha": Input("1", "decay"),
    },
    note="Not in the paper's tables.  Two writes per token, each with its own key, value and gate; the state "
    "decays before the first.",
    fast=at_once.delta_product,
)
def delta_product(
    S: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    k2: Tensor,
    v2: Tensor,
    beta2: Tensor,
    alpha: Tensor,
) -> Tensors:
    S = alpha[..., None] * S
    S = S + outer(beta * (v - read(S, k)), k)
    S = S + outer(beta2 * (v2 - read(S, k2)), k2)
    return S, read(S, q)
