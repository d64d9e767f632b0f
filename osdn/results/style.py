"""One look for every figure: fonts, grid, and one colour per model everywhere."""

import io
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from osdn.results.names import title, variant_of

STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "svg.fonttype": "none",  # text stays text: it is searchable and uses the page's font
    "svg.hashsalt": "osdn",  # drawing a figure twice gives the same bytes
}
styled = matplotlib.rc_context(STYLE)  # a decorator: matplotlib reads some settings only while drawing
GREY = "#6b7482"
INK = "#20242c"

# A hue per backbone (slate, teal, violet), warm colours for online scaling on DeltaNet.
COLOURS = {
    "delta_net": "#4c566a",
    "osdn": "#2a6fbb",
    "osdn-apf": "#c8641e",
    "gdn": "#5f8f86",
    "osgdn": "#0f7d6b",
    "osgdn-apf": "#7a9a1f",
    "kda": "#9a7fb0",
    "oskda": "#7a3fa0",
    "oskda-apf": "#b23a78",
    "osdn-newton": "#1c8a4c",
    "osdn-newton-block-8": "#0b5d2e",
    "osgdn-newton": "#a05a14",
    "oskda-newton": "#3b6fd1",
    "osdn-d0": "#b08a1e",
    "osdn-d0-free": "#8c5a2b",
    "osdn-beta-unaware": "#b23a48",
}
OTHERS = ("#1f8fa8", "#a8477a", "#6c8b2f", "#c2452d", "#3f5fae", "#8a6d1b", "#56407f", "#2f7d4f", "#946047")


def colours(names: Iterable[str]) -> dict[str, str]:
    """One colour per name, all different while there are enough: a variant has its own colour everywhere.

    If a variant appears several times, with other sizes or sweeps, only the first gets its colour.
    """
    chosen: dict[str, str] = {}
    waiting = []
    for name in names:
        own = COLOURS.get(variant_of(name) or "")
        if own is not None and own not in chosen.values():
            chosen[name] = own
        else:
            waiting.append(name)
    free = [c for c in (*OTHERS, *COLOURS.values()) if c not in chosen.values()] or list(OTHERS)
    for name in waiting:
        # by hash, so that a name has the same colour everywhere if it is free
        index = zlib.crc32(name.encode()) % len(OTHERS)
        preferred = OTHERS[index]
        colour = preferred if preferred in free else free[0]
        chosen[name] = colour
        if len(free) > 1:
            free.remove(colour)
    return chosen


def legend_label(name: str) -> str:
    """A name for a legend: matplotlib treats `$` as mathematics and skips labels that start with `_`."""
    text = title(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def panels(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure in the common style."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False, **options)]


def panel(xlabel: str = "", ylabel: str = "", size: tuple[float, float] = (4.6, 3.1)) -> tuple[Figure, Axes]:
    figure, [[axes]] = panels(1, 1, size)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def legend(axes: Axes, beside: bool = False) -> None:
    """Add a legend; with many lines it goes beside the panel, where it hides nothing."""
    handles, _ = axes.get_legend_handles_labels()
    if beside or len(handles) > 4:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    elif len(handles) > 1:
        axes.legend(loc="best")


def save(figures: Mapping[str, Figure], folder: Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Save every figure in these formats."""
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, dict[str, Any]] = {"svg": {"metadata": {"Date": None}}, "png": {"dpi": 160}}
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, figure in figures.items():
            for suffix in formats:
                paths.append(folder / f"{name}.{suffix}")
                figure.savefig(paths[-1], **options[suffix])
    return paths


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for a page, with identifiers unique to this figure."""
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg_text = text.getvalue()
    svg_text = svg_text[svg_text.index("<svg") :]
    svg_text = re.sub(r"<metadata>.*?</metadata>", "", svg_text, flags=re.DOTALL)
    prefix = f"f{zlib.crc32(svg_text.encode()):x}"
    svg_text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg_text)
    svg_text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg_text)
    svg_text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg_text)
    width = float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg_text).group(1))  # type: ignore[union-attr]
    size = f'style="width:{width / 12:.1f}rem"'  # as wide as drawn, but never wider than the page
    return re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', rf'<svg \1 {size} role="img">', svg_text, count=1)
