"""The Triton kernels as a candidate for the attention of models that run by transformers' own modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from penstock_enginecore.attention.base import AttentionBackend
from penstock_enginecore.attention.factory import TRITON
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.cuda.attention import TritonAttention, why_not
from penstock_enginecore.forward.cuda.launches import AttentionKernels
from penstock_enginecore.forward.proof import Candidate, UnsuitableError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attended(Generic[T]):
    """A ``Replacement``: ``serves`` runs the model's modules with another attention, ``run`` makes it compute the probe."""

    serves: T
    run: Callable[[T], torch.Tensor]

    def probe(self) -> torch.Tensor:
        """What ``run`` gives."""
        return self.run(self.serves)

    def where(self) -> str:
        """Nothing: all layers attend alike."""
        return ""

    def take_over(self) -> T:
        """The modules keep their weights."""
        return self.serves

    def undo(self) -> None:
        """Nothing of the model was changed."""


@dataclass(frozen=True, slots=True)
class Attending(Generic[T]):
    """What attends in a model: layers of ``specs``, numbers of ``dtype``. ``serve``: makes what runs the model with a backend.
    ``run``: what that makes of the probe.
    """

    device: torch.device
    specs: Mapping[str, KVCacheSpec]
    dtype: torch.dtype
    serve: Callable[[AttentionBackend], T]
    run: Callable[[T], torch.Tensor]


def attention_candidates(model: Attending[T], uses: KernelsConfig, attention_backend: str) -> list[Candidate[T]]:
    """The model's modules with ``TritonAttention``; none for a model that keeps no keys, nor where neither the device nor
    ``attention_backend`` asks for it.
    """
    best = attention_backend == "auto" and model.device.type == "cuda" and uses.attention
    if not model.specs or not (best or attention_backend == TRITON):
        return []
    return [Candidate("Triton attention", lambda: _build(model))]


def _build(model: Attending[T]) -> Attended[T]:
    if reason := why_not(model.specs, model.dtype):
        raise UnsuitableError(reason)
    return Attended(model.serve(TritonAttention(_kernels())), model.run)


def _kernels() -> AttentionKernels:
    # Triton is imported where there is a device for its kernels.
    try:
        from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels
    except ModuleNotFoundError as e:
        raise UnsuitableError(f"its kernels cannot be compiled: {e}") from e
    return TritonKernels()
