"""A model's own keys and gates as problems: what its mixers hand to the operators, recorded as they do."""

from pathlib import Path
from pydoc_data import topics
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from osdn.analysis.theory import token_local as tok
from osdn.analysis.theory.check import Check, merge
from osdn.analysis.theory.runs import Problem
from osdn.layers import mixers
from osdn.ops import delta_rule, online_scaled_delta_rule


@torch.no_grad()
def problems_of(model: nn.Module, **inputs: Any) -> list[Problem]:
    """One problem a mixer, in the order in which `model(**inputs)` runs them.

    Keys are scaled to norm 1 in float64, as the theorems have them: the layers' own norm is short of 1 by the
    epsilon in its denominator.
    """
    problems: list[Problem] = []

    def plain(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **settings: Any) -> Any:
        problems.append(_problem(k, v, beta, {**settings, "eta": 0.0}))  # d stays 1
        return delta_rule(q, k, v, beta, **settings)

    def scaled(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **settings: Any) -> Any:
        problems.append(_problem(k, v, beta, settings))
        return online_scaled_delta_rule(q, k, v, beta, **settings)

    with patch.multiple(mixers, delta_rule=plain, online_scaled_delta_rule=scaled):
        model(**inputs)
    return problems


def model_statements(problems: list[Problem]) -> list[Check]:
    """The statements that hold whatever the keys, on a model's own."""
    boxed = [p for p in problems if p.bounds is not None]
    return [
        merge([tok.closed_form(p) for p in problems]),
        merge([tok.monotone_descent(p) for p in boxed]),
        merge([tok.affine_forgetting(p) for p in problems]),
        merge([tok.token_local_bound(p) for p in boxed]),
        merge([tok.regret_decomposition(p).check("Regret in three parts") for p in boxed]),
    ]


def statements_of(path: str | Path, sequences: int = 4, length: int = 256) -> list[Check]:
    """The statements on the keys and gates of a saved model as it reads Python's own documentation."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    # runs of blanks repeat one key until its residual is rounding error, where no ratio can be measured
    text = " ".join(" ".join(topics.topics.values()).split())
    ids = AutoTokenizer.from_pretrained(path)(text[: 20 * sequences * length], return_tensors="pt").input_ids
    return model_statements(
        problems_of(model, input_ids=ids[0, : sequences * length].view(sequences, length))
    )


def _problem(k: Tensor, v: Tensor, beta: Tensor, settings: dict[str, Any]) -> Problem:
    if settings.get("cu_seqlens") is not None:
        raise ValueError("packed sequences are one problem each; pass them one by one, or as a batch")
    kept = ("eta", "bounds", "retention", "initial_scale", "beta_aware", "eps", "log_decay", "initial_state")
    groups = v.shape[2] // k.shape[2]
    return Problem(
        F.normalize(k.double(), dim=-1).repeat_interleave(groups, 2),
        v.double(),
        beta.double(),
        **{name: _double(settings[name]) for name in kept if name in settings},
    )


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else x
