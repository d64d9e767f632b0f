"""Figures with as many models as a reproduction has: every label is there, and nothing covers a curve."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from osdn.results import plots
from osdn.results.scores import Score

MODELS = [f"osdn-newton-block-8 retention=0.99{i}" for i in range(9)]


def run(i):
    return [{"tokens": 1000 * s, "step": s, "loss": 3 - 0.01 * s + 0.1 * i} for s in range(1, 50)]


def diagnosis(i):
    value = {"value": 0.1 * (i + 1), "low": 0.1 * i, "high": 0.1 * (i + 2)}
    summary = {"by_position": [value] * 5, "boundary": 0.5, "q_geo": value}
    return {"all": summary, "tasks": {"once": summary, "twice": summary}}


FIGURES = {
    "losses": lambda: plots.losses({model: run(i) for i, model in enumerate(MODELS)}),
    "positions": lambda: plots.perplexity_by_position({model: [Score(3.0), Score(4.0)] for model in MODELS}),
    "contraction": lambda: plots.contraction({model: diagnosis(i) for i, model in enumerate(MODELS)}),
    "tasks": lambda: plots.tasks({model: diagnosis(i) for i, model in enumerate(MODELS)}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_labels_are_complete_and_cover_no_panel(name):
    figure = FIGURES[name]()
    FigureCanvasAgg(figure).draw()
    panels = [axes.get_window_extent() for axes in figure.axes]
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    texts = [text for legend in legends for text in legend.get_texts()]
    texts += [label for axes in figure.axes for label in axes.get_yticklabels()]
    labels = [text for text in texts if "retention" in text.get_text()]
    assert len(labels) == len(MODELS)
    assert all(
        figure.bbox.contains(*corner) for label in labels for corner in label.get_window_extent().corners()
    )
    boxes = [legend.get_window_extent() for legend in legends] + [x.get_window_extent() for x in labels]
    assert not any(box.overlaps(panel) for box in boxes for panel in panels)


@pytest.mark.parametrize("name", ["losses", "contraction"])
def test_panels_keep_most_of_the_width(name):
    figure = FIGURES[name]()
    FigureCanvasAgg(figure).draw()
    assert figure.axes[0].get_window_extent().width > 0.3 * figure.bbox.width
