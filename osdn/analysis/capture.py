"""What a model's recurrent layers hand to their recurrence: keys, values, gates, decay and scale, recorded.

Every delta-rule layer, ours or one of `transformers`, calls a function of its own module with exactly these
tensors.  While a capture is on, that name stands for a wrapper that passes them on and records them, so what
is recorded is what the layer computed with, by construction.  A hook on each layer says whose call it is.
Layers are handed over one at a time, as they run: a caller that keeps none of them needs the memory of one.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from osdn.analysis.theory.runs import Problem
from osdn.layers import TokenMixer
from osdn.layers.precision import l2_normalize

# What layers of `transformers` (Qwen3-Next, Qwen3.5, Kimi Linear, ...) call their recurrence.  All take
# (query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel) and return the outputs first.
RECURRENCES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)


@dataclass(frozen=True)
class LayerCapture:
    """One layer's call of its recurrence."""

    layer: int  # which recurrent layer of the model, counted from 0
    name: str  # its module's name in the model
    scaled: bool  # whether it has an online preconditioner
    problem: Problem  # k [B, T, HV, K], v, beta, decay, settings of phase 1; in float32
    q: Tensor  # [B, T, HV, K]
    output: Tensor  # [B, T, HV, V], what the layer's own recurrence returned


def recurrent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that run a delta rule, by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if _functions(module)}


@contextmanager
def capturing(model: nn.Module, receive: Callable[[LayerCapture], None]) -> Iterator[None]:
    """Calls `receive` for every recurrent layer as it runs, as long as the context is open.

    >>> from osdn import OSDNConfig, OSDNForCausalLM
    >>> model, seen = OSDNForCausalLM(OSDNConfig.from_preset("osdn-tiny")), []
    >>> with capturing(model, seen.append):
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> [layer.problem.k.shape for layer in seen]
    [torch.Size([1, 3, 2, 32]), torch.Size([1, 3, 2, 32])]
    """
    layers = recurrent_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no recurrent layer that can be captured: this reads models of osdn "
            f"and, of transformers, those whose layers call one of {', '.join(RECURRENCES)}"
        )
    running: list[tuple[int, str]] = []

    def enter(which: tuple[int, str], *_: Any) -> None:
        running.append(which)

    def leave(*_: Any) -> None:
        running.pop()

    def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if running:  # another model may use the same code meanwhile
            receive(_read(*running[-1], function.__name__, args, kwargs, result[0]))
        return result

    with ExitStack() as stack:
        functions = {f for module in layers.values() for f in _functions(module)}
        for source, name in functions:
            original = getattr(sys.modules[source], name)
            stack.enter_context(patch.object(sys.modules[source], name, partial(record, original)))
        for i, (name, layer) in enumerate(layers.items()):
            stack.callback(layer.register_forward_pre_hook(partial(enter, (i, name))).remove)
            stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
        yield


@torch.no_grad()
def capture(model: nn.Module, **inputs: Any) -> list[LayerCapture]:
    """All layers' captures of one forward pass, `model(**inputs)`."""
    captures: list[LayerCapture] = []
    with capturing(model, captures.append):
        model(**inputs)
    return captures


def _functions(module: nn.Module) -> list[tuple[str, str]]:
    """Where a layer looks up its recurrence: pairs of a module and a name in it."""
    if isinstance(module, TokenMixer):
        return [("osdn.layers.mixers", "delta_rule"), ("osdn.layers.mixers", "online_scaled_delta_rule")]
    source = type(module).__module__
    if not source.startswith("transformers."):
        return []
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return [(source, name) for name in RECURRENCES if code is not None and name in code.co_names]


def _read(
    layer: int, name: str, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> LayerCapture:
    """A call's arguments in one form: float32, normalised keys, as many heads of keys as of values."""
    q, k, v = (x.detach().float() for x in args[:3])
    if function in RECURRENCES:
        beta, log_decay = kwargs["beta"], kwargs["g"]
        if kwargs.get("use_qk_l2norm_in_kernel"):
            q, k = l2_normalize(q), l2_normalize(k)
    else:
        beta, log_decay = args[3], kwargs["log_decay"]
    if kwargs.get("cu_seqlens") is not None:
        raise ValueError(
            "this batch was packed into one row (padding does that); capture one prompt at a time"
        )
    scaled = function == "online_scaled_delta_rule"
    settings = {
        key: _float(kwargs[key])
        for key in ("eta", "bounds", "retention", "initial_scale", "beta_aware", "eps")
        if scaled and key in kwargs
    }
    if not scaled:
        settings["eta"] = 0.0  # the scale stays one
    groups = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    initial_state = _float(kwargs.get("initial_state"))
    problem = Problem(k, v, _float(beta), _float(log_decay), initial_state, **settings)
    return LayerCapture(layer, name, scaled, problem, q, output.detach())


def _float(x: Any) -> Any:
    # a copy: a cache overwrites its state and scale in place once the layer has run
    return x.detach().to(torch.float32, copy=True) if isinstance(x, Tensor) else x
