"""Linear layers with small weights, on kernels for CPUs.

Decoding reads every weight once per token, so it is as fast as its weights are small.  int8 has one scale per
output channel, int4 a scale and a zero per group of 32 input channels.  Embeddings, convolutions, write gates
and decays, norms, state and scale stay as they are.  Prompts gain nothing: there arithmetic is the limit, and
the weights are widened first.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from osdn.layers.linear import Linear
from osdn.ops import tracing
from osdn.ops.cpu import compiled
from osdn.ops.cpu.binding import HALVES
from osdn.ops.cpu.row_product import Product, row_products

logger = logging.getLogger(__name__)

GROUP = 32  # input channels that share a scale in int4
MULTIPLE = 64  # of output channels; fewer are not worth it
GATES = ("a_proj", "f_proj", "preconditioner")  # decays: few weights, and much depends on them
FEW_ROWS = 16  # for more of them widened weights are faster


class QuantizedLinear(nn.Module):
    """`nn.Linear` with weights of a few bits, which the kernel widens as it reads them."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, x in self.quantized(linear.weight.detach().float()).items():
            self.register_buffer(name, x)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    @staticmethod
    def quantized(weight: Tensor) -> dict[str, Tensor]:
        """The buffers that stand for a weight in float32."""
        raise NotImplementedError

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weight that they stand for."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Product:
        """What the kernel is called with."""
        raise NotImplementedError

    def readable(self, x: Tensor) -> bool:
        """Whether the kernel can multiply `x`, without a gradient."""
        return (
            x.device.type == "cpu"
            and x.dtype in (torch.float32, *HALVES)
            and x.shape[-1] == self.in_features
            and (self.bias is None or self.bias.dtype == x.dtype)
            and not tracing.needs_gradient([x])
            and not tracing.is_traced([x])
            and not tracing.in_transform()
            and compiled()
        )

    def forward(self, x: Tensor) -> Tensor:
        if 0 < x.numel() <= FEW_ROWS * x.shape[-1] and self.readable(x):
            return row_products([self.product(x)])[0]
        return F.linear(x, self.widened(x.dtype), self.bias)


class Int8Linear(QuantizedLinear):
    """8 bits, symmetric, one scale per output channel."""

    @staticmethod
    def quantized(weight: Tensor) -> dict[str, Tensor]:
        scales = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return {"weight": (weight / scales[:, None]).round().to(torch.int8), "scales": scales}

    def widened(self, dtype: torch.dtype) -> Tensor:
        return (self.weight * self.scales.float()[:, None]).to(dtype)

    def product(self, x: Tensor) -> Product:
        return Product(x, self.weight, self.bias, self.scales.float())


class Int4Linear(QuantizedLinear):
    """4 bits, a scale and a zero per group of input channels."""

    zeros: Tensor

    @staticmethod
    def quantized(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).clamp_min(1e-6).bfloat16()
        zeros = low.bfloat16()
        codes = ((groups - zeros[..., None].float()) / scales[..., None].float()).round().clamp(0, 15)
        first, second = codes.to(torch.uint8).chunk(2, -1)
        return {"weight": (first | second << 4).flatten(1), "scales": scales, "zeros": zeros}

    def widened(self, dtype: torch.dtype) -> Tensor:
        codes = self.weight.unflatten(1, (-1, GROUP // 2))
        codes = torch.cat([codes & 15, codes >> 4], -1)  # [N, groups, GROUP]
        return (codes * self.scales[..., None].float() + self.zeros[..., None].float()).flatten(1).to(dtype)

    def product(self, x: Tensor) -> Product:
        return Product(x, self.weight, self.bias, self.scales.bfloat16(), self.zeros.bfloat16())


LAYERS: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}


def quantize(model: nn.Module, weights: str) -> nn.Module:
    """Replace the large linear layers of `model`, which must be on a CPU, by ones of "int8" or "int4"."""
    _check(weights)
    products = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Linear) and not set(GATES) & set(name.split("."))
    ]
    layers = [(name, module) for name, module in products if _fits(module)]
    if not layers:
        raise ValueError(
            f"no linear layer can be stored in {weights}: its outputs must be a multiple of {MULTIPLE}, its "
            f"inputs of {GROUP}"
        )
    kept = [name for name, module in products if not _fits(module) and module.out_features >= MULTIPLE]
    if kept:
        logger.warning(
            "%s in full precision: %s needs outputs in multiples of %d and inputs of %d",
            ", ".join(kept),
            weights,
            MULTIPLE,
            GROUP,
        )
    for name, module in layers:
        if module.weight.device.type != "cpu":
            raise ValueError(f"{name} is on {module.weight.device}; packed weights are for CPUs")
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LAYERS[weights](module))
    return model


def _fits(linear: nn.Linear) -> bool:
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
