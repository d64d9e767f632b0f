"""Records what a model's recurrent layers pass to their recurrence: keys, values, gates, decay and scale.

By construction, the recorded tensors are the ones the layer computed with.  Our layers pass them to a
submodule, `TokenMixer.recurrence`, where a hook reads them.  Layers of `transformers` call a function of
their own module instead: during a capture, a wrapper replaces that function and records its arguments, and
hooks on the layers tell which layer made the call.  Captures arrive one layer at a time, so a caller that
keeps none of them needs the memory of a single layer.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from osdn.analysis.theory.runs import Problem
from osdn.hosts.names import RECURRENCES, replacing
from osdn.layers import OperatorInputs, TokenMixer
from osdn.layers.mixers import write_keys
from osdn.layers.precision import l2_normalize
from osdn.layers.updates import Comba, Update


@dataclass(frozen=True)
class LayerCapture:
    """One layer's call of its recurrence."""

    layer: int  # which recurrent layer of the model, counted from 0
    name: str  # the name of its module in the model
    rule: str | None  # its preconditioner's rule or its update's name; None is the plain delta rule
    problem: Problem  # k [B, T, HV, K], v, beta, decay, phase 1 settings or write keys; in float32
    q: Tensor  # [B, T, HV, K]
    output: Tensor  # [B, T, HV, V], what the layer's own recurrence returned

    @property
    def scaled(self) -> bool:
        """Whether the layer has a scale, which only the paper's rule does."""
        return self.rule == "hypergradient"


Receive = Callable[[LayerCapture], None]


def recurrent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that run a delta rule, by name and in model order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TokenMixer) or _functions(module)
    }


def attention_layers(model: nn.Module) -> int:
    """How many layers of a hybrid model are attention layers, which have no recurrence to measure."""
    config = getattr(model, "config", None)
    kinds = getattr(config.get_text_config(), "layer_types", None) if config is not None else None
    return sum("attention" in kind and kind != "linear_attention" for kind in kinds or [])


@contextmanager
def capturing(model: nn.Module, receive: Receive) -> Iterator[None]:
    """Calls `receive` for every recurrent layer as it runs, while the context is open.

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
            f"{type(model).__name__} has no recurrent layer that can be captured: it must be a model of osdn "
            f"or one of transformers whose layers call one of {', '.join(RECURRENCES)}"
        )
    with ExitStack() as stack:
        foreign = {}
        for i, (name, layer) in enumerate(layers.items()):
            if isinstance(layer, TokenMixer):
                _check_update(name, layer.update)
                hook = partial(_record_ours, receive, i, name, layer.update)
                stack.callback(layer.recurrence.register_forward_hook(hook).remove)
            else:
                foreign[i, name] = layer
        if foreign:
            stack.enter_context(_foreign_calls(foreign, receive))
        yield


@torch.no_grad()
def capture(model: nn.Module, **inputs: Any) -> list[LayerCapture]:
    """The captures of all layers in one forward pass, `model(**inputs)`."""
    captures: list[LayerCapture] = []
    with capturing(model, captures.append):
        model(**inputs)
    return captures


def _functions(module: nn.Module) -> list[str]:
    """The names of the recurrences that a layer of `transformers` calls from its module."""
    if not type(module).__module__.startswith("transformers."):
        return []
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return [name for name in RECURRENCES if code is not None and name in code.co_names]


@contextmanager
def _foreign_calls(layers: dict[tuple[int, str], nn.Module], receive: Receive) -> Iterator[None]:
    """Records the calls that layers of `transformers` make, by replacing the functions they call.

    All models of one kind share these functions.  A call is recorded only if the same thread is inside one of
    `layers`, so other models may run at the same time.  A second capture waits for the first to end, because
    the originals must be restored in order.
    """
    running = threading.local()

    def enter(which: tuple[int, str], *_: Any) -> None:
        running.layer = which

    def leave(*_: Any) -> None:
        running.layer = None

    def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if (which := getattr(running, "layer", None)) is not None:
            layer, name = which
            receive(_read_foreign(layer, name, args, kwargs, result[0]))
        return result

    with replacing, ExitStack() as stack:
        for source, name in {(type(x).__module__, name) for x in layers.values() for name in _functions(x)}:
            module = sys.modules[source]
            original = getattr(module, name)
            stack.callback(setattr, module, name, original)
            setattr(module, name, partial(record, original))
        for which, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(partial(enter, which)).remove)
            stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
        yield


def _read_foreign(
    layer: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> LayerCapture:
    """A call by a layer of `transformers`, which may leave normalisation to the recurrence."""
    q, k, v = args[:3]
    if kwargs.get("use_qk_l2norm_in_kernel"):
        q, k = l2_normalize(q.float()), l2_normalize(k.float())
    initial_state, cu_seqlens = kwargs.get("initial_state"), kwargs.get("cu_seqlens")
    inputs = OperatorInputs(q, k, v, kwargs["beta"], kwargs["g"], None, initial_state, cu_seqlens)
    return _read(layer, name, inputs, output)


def _check_update(name: str, update: Update | None) -> None:
    """Reject an update whose writes cannot be measured token by token."""
    if isinstance(update, Comba):
        raise ValueError(
            f"{name}: Comba has no residual ratio, because it reads the state before the decay and its write "
            f"does not shrink that error"
        )
    if update is not None and update.writes > 1:
        raise ValueError(
            f"{name}: DeltaProduct writes {update.writes} times per token; only updates with one write per "
            f"token can be measured"
        )


def _record_ours(
    receive: Receive,
    layer: int,
    name: str,
    update: Update | None,
    _: nn.Module,
    args: tuple[Any, ...],
    result: tuple[Any, ...],
) -> None:
    inputs: OperatorInputs = args[0]
    rule = inputs.rule if inputs.preconditioner is not None else None if update is None else update.name
    receive(_read(layer, name, inputs, result[0], rule))


def _read(
    layer: int, name: str, inputs: OperatorInputs, output: Tensor, rule: str | None = None
) -> LayerCapture:
    """A layer's inputs in a common form: float32, with as many key heads as value heads."""
    if inputs.cu_seqlens is not None:
        raise ValueError(
            "this batch was packed into one row (padding does that); capture one prompt at a time"
        )
    inputs = OperatorInputs(*map(_plain, inputs))
    settings: dict[str, Any] = {"eta": 0.0}  # with step size 0 the scale stays 1
    if inputs.preconditioner is not None:
        # copies: a cache overwrites its state and scale in place once the layer has run
        settings = {key: _copy(x) for key, x in inputs.preconditioner.items()}
        inputs = inputs._replace(preconditioner=settings)
    if inputs.rule != "hypergradient" or inputs.write_keys is not None:
        settings = {"eta": 0.0, "write_keys": write_keys(inputs)[0]}
    q, k, v, beta, log_decay = inputs[:5]
    groups = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    problem = Problem(k, v, beta, log_decay, _copy(inputs.initial_state), **settings)
    return LayerCapture(layer, name, rule, problem, q, output.detach())


def _plain(x: Any) -> Any:
    return x.detach().float() if isinstance(x, Tensor) else x


def _copy(x: Any) -> Any:
    return x.detach().to(torch.float32, copy=True) if isinstance(x, Tensor) else x
