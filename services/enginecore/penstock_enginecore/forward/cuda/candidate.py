"""The fused decoder as a candidate for models on GPUs, and the choice of tokens there."""

import logging
from collections.abc import Callable

import torch

from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.cuda.adapter_kernels import why_not
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.graphs import cuda_graphs
from penstock_enginecore.forward.cuda.kernel_api import SamplingKernels
from penstock_enginecore.forward.cuda.quantized import keeps
from penstock_enginecore.forward.cuda.sampler import DeviceLauncher, MakeSampling, difference
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.forward.proof import Candidate, UnsuitableError
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.models.quantization.scheme import Scheme
from penstock_enginecore.sample.base import Sampler

logger = logging.getLogger(__name__)

_PROVED_ROWS = 128


def fused_candidates(
    probed: ProbedModel, uses: KernelsConfig, attention_backend: str, lora: SlotLimits | None = None
) -> list[Candidate[ForwardPass]]:
    """The whole model by kernels of our own, its steps replayed; none where the device is no GPU, where this use of kernels is
    turned off, or where another ``attention_backend`` than the best was asked for. ``lora``: steps may have adapters.
    """
    if not _is_offered(probed.device, uses, attention_backend):
        return []
    return [Candidate("fused decoder", lambda: _build(probed, uses, lora))]


def kept_weights(device: torch.device, uses: KernelsConfig, attention_backend: str) -> Callable[[Scheme], bool]:
    """Which quantized weights linear layers keep, for the fused decoder's products: none where it is not tried."""
    return keeps if _is_offered(device, uses, attention_backend) else lambda scheme: False  # noqa: ARG005


def _is_offered(device: torch.device, uses: KernelsConfig, attention_backend: str) -> bool:
    return device.type == "cuda" and uses.decoder and attention_backend == "auto"


def device_launcher(
    device: torch.device, uses: KernelsConfig, sampler: Sampler, vocab: int, dtype: torch.dtype
) -> DeviceLauncher | None:
    """What chooses tokens on a GPU, once it is proved. None where the device is none, where this use of kernels is turned off,
    and where the proof fails.
    """
    if device.type != "cuda" or not uses.sampler:
        return None
    return proved_launcher(device, sampler, vocab, dtype, _sampling_kernels)


def proved_launcher(
    device: torch.device, sampler: Sampler, vocab: int, dtype: torch.dtype, make: MakeSampling
) -> DeviceLauncher | None:
    """By the kernels that ``make`` makes, if they choose the tokens that ``sampler`` does; where they do not, the log says so."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(_PROVED_ROWS, vocab, generator=generator)).to(device=device, dtype=dtype)
    try:
        launcher = DeviceLauncher(vocab, device, make)
        reason = difference(launcher, sampler, logits)
    except Exception as e:  # of a compiler, or of a driver
        reason = f"{type(e).__name__}: {e}"
    if not reason:
        return launcher
    logger.warning("tokens are waited for, which is slower: choosing them on the device failed its proof: %s", reason)
    return None


def _sampling_kernels(max_rows: int, vocab: int, device: torch.device) -> SamplingKernels:
    from penstock_enginecore.forward.cuda.kernels.sample import TokenSampler

    return TokenSampler(max_rows, vocab, device)


def _build(probed: ProbedModel, uses: KernelsConfig, lora: SlotLimits | None) -> FusedForward:
    if demands := probed.demands:
        raise UnsuitableError(f"its media have {demands}")
    # Triton is imported where there is a device for its kernels.
    try:
        from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels
    except ModuleNotFoundError as e:
        raise UnsuitableError(f"its kernels cannot be compiled: {e}") from e
    graphs = cuda_graphs() if uses.graphs else None
    kernels = TritonKernels(batch_invariant=uses.batch_invariant)
    if lora is not None and (reason := why_not(kernels, probed.model.dtype, probed.device)):
        raise UnsuitableError(reason)
    return FusedForward(probed, kernels, graphs, lora)
