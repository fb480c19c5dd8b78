"""The fused decoder as a candidate for models on GPUs."""

from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.graphs import cuda_graphs
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.forward.proof import Candidate, UnsuitableError


def fused_candidates(probed: ProbedModel, uses: KernelsConfig, attention_backend: str) -> list[Candidate[ForwardPass]]:
    """The whole model by kernels of our own, its steps replayed; none where the device is no GPU, where this use of kernels is
    turned off, or where another ``attention_backend`` than the best was asked for.
    """
    if probed.device.type != "cuda" or not uses.decoder or attention_backend != "auto":
        return []
    return [Candidate("fused decoder", lambda: _build(probed))]


def _build(probed: ProbedModel) -> FusedForward:
    # Triton is imported where there is a device for its kernels.
    try:
        from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels
    except ModuleNotFoundError as e:
        raise UnsuitableError(f"its kernels cannot be compiled: {e}") from e
    return FusedForward(probed, TritonKernels(), cuda_graphs())
