"""The demo's page: one HTML file without any other, figures as inline SVG, words made from the numbers."""

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from osdn.lab import figures as fig
from osdn.lab.page import PAGE
from osdn.lab.recall import RecallTask
from osdn.lab.statistics import Difference
from osdn.lab.summary import Results, Row
from osdn.lab.training import build
from osdn.records import environment

NAMES = {
    "accuracy": "accuracy",
    "accuracy_2x": "accuracy with twice the pairs",
    "q_geo": "residual ratio",
    "loss": "validation loss",
}


def write_report(
    path: Path,
    results: dict[str, Results],
    rows: dict[str, list[Row]],
    speeds: dict[str, Any],
    task: RecallTask,
    runs: dict[str, Any],
) -> Path:
    """The page for `results` and `rows` of the parts "recall" and "text"."""
    recall, text = results["recall"], results["text"]
    numbers = _table(rows["recall"], "recall") + _table(rows["text"], "text")
    on_recall = [
        (fig.learning_curves(recall, "accuracy"), CAPTIONS["learning"]),
        (fig.accuracy_by_pairs(recall), CAPTIONS["pairs"]),
    ]
    ratios = [
        (fig.residual_by_position(recall, task.boundaries()), CAPTIONS["residual"]),
        (fig.residual_by_position(text), CAPTIONS["residual on text"]),
    ]
    on_text = [
        (fig.learning_curves(text, "loss"), CAPTIONS["text"]),
        (fig.loss_by_position(text), CAPTIONS["position"]),
    ]
    sections = [
        _section("What was trained", _trained(runs)),
        _section("In numbers", numbers + f'<p class="note">{CAPTIONS["numbers"]}</p>'),
        _section("What this run shows, and what it does not", honest_paragraphs(rows)),
        _section("Recall", _figures("recall", on_recall)),
        _section("Residual ratio", _figures("ratio", ratios)),
        _section("How the scale moved", _figures("scale", _heat_maps(recall, task))),
        _section("Text", _figures("text", on_text)),
        _section("What the text models write", _samples(text)),
        _section("Speed", _figures("speed", _speed_figures(speeds))),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAGE.format(body="\n".join(sections), foot=_foot()), encoding="utf-8")
    return path


def honest_paragraphs(rows: dict[str, list[Row]]) -> str:
    """What can and cannot be concluded, from the differences alone."""
    paragraphs = []
    for part, found in rows.items():
        for metric in dict.fromkeys(row.metric for row in found):
            scaled = [row for row in found if row.metric == metric and row.difference is not None]
            words = "; ".join(
                f"{row.variant} {conclusion(row.difference)}" for row in scaled if row.difference
            )
            title = f"{NAMES[metric].capitalize()} on {part}"
            paragraphs.append(f"<p><b>{title}</b>, against {scaled[0].baseline}: {escape(words)}.</p>")
    return "".join(paragraphs) + NOT_SHOWN


def conclusion(difference: Difference) -> str:
    """What a paired difference allows to be said."""
    d, n = difference, difference.seeds
    if math.isnan(d.p_value):
        return f"was not a finite number in every run ({n} seeds)"
    if d.low <= 0 <= d.high:
        return f"shows no difference at this scale ({d}, {n} seeds)"
    direction = "higher" if d.mean > 0 else "lower"
    if d.seen:
        return f"is {direction} ({d}, {n} seeds, p = {d.p_value:.2g})"
    return f"came out {direction} ({d}), but {n} seeds cannot tell it from chance (p = {d.p_value:.2g})"


def _trained(runs: dict[str, Any]) -> str:
    recall, text = runs["recall"][0], runs["text"][0]
    task = recall.task
    weights = sum(p.numel() for p in build(recall).parameters())
    count = len({run.seed for run in runs["recall"]}), len({run.seed for run in runs["text"]})
    variants = list(dict.fromkeys(run.variant.label for run in runs["recall"]))
    return f"""
<p>{", ".join(variants[:-1])} and {variants[-1]}: {recall.layers} layers of width {recall.width}, {weights:,}
weights on recall, from scratch and on this machine. Models with the same seed start from the same weights and
see the same batches in the same order.</p>
<p><b>Recall</b>: {task.pairs} key–value pairs, presented {_times(task.passes)}, then each key as a query
among random tokens, {task.length} tokens a sequence (Arora et al.,
<a href="https://arxiv.org/abs/2312.04927">Zoology</a>); {recall.steps} steps of {recall.batch} sequences,
{count[0]} seeds. <b>Text</b>: the sources of Python's standard library, {text.task.vocab_size:,} byte-pair
tokens; {text.steps} steps of {text.batch} × {text.task.length} tokens, {count[1]} seeds.</p>
<p><b>Online scaling</b> multiplies every key that is written into the state by a scale d, a number a feature,
which gradient descent adjusts token by token as the keys go by. delta_net has no scale, osdn has one, and
osdn-apf also learns how fast to forget it.</p>"""


def _table(rows: Sequence[Row], title: str) -> str:
    metrics = list(dict.fromkeys(row.metric for row in rows))
    head = "".join(f"<th>{NAMES[m]}</th><th>difference</th>" for m in metrics)
    lines = []
    for variant in dict.fromkeys(row.variant for row in rows):
        cells = [f"<th>{escape(variant)}</th>"]
        for row in rows:
            if row.variant == variant:
                cells.append(f"<td>{_split(str(row.value))}</td>")
                cells.append(f"<td>{_split(str(row.difference)) if row.difference else '–'}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"""<div class="scroll"><table><thead><tr><th>{title}</th>{head}</tr></thead>
<tbody>{"".join(lines)}</tbody></table></div>"""


def _split(text: str) -> str:
    mean, _, interval = text.partition(" ")
    return f"{mean}<br><small>{interval}</small>"


def _heat_maps(recall: Results, task: RecallTask) -> list[tuple[Figure, str]]:
    found = []
    for variant, mine in recall.items():
        scale = mine[0].get("scale")
        if scale is not None:
            d = np.array(scale)
            moved = (
                f"It ended between {d[-1].min():.3f} and {d[-1].max():.3f}; it started at {d[0].mean():.3g}."
            )
            words = (
                f"The scale of {variant.label} along one prompt, layers and heads below each other. {moved}"
            )
            found.append((fig.scale_heat_map(d, variant.label, task.boundaries()), words))
    return found


def _speed_figures(speeds: dict[str, Any]) -> list[tuple[Figure, str]]:
    operators, training = speeds["operators_ms"], speeds["training"]
    ratio = operators["gdn in transformers"] / operators["osgdn"]
    gain, threads = training["auto"] / training["reference"], speeds["machine"]["threads"]
    times = fig.bars(list(operators), list(operators.values()), "milliseconds, forward and backward")
    steps = fig.bars(["fast operators", "reference"], list(training.values()), "training steps a second")
    return [
        (
            times,
            f"The operators on 2,048 tokens, 8 heads, K = V = 128, float32, {threads} threads. osgdn scales "
            f"online on top of what gdn does; transformers takes {ratio:.1f} times as long for gdn alone.",
        ),
        (
            steps,
            f"The recall model on 8 sequences of 256 tokens, one thread: {gain:.1f} times the steps of the "
            f"same model on the reference, which goes token by token.",
        ),
    ]


def _samples(text: Results) -> str:
    return "".join(
        f"<h3>{escape(variant.label)}</h3><pre>{escape(mine[0]['sample'])}</pre>"
        for variant, mine in text.items()
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _figures(name: str, figures: Sequence[tuple[Figure, str]]) -> str:
    inside = "".join(
        f"<figure>{_inline(figure, f'{name}{i}')}<figcaption>{escape(caption)}</figcaption></figure>"
        for i, (figure, caption) in enumerate(figures)
    )
    return f'<div class="figures">{inside}</div>'


def _inline(figure: Figure, prefix: str) -> str:
    """The figure's SVG with identifiers of its own, as wide as the page lets it be."""
    text = fig.svg(figure)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    return re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img">', text, count=1)


def _foot() -> str:
    made = environment()
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return f"Made by <code>osdn demo</code> on {escape(made['machine']['cpu'])}; {versions}."


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


CAPTIONS = {
    "numbers": "Mean over seeds [95 % bootstrap interval], and the difference to delta_net with the same "
    "seeds. Higher accuracy and lower loss are better; a lower residual ratio means that a write removes "
    "more of the error it is about.",
    "learning": "Share of queries answered right while training.",
    "pairs": "After training, by how many pairs there are to remember and how often they were presented. The "
    "dashed line is what the models were trained on.",
    "residual": "The share of a token's own error that its write leaves, f(after) / f(before): geometric "
    "mean over layers, heads and prompts, as in the paper's Figure “Direct theorem-facing residual "
    "contraction”. Bands are intervals over seeds.",
    "residual on text": "The same on held-out text, where nothing is repeated on purpose.",
    "text": "Training loss on Python's standard library, nats a token.",
    "position": "Loss on held-out files by position; every window starts with an empty state.",
}
NOT_SHOWN = """
<p>What it does not show: these models are tiny and trained for seconds. The paper
reports its gains at 340 million weights and 10 billion tokens, from single seeds. A lower residual ratio is a
statement about each token's own write; it does not say that earlier associations survive it, and it need not
come with better recall. Intervals from few seeds are narrower than they should be, which is why a difference
counts here only if random signs would rarely give one as large.</p>"""
