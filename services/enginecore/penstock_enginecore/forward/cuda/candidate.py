"""The fused decoder as a candidate for models on GPUs."""

from collections.abc import Callable

import torch

from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.graphs import cuda_graphs
from penstock_enginecore.forward.cuda.quantized import keeps
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.forward.proof import Candidate, UnsuitableError
from penstock_enginecore.models.quantization.scheme import Scheme


def fused_candidates(probed: ProbedModel, uses: KernelsConfig, attention_backend: str) -> list[Candidate[ForwardPass]]:
    """The whole model by kernels of our own, its steps replayed; none where the device is no GPU, where this use of kernels is
    turned off, or where another ``attention_backend`` than the best was asked for.
    """
    if not _is_offered(probed.device, uses, attention_backend):
        return []
    return [Candidate("fused decoder", lambda: _build(probed))]


def kept_weights(device: torch.device, uses: KernelsConfig, attention_backend: str) -> Callable[[Scheme], bool]:
    """Which quantized weights linear layers keep, for the fused decoder's products: none where it is not tried."""
    return keeps if _is_offered(device, uses, attention_backend) else lambda scheme: False  # noqa: ARG005


def _is_offered(device: torch.device, uses: KernelsConfig, attention_backend: str) -> bool:
    return device.type == "cuda" and uses.decoder and attention_backend == "auto"


def _build(probed: ProbedModel) -> FusedForward:
    # Triton is imported where there is a device for its kernels.
    try:
        from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels
    except ModuleNotFoundError as e:
        raise UnsuitableError(f"its kernels cannot be compiled: {e}") from e
    return FusedForward(probed, TritonKernels(), cuda_graphs())
