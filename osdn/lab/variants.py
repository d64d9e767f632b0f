"""The models of the lab by name: the variants, their ablations and sweeps, and the rows of the zoo.

`osdn-apf` is a variant, and `osdn-apf-hybrid` the same with full attention in every fourth layer (in the
last, if there are fewer).  `osdn+d0` is an ablation, `delta_net+pgdn` a plain backbone with another
preconditioner, `gdn+comba` one with another update.  `--eta 0.01 0.1` replaces every variant of the paper's
rule by one copy per step size.  `gla` is a row of the zoo; if a variant has the same name, the row is
`zoo:delta_net`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from osdn.layers.updates import UPDATES
from osdn.models import OSDNConfig
from osdn.models.presets import VARIANTS
from osdn.zoo import RECURRENCES

# What may follow a plus, by the rule of the variant: a name and the preconditioner settings it changes.
# Those of the paper's rule are from its "OSDN Variant Ablations" and "OSDN implementation".
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"pgdn": {"rule": "pgdn"}},
    "hypergradient": {
        "d0": {"initial_scale": "projected"},
        "d0-free": {"initial_scale": "free"},
        "beta-blind": {"beta_aware": False},
        "retention-0.999": {"retention": 0.999},
        "per-channel": {"retention": "learned_per_channel"},
    },
    "newton": {"block-8": {"block_size": 8}, "prior-4": {"prior": 4.0}},
}
ABLATIONS = CHANGES["hypergradient"]


@dataclass(frozen=True)
class Variant:
    """A name, and what a sweep changes; None keeps the variant's own value.

    Args:
        name: a variant, optionally followed by "-hybrid" and by a plus and an ablation or update; or a row
            of the zoo.
        eta: step size of the paper's rule.
        bounds: box of the paper's rule.
        beta_bias: initial value of a learned bias of the write gate; None is a gate without a bias.
        write_scale: factor for every write strength; 2 allows strengths up to 2.
        heads: number of heads; None is two, as in the tiny presets.
    """

    name: str
    eta: float | None = None
    bounds: tuple[float, float] | None = None
    beta_bias: float | None = None
    write_scale: float = 1.0
    heads: int | None = None

    def __post_init__(self) -> None:
        base, change = self.base, self.name.partition("+")[2]
        if base not in VARIANTS and self.row is None:
            raise ValueError(
                f"there is no variant {base!r}; choose from {', '.join(VARIANTS)}, or from the zoo: "
                f"{', '.join(name for name in RECURRENCES if name not in VARIANTS)}"
            )
        if self.row is not None and (self.beta_bias is not None or self.write_scale != 1):
            raise ValueError(f"{base} is a row of the zoo; it has no beta_bias or write_scale")
        if not self.scales and (self.eta is not None or self.bounds is not None):
            raise ValueError(f"{base} does not scale online; it has no eta or box")
        if change and change not in self._changes() and self.update_rule is None:
            known = ", ".join([*self._changes(), *self._updates()])
            hint = f"choose from {known}" if known else "it has none"
            raise ValueError(f"there is no ablation {change!r} of {base}; {hint}")

    @property
    def row(self) -> str | None:
        """The row of the zoo with this name, if it is one."""
        row = self.name.removeprefix("zoo:")
        return row if row in RECURRENCES and self.name not in VARIANTS else None

    @property
    def base(self) -> str:
        """The name without ablation, update and "-hybrid"."""
        return self.name.partition("+")[0].removesuffix("-hybrid")

    @property
    def hybrid(self) -> bool:
        return self.row is None and self.name.partition("+")[0].endswith("-hybrid")

    @property
    def backbone(self) -> str:
        """The group in which variants are compared: the mixer, and whether there are attention layers."""
        return self.row or VARIANTS[self.base][0] + ("-hybrid" if self.hybrid else "")

    @property
    def plain(self) -> bool:
        """Whether it is a backbone with the plain delta rule."""
        return self.row is None and self.preconditioner is None and self.update_rule is None

    @property
    def scales(self) -> bool:
        """Whether it uses the paper's rule, whose settings can be swept."""
        return self.row is None and _rule(VARIANTS[self.base][1]) == "hypergradient"

    def _changes(self) -> dict[str, dict[str, Any]]:
        base = self.base
        return {} if self.row is not None or base not in VARIANTS else CHANGES[_rule(VARIANTS[base][1])]

    def _updates(self) -> tuple[str, ...]:
        known = self.row is None and self.base in VARIANTS
        return UPDATES if known and VARIANTS[self.base][1] is None else ()

    @property
    def update_rule(self) -> str | None:
        """The update named after the plus of a plain backbone; None is the delta rule."""
        change = self.name.partition("+")[2]
        return change if change in self._updates() else None

    @property
    def preconditioner(self) -> dict[str, Any] | None:
        """The settings of the preconditioner; None for a plain backbone, another update or a zoo row."""
        if self.row is not None or self.update_rule is not None:
            return None
        base, change = self.base, self.name.partition("+")[2]
        swept = {name: x for name, x in (("eta", self.eta), ("bounds", self.bounds)) if x is not None}
        if VARIANTS[base][1] is None and not change:
            return None
        return (VARIANTS[base][1] or {}) | (self._changes()[change] if change else {}) | swept

    @property
    def label(self) -> str:
        eta = "" if self.eta is None else f" eta={self.eta:g}"
        box = "" if self.bounds is None else f" box={self.bounds[0]:g}:{self.bounds[1]:g}"
        bias = "" if self.beta_bias is None else f" bias={self.beta_bias:g}"
        factor = "" if self.write_scale == 1 else f" write={self.write_scale:g}"
        heads = "" if self.heads is None else f" heads={self.heads}"
        return self.name + eta + box + bias + factor + heads

    def config(self, width: int, **settings: Any) -> OSDNConfig:
        """The model of this variant at a width, with the proportions of the tiny presets.

        For a row of the zoo, it is the model whose mixers the row replaces.
        """
        if self.row is not None:
            return Variant("delta_net").config(width, **settings)
        heads = self.heads or 2
        settings |= {"hidden_size": width, "intermediate_size": 2 * width, "num_heads": heads}
        if VARIANTS[self.base][0] == "gated_delta_net":
            settings |= {"head_k_dim": 3 * width // (4 * heads), "head_v_dim": 3 * width // (2 * heads)}
        settings |= {"preconditioner": self.preconditioner, "update_rule": self.update_rule}
        settings |= {"beta_bias": self.beta_bias, "write_scale": self.write_scale}
        return OSDNConfig.from_preset(f"{self.name.partition('+')[0]}-tiny", **settings)


def _rule(settings: dict[str, Any] | None) -> str:
    return "plain" if settings is None else settings.get("rule", "hypergradient")


def sweep(
    names: Sequence[str],
    etas: Sequence[float] = (),
    boxes: Sequence[tuple[float, float]] = (),
    beta_bias: float | None = None,
    write_scale: float = 1.0,
) -> list[Variant]:
    """Every name once, or once per step size and box if it scales online."""
    variants = []
    for name in names:
        if not Variant(name).scales:
            variants.append(Variant(name, None, None, beta_bias, write_scale))
            continue
        swept = product(etas or (None,), boxes or (None,))
        variants += [Variant(name, eta, box, beta_bias, write_scale) for eta, box in swept]
    return list(dict.fromkeys(variants))


def baseline_of(variant: Variant, present: Sequence[Variant]) -> Variant:
    """The plain model of the variant's backbone if present, otherwise (as for zoo rows) the first variant."""
    plain = [v for v in present if v.backbone == variant.backbone and v.plain]
    return (plain or list(present))[0]
