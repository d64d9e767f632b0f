"""The paper's second table: a sequence layer as one step of an optimiser on an inner loss.

Each row names a decay, a loss and a step.  `inner_step` follows them literally: it decays the state, lets
autograd differentiate the loss there, and steps against the gradient.  The result is the row's own
recurrence, as the table claims.  Rows that solve their loss instead end at its stationary point.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from osdn.zoo.recurrence import State
from osdn.zoo.recurrences import read

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class InnerOptimiser:
    """A row of the table: formulas in TeX, and the functions they stand for."""

    decay: str
    loss_formula: str
    rule: str
    kind: str
    retained: Callable[[State, Inputs], Tensor]  # the decayed state
    loss: Callable[[Tensor, Tensor, Inputs], Tensor]  # takes the new state, the decayed one and the inputs
    rate: Callable[[State, Inputs], Tensor] | None  # multiplies the gradient; None: the loss is solved
    note: str = ""


def inner_step(row: InnerOptimiser, state: State, inputs: Inputs) -> Tensor:
    """The state after one gradient step on the row's loss."""
    if row.rate is None:
        raise ValueError(f"a row of type {row.kind!r} minimises its loss; it takes no gradient step")
    retained = row.retained(state, inputs)
    gradient = torch.func.grad(lambda S: row.loss(S, retained, inputs).sum())(retained)
    return retained - row.rate(state, inputs) * gradient


def hopfield(S: Tensor, retained: Tensor, x: Inputs) -> Tensor:
    return -(read(S, x["k"]) * x["v"]).sum(-1)


def regression(S: Tensor, retained: Tensor, x: Inputs) -> Tensor:
    return (read(S, x["k"]) - x["v"]).square().sum(-1) / 2


def transposed_regression(S: Tensor, retained: Tensor, x: Inputs) -> Tensor:
    return regression(S.mT, retained, x)


def proximal_regression(S: Tensor, retained: Tensor, x: Inputs) -> Tensor:
    weighted = (x["beta"] * (read(S, x["k"]) - x["v"]).square()).sum(-1)
    return ((S - retained).square().sum((-2, -1)) + weighted) / 2


def _undecayed(state: State, x: Inputs) -> Tensor:
    return state["S"]


def _decayed_by(name: str) -> Callable[[State, Inputs], Tensor]:
    return lambda state, x: x[name][..., None] * state["S"]


def _ones(state: State, x: Inputs) -> Tensor:
    return torch.ones(())


def _beta(state: State, x: Inputs) -> Tensor:
    return x["beta"][..., None]


def _preconditioned(state: State, x: Inputs) -> Tensor:
    return x["beta"][..., None] * state["d"][..., None, :]


HOPFIELD = r"-\langle S k_t, v_t\rangle"
REGRESSION = r"\tfrac12 \|S k_t - v_t\|^2"
GRADIENT = r"\tilde S_{t-1} - \beta_t \nabla \mathcal L_t(\tilde S_{t-1})"
PRECONDITIONED = GRADIENT + r"\operatorname{Diag}(d_t)"

# mesa_net solves for the whole prefix, which no loss of one token and one state describes: see its row.
INNER_OPTIMISERS: dict[str, InnerOptimiser] = {
    "linear_attention": InnerOptimiser(
        "I", HOPFIELD, r"\tilde S_{t-1} + v_t k_t^\top", "Hebbian", _undecayed, hopfield, _ones
    ),
    "retnet": InnerOptimiser(
        r"\gamma I",
        HOPFIELD,
        r"\tilde S_{t-1} + v_t k_t^\top",
        "Hebb.+decay",
        _decayed_by("gamma"),
        hopfield,
        _ones,
        "The table also adds ½‖√(1-γ) S‖² to the loss.  A step on that term from the undecayed state is "
        "already the decay; with both, the state would decay twice.",
    ),
    "gla": InnerOptimiser(
        r"\operatorname{Diag}(\alpha_t)",
        HOPFIELD,
        r"\tilde S_{t-1} + v_t k_t^\top",
        "Hebb.+diag.",
        lambda state, x: state["S"] * x["alpha"][..., None, :],
        hopfield,
        _ones,
        "The same holds for the diagonal regulariser that the table adds here.",
    ),
    "delta_net": InnerOptimiser("I", REGRESSION, GRADIENT, "scalar OGD", _undecayed, regression, _beta),
    "gdn": InnerOptimiser(
        r"\alpha_t I", REGRESSION, GRADIENT, "OGD+decay", _decayed_by("alpha"), regression, _beta
    ),
    "kda": InnerOptimiser(
        r"\operatorname{Diag}(\alpha_t)",
        r"\tfrac12 \|S^\top k_t - v_t\|^2",
        GRADIENT,
        "OGD+diag.",
        _decayed_by("alpha"),
        transposed_regression,
        _beta,
    ),
    "longhorn": InnerOptimiser(
        "I",
        r"\tfrac12\|S - S_{t-1}\|_F^2 + \tfrac12 \|S k_t - v_t\|_{\operatorname{Diag}(\beta_t)}^2",
        r"\arg\min_S \mathcal L_t(S)",
        "closed form",
        _undecayed,
        proximal_regression,
        None,
        "The table drops the proximal term.",
    ),
    "osdn": InnerOptimiser(
        "I", REGRESSION, PRECONDITIONED, "precond. OGD", _undecayed, regression, _preconditioned
    ),
    "osdn-apf": InnerOptimiser(
        "I", REGRESSION, PRECONDITIONED, "APF precond.", _undecayed, regression, _preconditioned
    ),
}
