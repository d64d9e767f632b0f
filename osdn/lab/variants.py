"""The models of the lab by name: the variants, their ablations, sweeps, and the rows of the zoo.

`osdn-apf` is a variant, `osdn-apf-hybrid` the same with every fourth layer (or, of fewer, the last) full
attention, `osdn+d0` an ablation, `delta_net+pgdn` a plain backbone with another preconditioner and
`gdn+comba` one with another update; `--eta 0.01 0.1` replaces every variant of the paper's rule by one copy
per step size.  `gla` is a row of the zoo; where a variant has the same name, the row is `zoo:delta_net`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from osdn.layers.updates import UPDATES
from osdn.models import OSDNConfig
from osdn.models.presets import VARIANTS
from osdn.zoo import RECURRENCES

# Settings of the preconditioner that may follow a plus, by the rule of the variant before it.  Those of the
# paper's rule are its "OSDN Variant Ablations" and "OSDN implementation".
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
    """A name, and what a sweep changed; None is the variant's own.

    Args:
        name: of a variant, perhaps with "-hybrid" after it, perhaps with an ablation or an update after a
            plus; or of a row of the zoo.
        eta: step size of the paper's rule.
        bounds: its box.
        beta_bias: where a learned bias of the write gate starts; None is a gate without one.
        write_scale: a factor of every write strength; 2 allows strengths up to 2.
        heads: how many; None is the tiny presets' two.
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
                f"there is no variant {base!r}; there are {', '.join(VARIANTS)}, "
                f"and of the zoo {', '.join(name for name in RECURRENCES if name not in VARIANTS)}"
            )
        if self.row is not None and (self.beta_bias is not None or self.write_scale != 1):
            raise ValueError(f"{base} is a row of the zoo; it has no beta_bias or write_scale")
        if not self.scales and (self.eta is not None or self.bounds is not None):
            raise ValueError(f"{base} does not scale online; it has no eta or box")
        if change and change not in self._changes() and self.update_rule is None:
            known = ", ".join([*self._changes(), *self._updates()]) or "none for it"
            raise ValueError(f"there is no ablation {change!r} of {base}; there are {known}")

    @property
    def row(self) -> str | None:
        """The row of the zoo that is meant, if one is."""
        row = self.name.removeprefix("zoo:")
        return row if row in RECURRENCES and self.name not in VARIANTS else None

    @property
    def base(self) -> str:
        """The variant without an ablation, and without attention."""
        return self.name.partition("+")[0].removesuffix("-hybrid")

    @property
    def hybrid(self) -> bool:
        return self.row is None and self.name.partition("+")[0].endswith("-hybrid")

    @property
    def backbone(self) -> str:
        """What a variant is compared within: its mixer, and whether there is attention beside it."""
        return self.row or VARIANTS[self.base][0] + ("-hybrid" if self.hybrid else "")

    @property
    def plain(self) -> bool:
        """Whether it is a backbone with nothing but the plain delta rule."""
        return self.row is None and self.preconditioner is None and self.update_rule is None

    @property
    def scales(self) -> bool:
        """Whether it scales its writes by the paper's rule, whose settings can be swept."""
        return self.row is None and _rule(VARIANTS[self.base][1]) == "hypergradient"

    def _changes(self) -> dict[str, dict[str, Any]]:
        base = self.base
        return {} if self.row is not None or base not in VARIANTS else CHANGES[_rule(VARIANTS[base][1])]

    def _updates(self) -> tuple[str, ...]:
        known = self.row is None and self.base in VARIANTS
        return UPDATES if known and VARIANTS[self.base][1] is None else ()

    @property
    def update_rule(self) -> str | None:
        """The update that follows a plain backbone's name; None is the delta rule."""
        change = self.name.partition("+")[2]
        return change if change in self._updates() else None

    @property
    def preconditioner(self) -> dict[str, Any] | None:
        """Its settings; None for a plain backbone, another update and a row of the zoo."""
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
        """The model of this variant at a width, which the tiny presets' proportions follow.

        For a row of the zoo it is the model whose mixers the row replaces.
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
    """Every name once, or once for each step size and box if it scales online."""
    found = []
    for name in names:
        if not Variant(name).scales:
            found.append(Variant(name, None, None, beta_bias, write_scale))
            continue
        swept = product(etas or (None,), boxes or (None,))
        found += [Variant(name, eta, box, beta_bias, write_scale) for eta, box in swept]
    return list(dict.fromkeys(found))


def baseline_of(variant: Variant, present: Sequence[Variant]) -> Variant:
    """The plain model of the variant's backbone if it is present, else (as for the zoo) the first of all."""
    plain = [v for v in present if v.backbone == variant.backbone and v.plain]
    return (plain or list(present))[0]
