"""The `triton` backend: GPU kernels for CUDA and ROCm.

The kernels are imported on first use.  On a CPU they run in Triton's interpreter, for tests, when
TRITON_INTERPRET=1 is set before that.
"""

import importlib.util
import os

import torch
from torch import Tensor

from osdn.ops import chunkwise
from osdn.ops.checks import Newton, Phase1, Phase2, Scaling


def available(device: str | torch.device = "cuda") -> bool:
    """Whether the kernels run on `device` here."""
    if importlib.util.find_spec("triton") is None:
        return False
    if torch.device(device).type == "cuda":
        return torch.cuda.is_available() and _new_enough(device)
    return torch.device(device).type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def _new_enough(device: str | torch.device) -> bool:
    """Products of TF32 and bfloat16, which the kernels use, began with NVIDIA's Ampere."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def precondition_keys(k: Tensor, phase1: Phase1, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    from osdn.ops.triton import autograd

    if isinstance(phase1.rule, Newton) and phase1.rule.block_size > 1:  # for which there is no kernel
        autograd._check_dtype(k)
        w, final = chunkwise.precondition_keys(k.float(), phase1, cu_seqlens)
        return w.to(k.dtype), final
    return autograd.precondition_keys(k, phase1, cu_seqlens)


def delta_rule(x: Phase2, write_keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from osdn.ops.triton import autograd

    return autograd.delta_rule(x, write_keys)


def preconditioned_delta_rule(x: Phase2, phase1: Phase1) -> tuple[Tensor, Tensor, Tensor]:
    from osdn.ops.triton import autograd

    if isinstance(phase1.rule, Newton) and phase1.rule.block_size > 1:
        w, final = precondition_keys(x.k, phase1, x.cu_seqlens)
        return *delta_rule(x, w), final
    return autograd.preconditioned_delta_rule(x, phase1)


def decode_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    retention: float | Tensor,
    initial_scale: Tensor | None,
    settings: Scaling | None,
    log_decay: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One token or a few of every sequence, both phases in one launch, `state` updated in place.

    For an engine that owns its state.  The arguments are those of online scaling, settings=None
    being the delta rule without phase 1.  Returns the outputs [B, T, HV, V] and the final scale [B, HV, K],
    which has no elements without phase 1.
    """
    from osdn.ops.triton import autograd

    return autograd.decode_(q, k, v, beta, retention, initial_scale, settings, log_decay, state, scale)
