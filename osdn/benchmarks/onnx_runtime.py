"""The gated delta rule of ONNX Runtime on a CPU, if installed: a peer of our operators without a backward."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def installed() -> bool:
    return find_spec("onnx") is not None and find_spec("onnxruntime") is not None


def gated_delta_rule(sizes: dict[str, int], decay: Tensor, state: Tensor) -> "Callable[..., Tensor]":
    """A function of (q, k, v, beta) in float32 that returns the outputs `[B, T, H, V]`.

    `sizes` are B, T, H, K and V; `decay` `[B, T, H]` is a logarithm, `state` `[B, H, K, V]` the initial one.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # into the time of the others
    model = _model(sizes).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    fixed = {"past_state": state.numpy(), "decay": decay.numpy()}

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        flat = {"query": q.flatten(2), "key": k.flatten(2), "value": v.flatten(2), "beta": beta}
        inputs = {name: x.detach().numpy() for name, x in flat.items()}
        out, _ = session.run(None, inputs | fixed)
        return torch.from_numpy(out).view(v.shape)

    return run


def _model(sizes: dict[str, int]) -> Any:
    from onnx import TensorProto, helper

    B, T, H, K, V = (sizes[name] for name in "BTHKV")
    inputs = {
        "query": [B, T, H * K],
        "key": [B, T, H * K],
        "value": [B, T, H * V],
        "past_state": [B, H, K, V],
    }
    inputs |= {"decay": [B, T, H], "beta": [B, T, H]}
    outputs = {"out": [B, T, H * V], "state": [B, H, K, V]}
    settings = {"q_num_heads": H, "kv_num_heads": H, "scale": K**-0.5, "update_rule": "gated_delta"}
    domain = "com.microsoft"
    node = helper.make_node("LinearAttention", list(inputs), list(outputs), domain=domain, **settings)
    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        for shapes in (inputs, outputs)
    ]
    graph = helper.make_graph([node], "gated_delta_rule", *values)
    versions = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=10)
