"""The demo's page: conclusions on the first screen, then the evidence; the text follows the numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from osdn.results import lab_plots as plots
from osdn.results.experiments import METRICS, conclusion, difference_of, experiment_table, verdict
from osdn.results.lab_plots import Results
from osdn.results.names import title
from osdn.results.page import figure, figures, section, table, write_page

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Demo:
    """What the demo measured: the results of both experiments by label, and the rows of their summaries."""

    recall: Results
    text: Results
    rows: Mapping[str, Rows]  # for "recall" and "text"
    speeds: dict[str, Any]  # of the operators and of training, with the number of threads
    weights: int  # parameters of the recall model
    boundaries: Sequence[tuple[int, str]]  # positions where the parts of a recall sequence start


def write_demo(path: Path, demo: Demo) -> Path:
    """Write the page."""
    recall, text = demo.recall, demo.text
    verdicts = [
        verdict(demo.rows["recall"], "accuracy_2x", "Recall with twice the pairs of training"),
        verdict(demo.rows["text"], "loss", "Validation loss on text"),
        _speed_verdict(demo.speeds),
    ]
    listed = "".join(f"<li>{escape(words)}</li>" for words in verdicts)
    hero = figure(plots.accuracy_by_pairs(recall), CAPTIONS["pairs"])
    lead = (
        "What online scaling of the write keys, Newton's method and a lower start of the write gate do to a "
        "small delta-rule model, trained on this machine in minutes, with several seeds and intervals."
    )
    body = [
        f'<div class="hero"><ul class="verdicts">{listed}</ul>{hero}</div>',
        section("What this run shows and what it does not", paragraphs(demo.rows), NOT_SHOWN),
        section(
            "In numbers",
            *(table(experiment_table(demo.rows[part], part.capitalize())) for part in ("recall", "text")),
            f'<p class="note">{CAPTIONS["numbers"]}</p>',
        ),
        section("What was trained", _trained(demo)),
        section(
            "Learning",
            figures(
                [
                    (plots.learning_curves(recall, "accuracy"), CAPTIONS["learning"]),
                    (plots.learning_curves(text, "loss"), CAPTIONS["text"]),
                    (plots.loss_by_position(text), CAPTIONS["position"]),
                ]
            ),
        ),
        section(
            "Residual ratio",
            figures(
                [
                    (plots.residual_by_position(recall, demo.boundaries), CAPTIONS["residual"]),
                    (plots.residual_by_position(text), CAPTIONS["residual on text"]),
                ]
            ),
        ),
        section("How the scale moved", figures(_heat_maps(recall, demo.boundaries))),
        section("Speed", figures(_speed_figures(demo.speeds))),
        section("What the text models write", _samples(text)),
    ]
    return write_page(path, "Online Scaled DeltaNet: a demonstration", lead, body, "osdn demo")


def paragraphs(rows: Mapping[str, Rows]) -> str:
    """What the differences do and do not show."""
    parts = []
    for part, part_rows in rows.items():
        for metric in dict.fromkeys(row["metric"] for row in part_rows):
            compared = [
                (row, d)
                for row in part_rows
                if row["metric"] == metric and (d := difference_of(row["difference"])) is not None
            ]
            words = "; ".join(f"{title(row['variant'])} {conclusion(d)}" for row, d in compared)
            what = f"{METRICS[metric].capitalize()} on {part}"
            base = title(compared[0][0]["baseline"])
            parts.append(f"<p><b>{what}</b>, against {escape(base)}: {escape(words)}.</p>")
    return "".join(parts)


def _trained(demo: Demo) -> str:
    recall, text = (next(iter(results.values()))[0]["settings"] for results in (demo.recall, demo.text))
    seeds = [len(next(iter(results.values()))) for results in (demo.recall, demo.text)]
    names = [title(name) for name in demo.recall]
    task = recall["task"]
    return f"""
<p>{", ".join(names[:-1])} and {names[-1]}: {recall["layers"]} layers of width {recall["width"]},
{demo.weights:,} weights in the recall model, trained from scratch on this machine. Models with the same seed
start from the same weights and see the same batches in the same order.</p>
<p><b>Recall</b>: {task["pairs"]} key–value pairs, presented {_times(task["passes"])}, then each key as a
query among random tokens, {task["length"]} tokens per sequence (Arora et al.,
<a href="https://arxiv.org/abs/2312.04927">Zoology</a>); {recall["steps"]} steps of {recall["batch"]}
sequences, {seeds[0]} seeds. <b>Text</b>: the sources of Python's standard library,
{text["task"]["vocab_size"]:,} byte-pair tokens; {text["steps"]} steps of {text["batch"]} ×
{text["task"]["length"]} tokens, {seeds[1]} seeds.</p>
<p><b>Online scaling</b> multiplies every key that is written into the state by a scale d, one number per
feature, which gradient descent adjusts after every token. DeltaNet has no scale, OSDN has one, and OSDN-APF
also learns how fast to forget it. <b>Newton's method</b> needs no step size: it multiplies the key by an
estimate of the inverse covariance of the keys so far, here in blocks of eight features.
<b>The write gate</b> of a DeltaNet starts at a strength of one half; with a learned bias that starts at −2,
it starts at 0.12.</p>"""


def _heat_maps(recall: Results, boundaries: Sequence[tuple[int, str]]) -> list[tuple[Figure, str]]:
    captioned = []
    for label, runs in recall.items():
        scale = runs[0].get("scale")
        if scale is not None:
            d = np.array(scale)
            caption = (
                f"The scale of {title(label)} along one prompt, with layers and heads stacked. It started at "
                f"{d[0].mean():.3g} and ended between {d[-1].min():.3f} and {d[-1].max():.3f}."
            )
            captioned.append((plots.scale_heat_map(d, title(label), boundaries), caption))
    return captioned


def _speed_verdict(speeds: dict[str, Any]) -> str:
    operators, training = speeds["operators_ms"], speeds["training"]
    ratio = operators["gdn in transformers"] / operators["osgdn"]
    gain = training["auto"] / training["reference"]
    return (
        f"Speed: forward and backward of the operator on 2,048 tokens take {operators['osgdn']:.0f} ms with "
        f"online scaling, {ratio:.1f} times as fast as the gated delta rule in transformers; training is "
        f"{gain:.0f} times as fast as with the token-by-token reference."
    )


def _speed_figures(speeds: dict[str, Any]) -> list[tuple[Figure, str]]:
    operators, training = speeds["operators_ms"], speeds["training"]
    threads = speeds["machine"]["threads"]
    times = plots.speed_bars(list(operators), list(operators.values()), "milliseconds, forward and backward")
    steps = plots.speed_bars(
        ["fast operators", "reference"], list(training.values()), "training steps per second"
    )
    return [
        (
            times,
            f"The operators on 2,048 tokens, 8 heads, K = V = 128, float32, {threads} threads. OSGDN is GDN "
            f"plus online scaling.",
        ),
        (
            steps,
            "The recall model on 8 sequences of 256 tokens, one thread, compared with the same model on the "
            "token-by-token reference.",
        ),
    ]


def _samples(text: Results) -> str:
    return "".join(
        f"<h3>{escape(title(label))}</h3><pre>{escape(runs[0]['sample'])}</pre>"
        for label, runs in text.items()
    )


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


CAPTIONS = {
    "numbers": "Means over seeds with 95 % bootstrap intervals, and differences from DeltaNet with the same "
    "seeds. A p-value is bold if the difference is significant: p ≤ 0.05, and the interval excludes zero. "
    "Higher accuracy and lower loss are better; a lower residual ratio means that a write removes more of "
    "its own error.",
    "learning": "Share of queries answered correctly during training.",
    "pairs": "Recall after training, by the number of pairs to remember and how often they were presented. "
    "The dashed line marks the number of pairs in training.",
    "residual": "The share of a token's own error that its write leaves, f(after) / f(before): geometric "
    "mean over layers, heads and prompts, as in the paper's Figure “Direct theorem-facing residual "
    "contraction”. Bands are intervals over seeds.",
    "residual on text": "The same on held-out text, which is not deliberately repeated.",
    "text": "Training loss on Python's standard library, nats per token.",
    "position": "Loss on held-out files by position; every window starts with an empty state.",
}
NOT_SHOWN = """
<p>What it does not show: these models are tiny and train for seconds. The paper reports its gains for 340
million weights and 10 billion tokens, from single seeds. A lower residual ratio is a statement about each
token's own write. It does not mean that earlier associations survive the write, and it need not come with
better recall. Intervals from few seeds are too narrow, so a difference counts here only if random signs would
rarely produce one as large.</p>"""
