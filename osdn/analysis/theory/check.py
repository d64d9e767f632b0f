"""A checked statement: its two sides in logarithms on many problems, and the hypotheses it depends on.

A check passes only if its relation and all of its hypotheses hold on every problem.  A violated hypothesis is
reported whether or not the relation holds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """`left relation right` in logarithms, one entry per problem."""

    statement: str
    relation: str  # "<=", "<" or "="
    left: Tensor
    right: Tensor
    hypotheses: Mapping[str, bool] = field(default_factory=dict)
    error: Tensor | None = None  # for "=": the error, where comparing logarithms would not be sharp enough
    tolerance: float = 1e-8

    @property
    def holds(self) -> bool:
        """Whether the relation holds on every problem, regardless of the hypotheses."""
        if self.relation == "=":
            return bool((self.errors <= self.tolerance).all())
        if self.relation == "<":
            return bool((self.left < self.right).all())
        return bool((self.left <= self.right + self.tolerance).all())

    @property
    def violated(self) -> list[str]:
        """The hypotheses that do not hold."""
        return [name for name, holds in self.hypotheses.items() if not holds]

    @property
    def passed(self) -> bool:
        return self.holds and not self.violated

    @property
    def errors(self) -> Tensor:
        return (self.left - self.right).abs() if self.error is None else self.error

    @property
    def tightness(self) -> str:
        """How many times the left side of a bound fits into the right; for an equality, the largest error."""
        if self.relation == "=":
            return f"±{self.errors.max():.0e}"
        slack = self.right - self.left
        return "×" + "–".join(
            f"{x:.3g}" if x < 1000 else f"{x:.0e}" for x in (slack.min().exp(), slack.max().exp())
        )

    @property
    def verdict(self) -> str:
        if not self.violated:
            return "holds" if self.holds else "FAILS"
        outcome = "holds anyway" if self.holds else "fails"
        return f"{outcome}, without: {'; '.join(self.violated)}"

    def summary(self) -> dict[str, object]:
        """The check as plain values, for a result file."""
        sides = {"left": self.left, "right": self.right}
        return {
            "statement": self.statement,
            "relation": self.relation,
            "problems": self.left.numel(),
            "log_sides": {name: dict(zip(("min", "median", "max"), _range(x))) for name, x in sides.items()},
            "tightness": self.tightness,
            "hypotheses": dict(self.hypotheses),
            "passed": self.passed,
            "verdict": self.verdict,
        }


def merge(checks: Sequence[Check]) -> Check:
    """One statement checked on several families of problems."""
    first = checks[0]
    hypotheses = {name: all(c.hypotheses[name] for c in checks) for name in first.hypotheses}
    left, right = (torch.cat([getattr(c, side) for c in checks]) for side in ("left", "right"))
    error = None if first.error is None else torch.cat([c.errors for c in checks])
    return replace(first, left=left, right=right, hypotheses=hypotheses, error=error)


def _range(x: Tensor) -> list[float | str]:
    values = (float(y) for y in (x.min(), x.median(), x.max()))
    return [y if math.isfinite(y) else str(y) for y in values]  # JSON has no infinity


def log(x: Tensor) -> Tensor:
    """The logarithm; minus infinity for anything that is not positive."""
    return torch.where(x > 0, x, 0.0).log()
