"""The residual ratio q_t = f_t(S_t) / f_t(S_{t-1}) of every write, and the scale that each write used.

f_t(S) = ½ |v_t - Sᵀk_t|² is the regression loss that the delta rule takes one step on (the paper, "Mechanism
diagnostic").  If the state decays, S_{t-1} is the decayed state, which is where the write starts.  The ratio
is computed in two ways: from the states, which the operators' recurrence yields in float32, and by the closed
form q_t = (1 - beta_t <d_t, k_t²>)², which needs no state ("Token-Local Residual Contraction").  Rules other
than the paper's have no scale d; their closed form is (1 - beta_t <w_t, k_t>)² with the write key w.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from osdn.analysis.capture import LayerCapture
from osdn.analysis.theory.runs import Problem, run
from osdn.ops import precondition_keys

# A residual below a fiftieth of its value is negligible: float32 reads a state with an error of about 1e-7 of
# the value, so the ratio of two smaller residuals is not accurate to 1e-5.
NEGLIGIBLE = 0.02**2
FLOOR = 1e-12  # of a ratio before its logarithm: float32 resolves a residual to about 1e-6 of its former size


@dataclass(frozen=True)
class Residuals:
    """Measurements of one layer's writes, all [B, T, HV]."""

    before: Tensor  # f_t(S_{t-1})
    after: Tensor  # f_t(S_t)
    closed: Tensor  # (1 - beta_t <w_t, k_t>)²
    negligible: Tensor  # whether `before` is too small for a ratio

    @property
    def q(self) -> Tensor:
        """The measured ratio; meaningless where the residual is negligible."""
        return self.after / self.before.clamp_min(torch.finfo(self.before.dtype).tiny)

    @property
    def disagreement(self) -> Tensor:
        """|measured - closed form|, zero where the residual is negligible."""
        return (self.q - self.closed).abs().masked_fill(self.negligible, 0)


@torch.no_grad()
def residuals(layer: LayerCapture | Problem) -> Residuals:
    """Runs the recurrence over captured tensors and measures every write."""
    problem = layer.problem if isinstance(layer, LayerCapture) else layer
    result = run(problem)
    value = problem.v.square().sum(-1) / 2
    return Residuals(
        result.before, result.after, (1 - result.step).square(), result.before <= NEGLIGIBLE * value
    )


@torch.no_grad()
def scale_trajectory(layer: LayerCapture | Problem) -> Tensor:
    """The scale d_t that each token was written with, [B, T, HV, K].

    Phase 1 returns write keys `d * k`, and dividing by `k` fails where a key is zero.  A token with `beta =
    0`, a key of ones and full retention takes no step, and its write key is the scale itself.  So one such
    probe token follows each real token and reads the scale it left.
    """
    p = layer.problem if isinstance(layer, LayerCapture) else layer
    if p.write_keys is not None:
        raise ValueError("this layer has no scale: only the paper's rule has one")
    beta = p.beta if p.beta_aware else torch.ones_like(p.beta)
    retention = p.retention
    if isinstance(retention, (int, float)):
        retention = torch.full_like(p.beta, retention)
    probed, _ = precondition_keys(
        _alternate(p.k, 1.0),
        _alternate(beta, 0.0),
        eta=p.eta,
        bounds=p.bounds,
        retention=None if retention is None else _alternate(retention, 1.0),
        initial_scale=p.initial_scale,
        eps=p.eps,
        backend=p.backend,
    )
    return torch.cat([p.start[:, None], probed[:, 1:-1:2]], 1)


def _alternate(x: Tensor, probe: float) -> Tensor:
    """The tokens of `x`, each followed by a probe token filled with `probe`."""
    return torch.stack([x, torch.full_like(x, probe)], 2).flatten(1, 2)
