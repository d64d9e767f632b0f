"""Linear layers with small weights, on PyTorch's packed kernels for CPUs.

Decoding reads every weight once per token, so it is as fast as its weights are small.  int8 has one scale per
output channel, int4 a scale and a zero per group of 32 input channels.  Embeddings, convolutions, write gates
and decays, norms, state and scale stay as they are.  Prompts gain nothing: there arithmetic is the limit.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from osdn.layers.linear import Linear

GROUP = 32  # input channels that share a scale in int4
MULTIPLE = 64  # of output channels, which the kernels take at once
GATES = ("f_proj", "preconditioner")  # decays: few weights, and much depends on them
FEW_ROWS = 4  # with more of them, int8 is faster converted than packed


class Int8Linear(nn.Module):
    """`nn.Linear` with a weight of 8 bits, symmetric, one scale per output channel."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        wide = linear.weight.detach().float()
        scale = (wide.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        self.register_buffer("weight", (wide / scale).round().to(torch.int8))
        self.register_buffer("scale", scale[:, 0].to(linear.weight.dtype))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if len(rows) <= FEW_ROWS:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            y = F.linear(rows, self.weight.to(x.dtype)) * self.scale
        return _with_bias(y, self.bias).unflatten(0, x.shape[:-1])


class Int4Linear(nn.Module):
    """`nn.Linear` with a weight of 4 bits, a scale and a zero per group of input channels."""

    weight: Tensor
    scale_and_zero: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        groups = linear.weight.detach().float().unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min(1e-6).to(linear.weight.dtype)
        zero = (low + 8 * scale.float()).to(linear.weight.dtype)  # the weight that the code 8 stands for
        codes = ((groups - zero.float()) / scale.float() + 8).round().clamp(0, 15).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.flatten(1), 1)
        self.register_buffer("weight", packed)
        pairs = torch.stack([scale[..., 0].T, zero[..., 0].T], -1)  # [groups, output channels, 2]
        self.register_buffer("scale_and_zero", pairs.contiguous())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.flatten(0, -2).contiguous(), self.weight, GROUP, self.scale_and_zero
        )
        return _with_bias(y, self.bias).unflatten(0, x.shape[:-1])


LAYERS: dict[str, type[nn.Module]] = {"int8": Int8Linear, "int4": Int4Linear}


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


def quantize(model: nn.Module, weights: str) -> nn.Module:
    """Replace the large linear layers of `model`, which must be on a CPU, by ones of "int8" or "int4"."""
    _check(weights)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Linear) and _is_large(module) and not set(GATES) & set(name.split("."))
    ]
    if not found:
        raise ValueError(
            f"no linear layer can be stored in {weights}: its outputs must be a multiple of {MULTIPLE}, its "
            f"inputs of {GROUP}"
        )
    for name, module in found:
        if module.weight.device.type != "cpu":
            raise ValueError(f"{name} is on {module.weight.device}; packed weights are for CPUs")
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LAYERS[weights](module))
    return model


def _is_large(linear: nn.Linear) -> bool:
    return linear.out_features % MULTIPLE == 0 and linear.in_features % GROUP == 0


def _check(weights: str) -> None:
    if weights not in LAYERS:
        raise ValueError(f"weights is {weights!r}; it must be one of {', '.join(LAYERS)}")


@register_quantization_config("osdn")
class QuantizationConfig(QuantizationConfigMixin):
    """For `from_pretrained(path, quantization_config=QuantizationConfig("int8"))`, on a CPU.

    Args:
        weights: "int8" or "int4".
    """

    def __init__(self, weights: str = "int8", **kwargs: Any) -> None:
        _check(weights)
        super().__init__(quant_method="osdn")
        self.weights = weights


@register_quantizer("osdn")
class Quantizer(HfQuantizer):
    """Quantizes a model once its weights are loaded."""

    quantization_config: QuantizationConfig

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        quantize(model, self.quantization_config.weights)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
