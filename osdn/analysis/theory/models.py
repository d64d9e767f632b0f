"""The statements, checked on the keys and gates of a model."""

from dataclasses import fields
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from osdn.analysis.capture import capture
from osdn.analysis.theory import token_local as tok
from osdn.analysis.theory.check import Check, merge
from osdn.analysis.theory.runs import Problem
from osdn.models.checkpoints import load_model, load_tokenizer


def problems_of(model: nn.Module, **inputs: Any) -> list[Problem]:
    """One problem per recurrent layer, from what the layers computed in `model(**inputs)`.

    Problems are in float64 and their keys are rescaled to norm 1, as the theorems assume: the layers' own
    norms fall short of 1 because of the epsilon in the denominator.
    """
    layers = capture(model, **inputs)
    for layer in layers:
        if layer.rule not in (None, "hypergradient"):
            raise ValueError(f"{layer.name}: the paper's statements are about its own rule, not {layer.rule}")
    return [_exact(layer.problem) for layer in layers]


def model_statements(problems: list[Problem]) -> list[Check]:
    """The statements that hold for any keys, checked on a model's problems."""
    boxed = [p for p in problems if p.bounds is not None]
    checks = [
        [tok.closed_form(p) for p in problems],
        [tok.monotone_descent(p) for p in boxed],
        [tok.affine_forgetting(p) for p in problems],
        [tok.token_local_bound(p) for p in boxed],
        [tok.regret_decomposition(p).check("Regret in three parts") for p in boxed],
    ]
    return [merge(same) for same in checks if same]  # some are about a box, which a model may lack


def statements_of(path: str | Path, sequences: int = 4, length: int = 256) -> list[Check]:
    """The statements, checked on the keys and gates of a saved model as it reads Python's documentation."""
    tokenizer, model = load_tokenizer(path), load_model(path)
    # a run of blanks repeats one key until its residual is rounding error, whose ratio cannot be measured
    text = " ".join(" ".join(topics.topics.values()).split())
    ids = tokenizer(text[: 20 * sequences * length], return_tensors="pt").input_ids
    return model_statements(
        problems_of(model, input_ids=ids[0, : sequences * length].view(sequences, length))
    )


def _exact(problem: Problem) -> Problem:
    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    doubles = {name: x.double() for name, x in values.items() if isinstance(x, Tensor)}
    return problem.with_(**doubles | {"k": F.normalize(doubles["k"], dim=-1)})
