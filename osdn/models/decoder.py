"""A model's decoding step on a CPU as one call of the compiled kernels.

Called layer by layer, a token costs hundreds of calls from Python, which together take about as long as
reading the weights.  Here the kernels of all layers are listed once, as a `Program` over buffers that stay
where they are, and a token is one run of it.  Before every run the model is compared with what the program
was made for: a layer that was replaced, hooked or given other weights means another program, or none.
"""

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from osdn.layers import MixerState
from osdn.layers.decoding import fusible, step_inputs
from osdn.layers.linear import has_hooks, is_plain
from osdn.layers.mixers import TokenMixer
from osdn.layers.precision import RMSNorm
from osdn.models.cache import DeltaRuleCacheLayer
from osdn.models.quantization import QuantizedLinear
from osdn.ops import tracing
from osdn.ops.cpu.binding import readable, wide
from osdn.ops.cpu.decode_step import usable
from osdn.ops.cpu.program import Program
from osdn.ops.cpu.row_product import Product

if TYPE_CHECKING:
    from osdn.models.modeling_osdn import OSDNModel

MOST_ROWS = 8  # for more of them, PyTorch's products gain more than calls cost
States = list[list[Tensor | None]]  # of every layer, in the order of `Program.run`


def decode(model: "OSDNModel", x: Tensor, cache: Cache) -> Tensor | None:
    """The model's outputs for one more token of every sequence, `x` `[N, 1, D]`; moves `cache` on.

    None, and nothing has changed, if the compiled step cannot give them.
    """
    if torch.is_autocast_enabled("cpu") or not 0 < len(x) <= MOST_ROWS:
        return None
    if not usable(x) or tracing.is_traced([x]):
        return None
    decoder = _decoders.get(model)
    if decoder is None or not decoder.fits(x):
        with torch.inference_mode(False), torch.no_grad():  # buffers that may be written to in any mode
            decoder = _decoders[model] = Decoder(model, x)
    states = decoder.states(cache)
    if states is None or not decoder.lock.acquire(blocking=False):
        return None
    try:
        return decoder.run(x, states)
    finally:
        decoder.lock.release()


class Decoder:
    """The decoding step of a model for as many sequences as `x` `[N, 1, D]` has.

    `program` is None for a model that has no compiled step.
    """

    def __init__(self, model: "OSDNModel", x: Tensor) -> None:
        self.lock = threading.Lock()  # of the buffers
        self.key = _key(x)
        self.snapshot = Snapshot(model)
        self.hidden = x.new_empty(len(x), x.shape[2])
        self.shapes: list[list[tuple[int, ...] | None]] = []
        self.program: Program | None = Program(x.dtype)
        try:
            self.out = self._assemble(model, self.program)
        except NotPlainError:
            self.program = None

    def fits(self, x: Tensor) -> bool:
        """Whether it was made for such inputs, and the model is still as it was."""
        return self.key == _key(x) and self.snapshot.holds()

    def _assemble(self, model: "OSDNModel", program: Program) -> Tensor:
        """Add the kernels of all layers; return the buffer that the outputs `[N, D]` will be in."""
        from osdn.models.modeling_osdn import OSDNMLP, OSDNBlock

        hidden = self.hidden
        if self.snapshot.hooked:
            raise NotPlainError

        def linears(pairs: list[tuple[nn.Module, Tensor]]) -> list[Tensor]:
            return program.products([_product(layer, x) for layer, x in pairs])

        layer: Any
        for layer in model.layers:
            if type(layer) is not OSDNBlock or type(layer.mlp) is not OSDNMLP:
                raise NotPlainError
            mixer, mlp = layer.attn, layer.mlp
            if not isinstance(mixer, TokenMixer) or not fusible(mixer, hidden.dtype):
                raise NotPlainError
            state = _empty_state(mixer, len(hidden), hidden.dtype)
            self.shapes.append([None if x is None else tuple(x.shape) for x in _ordered(state)])
            x = _norm(program, layer.attn_norm, hidden)
            out = program.step(*step_inputs(mixer, x, state, linears))
            program.products([_product(mixer.o_proj, out)], add=hidden)
            x = _norm(program, layer.mlp_norm, hidden)
            gate, up = linears([(mlp.gate_proj, x), (mlp.up_proj, x)])
            program.products([_product(mlp.down_proj, program.glu(gate, up))], add=hidden)
        return _norm(program, model.norm, hidden)

    def states(self, cache: Cache) -> States | None:
        """The states of all layers, if the kernels can update them in place."""
        if self.program is None or len(cache.layers) != len(self.shapes):
            return None
        all_states = []
        dtypes = (*[self.hidden.dtype] * 3, *[wide(self.hidden.dtype)] * 2)
        for layer, shapes in zip(cache.layers, self.shapes):
            if type(layer) is not DeltaRuleCacheLayer or layer.record_past or layer.unread is not None:
                return None
            state = layer.load()
            if state is None:
                return None
            states = _ordered(state)
            for x, shape, dtype in zip(states, shapes, dtypes):
                if (None if x is None else x.shape) != shape:
                    return None
                if x is not None and (x.dtype != dtype or not _writable(x)):
                    return None
            all_states.append(states)
        return all_states

    def run(self, x: Tensor, states: States) -> Tensor:
        assert self.program is not None
        self.hidden.copy_(x[:, 0])
        self.program.run(states)
        return self.out[:, None].clone()


_decoders: "WeakKeyDictionary[OSDNModel, Decoder]" = WeakKeyDictionary()


class NotPlainError(Exception):
    """A layer computes something other than its kernel would."""


class Snapshot:
    """The parts of a model that a program depends on: layers, addresses of weights, and settings."""

    def __init__(self, model: "OSDNModel") -> None:
        self.modules = [m for top in (model.layers, model.norm) for m in top.modules()]
        self.counts = [len(m._modules) for m in self.modules]
        self.hooked = any(has_hooks(m) for m in self.modules)
        self.entries: list[tuple[Any, str, Any]] = []  # a dictionary of a module, a key in it, its value
        for m in self.modules:
            self.entries += [(m._modules, *item) for item in m._modules.items()]
            self.entries += [(m._parameters, *item) for item in m._parameters.items()]
            self.entries += [(m._buffers, *item) for item in m._buffers.items()]
            self.entries += [(m.__dict__, x, m.__dict__[x]) for x in SETTINGS if x in m.__dict__]
        tensors = [x for m in self.modules for x in (*m._parameters.values(), *m._buffers.values())]
        self.addresses = [(x, x.data_ptr(), x.dtype) for x in tensors if x is not None]

    def holds(self) -> bool:
        """Whether nothing has changed; called for every token, so it must be quick."""
        return (
            any(has_hooks(m) for m in self.modules) == self.hooked
            and self.counts == [len(m._modules) for m in self.modules]
            and all(table.get(name) is x for table, name, x in self.entries)
            and all(x.data_ptr() == address and x.dtype == dtype for x, address, dtype in self.addresses)
        )


SETTINGS = ("eps", "backend", "fuses", "update", "config", "write_scale", "strongest", "output_gate")


def _key(x: Tensor) -> tuple[object, ...]:
    return len(x), x.dtype, torch.get_num_threads()


def _ordered(state: MixerState) -> list[Tensor | None]:
    return [state.q_tail, state.k_tail, state.v_tail, state.recurrent, state.scale]


def _empty_state(mixer: TokenMixer, rows: int, dtype: torch.dtype) -> MixerState:
    recurrent, scale, *tails = mixer.state_shapes(rows)
    with torch.device("cpu"):
        return MixerState(
            torch.empty(recurrent, dtype=wide(dtype)),
            None if scale is None else torch.empty(scale, dtype=wide(dtype)),
            *(torch.empty(shape, dtype=dtype) for shape in tails),
        )


def _writable(x: Tensor) -> bool:
    """Whether a kernel may overwrite it; a tensor made in inference mode may change only there."""
    changeable = not x.is_inference() or torch.is_inference_mode_enabled()
    return changeable and x.is_contiguous() and x.device.type == "cpu" and type(x) is Tensor


def _norm(program: Program, norm: nn.Module, x: Tensor) -> Tensor:
    if type(norm) is not RMSNorm or norm.eps is None or not readable(norm.weight.dtype, x.dtype):
        raise NotPlainError
    return program.norm(x, norm.weight.detach(), norm.eps)


def _product(layer: nn.Module, x: Tensor) -> Product:
    if isinstance(layer, QuantizedLinear) and not has_hooks(layer) and layer.readable(x):
        return layer.product(x)
    if not is_plain(layer, x[:1]):
        raise NotPlainError
    return Product(x, layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
