"""The names of models in every table, figure and page: as the paper spells them, with their size."""

import re

TITLES: dict[str, str] = {
    "delta_net": "DeltaNet",
    "osdn": "OSDN",
    "osdn-apf": "OSDN-APF",
    "gdn": "GDN",
    "osgdn": "OSGDN",
    "osgdn-apf": "OSGDN-APF",
    "kda": "KDA",
    "oskda": "OSKDA",
    "oskda-apf": "OSKDA-APF",
    "osdn-newton": "OSDN-Newton",
    "osgdn-newton": "OSGDN-Newton",
    "oskda-newton": "OSKDA-Newton",
    "osdn-newton-block-8": "OSDN-Newton+block-8",
    # The paper's ablations, and two choices that its text leaves open.
    "osdn-d0": "OSDN+D0",
    "osdn-d0-free": "OSDN+D0*",
    "osdn-beta-unaware": "OSDN β-unaware",
    "osgdn-apf-learned": "OSGDN-APF learned",
    "oskda-retention-0.999": "OSKDA r=0.999",
}
SIZES = {"340m": "340M", "1.3b": "1.3B", "tiny": "tiny"}


def variant_of(name: str) -> str | None:
    """The variant that a model's name starts with, without size and sweep.

    >>> [variant_of(name) for name in ("osdn-apf-340m", "osdn+d0 eta=0.1", "OSDN tiny", "gdn, cpu", "mine")]
    ['osdn-apf', 'osdn', 'osdn', 'gdn', None]
    """
    for variant, spelled in TITLES.items():
        if name == spelled or any(name.startswith(f"{spelled} {size}") for size in SIZES.values()):
            return variant
    base = re.split("[ ,+]", name, maxsplit=1)[0]
    if base in TITLES:
        return base
    variant, _, size = base.rpartition("-")
    return variant if variant in TITLES and size in SIZES else None


def title(name: str) -> str:
    """A model's name as the paper spells it; other names are unchanged.

    >>> title("osdn-apf-340m"), title("osdn+d0 eta=0.1"), title("mine")
    ('OSDN-APF 340M', 'OSDN+d0 eta=0.1', 'mine')
    """
    variant = variant_of(name)
    if variant is None or not name.startswith(variant):
        return name
    suffix = name[len(variant) :]
    size = suffix.removeprefix("-")
    return TITLES[variant] + (f" {SIZES[size]}" if size in SIZES else suffix)
