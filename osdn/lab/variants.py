"""The models of the lab by name: the nine variants, their ablations, a sweep over step size and box, the zoo.

`osdn-apf` is a variant, `osdn+d0` an ablation of one; `--eta 0.01 0.1` replaces every variant that scales
online by one copy a step size.  `gla` is a row of the zoo; where a variant has the same name, the row is
`zoo:delta_net`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from osdn.models import OSDNConfig
from osdn.models.presets import VARIANTS
from osdn.zoo import RECURRENCES

# The paper, "OSDN Variant Ablations" and "OSDN implementation".
ABLATIONS: dict[str, dict[str, Any]] = {
    "d0": {"initial_scale": "projected"},
    "d0-free": {"initial_scale": "free"},
    "beta-blind": {"beta_aware": False},
    "retention-0.999": {"retention": 0.999},
    "per-channel": {"retention": "learned_per_channel"},
}


@dataclass(frozen=True)
class Variant:
    """A name, and what a sweep changed; None is the variant's own."""

    name: str
    eta: float | None = None
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        base, _, ablation = self.name.partition("+")
        if base not in VARIANTS and self.row is None:
            raise ValueError(
                f"there is no variant {base!r}; there are {', '.join(VARIANTS)}, "
                f"and of the zoo {', '.join(name for name in RECURRENCES if name not in VARIANTS)}"
            )
        if ablation and ablation not in ABLATIONS:
            raise ValueError(f"there is no ablation {ablation!r}; there are {', '.join(ABLATIONS)}")
        if not self.scales and (ablation or self.eta is not None or self.bounds is not None):
            raise ValueError(f"{base} does not scale online; it has no ablation, eta or box")

    @property
    def row(self) -> str | None:
        """The row of the zoo that is meant, if one is."""
        row = self.name.removeprefix("zoo:")
        return row if row in RECURRENCES and self.name not in VARIANTS else None

    @property
    def backbone(self) -> str:
        return self.row or VARIANTS[self.name.partition("+")[0]][0]

    @property
    def scales(self) -> bool:
        """Whether it scales its writes online, and by settings that can be swept."""
        return self.row is None and VARIANTS[self.name.partition("+")[0]][1] is not None

    @property
    def label(self) -> str:
        eta = "" if self.eta is None else f" eta={self.eta:g}"
        box = "" if self.bounds is None else f" box={self.bounds[0]:g}:{self.bounds[1]:g}"
        return self.name + eta + box

    def config(self, width: int, **settings: Any) -> OSDNConfig:
        """The model of this variant at a width, which the tiny presets' proportions follow.

        For a row of the zoo it is the model whose mixers the row replaces.
        """
        if self.row is not None:
            return Variant("delta_net").config(width, **settings)
        base, _, ablation = self.name.partition("+")
        settings |= {"hidden_size": width, "intermediate_size": 2 * width}
        if self.backbone == "gated_delta_net":
            settings |= {"head_k_dim": 3 * width // 8, "head_v_dim": 3 * width // 4}
        preconditioner = VARIANTS[base][1]
        if preconditioner is not None:
            preconditioner = preconditioner | (ABLATIONS[ablation] if ablation else {})
            swept = {"eta": self.eta, "bounds": self.bounds}
            preconditioner |= {name: value for name, value in swept.items() if value is not None}
        return OSDNConfig.from_preset(f"{base}-tiny", preconditioner=preconditioner, **settings)


def sweep(
    names: Sequence[str], etas: Sequence[float] = (), boxes: Sequence[tuple[float, float]] = ()
) -> list[Variant]:
    """Every name once, or once for each step size and box if it scales online."""
    found = []
    for name in names:
        plain = Variant(name)
        if not plain.scales:
            found.append(plain)
            continue
        swept = product(etas or (None,), boxes or (None,))
        found += [Variant(name, eta, box) for eta, box in swept]
    return list(dict.fromkeys(found))


def baseline_of(variant: Variant, present: Sequence[Variant]) -> Variant:
    """The plain model of the variant's backbone if it is present, else (as for the zoo) the first of all."""
    plain = [v for v in present if v.backbone == variant.backbone and not v.scales and v.row is None]
    return (plain or list(present))[0]
