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
from penstock_enginecore.forward.cuda.graphs import StepGraphs, cuda_graphs
from penstock_enginecore.forward.cuda.kernel_api import AttentionKernels
from penstock_enginecore.forward.proof import Candidate, UnsuitableError

T = TypeVar("T")
Replay = Callable[[TritonAttention, StepGraphs], tuple[T, Callable[[], str]]]
"""Makes what replays steps, and tells why it does not; empty while it does."""


@dataclass(frozen=True, slots=True)
class Attended(Generic[T]):
    """A ``Replacement``: ``serves`` runs the model's modules with another attention, ``run`` makes it compute the probe.
    ``failure``: why it computes otherwise than it was to, after that.
    """

    serves: T
    run: Callable[[T], torch.Tensor]
    failure: Callable[[], str] = str

    def probe(self) -> torch.Tensor:
        """What ``run`` gives. RuntimeError where there is a ``failure``."""
        result = self.run(self.serves)
        if failure := self.failure():
            raise RuntimeError(failure)
        return result

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
    ``run``: what that makes of the probe. ``replay``: as ``serve``, with whole steps replayed; None where they cannot be.
    """

    device: torch.device
    specs: Mapping[str, KVCacheSpec]
    dtype: torch.dtype
    serve: Callable[[AttentionBackend], T]
    run: Callable[[T], torch.Tensor]
    replay: Replay[T] | None = None


def attention_candidates(model: Attending[T], uses: KernelsConfig, attention_backend: str) -> list[Candidate[T]]:
    """The model's modules with ``TritonAttention``, steps replayed or launched; none for a model that keeps no keys, nor where
    neither the device nor ``attention_backend`` asks for it.
    """
    best = attention_backend == "auto" and model.device.type == "cuda" and uses.attention
    if not model.specs or not (best or attention_backend == TRITON):
        return []
    candidates = [Candidate("Triton attention", lambda: _build(model))]
    if (replay := model.replay) is not None and uses.graphs and can_capture(model.device):
        candidates.insert(0, Candidate("Triton attention in graphs", lambda: _build_replayed(model, replay)))
    return candidates


def _build(model: Attending[T]) -> Attended[T]:
    return Attended(model.serve(_attention(model)), model.run)


def _build_replayed(model: Attending[T], replay: Replay[T]) -> Attended[T]:
    serves, failure = replay(_attention(model), make_graphs())
    return Attended(serves, model.run, failure)


def _attention(model: Attending[T]) -> TritonAttention:
    if reason := why_not(model.specs, model.dtype):
        raise UnsuitableError(reason)
    return TritonAttention(_kernels())


def can_capture(device: torch.device) -> bool:
    """Whether a device replays what it was told once."""
    return device.type == "cuda"


make_graphs = cuda_graphs


def _kernels() -> AttentionKernels:
    # Triton is imported where there is a device for its kernels.
    try:
        from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels
    except ModuleNotFoundError as e:
        raise UnsuitableError(f"its kernels cannot be compiled: {e}") from e
    return TritonKernels()
