"""What an adapter is once it has been read, and which tokens of a step have one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch

TakeAdapter: TypeAlias = Callable[[], None]
"""Has a forward pass take segments of an adapter from then on, and does little. Called between steps, once at most."""
BLANK = b""
"""The digest of segments whose tokens have no adapter, for passes that replay steps: they launch what steps with adapters do."""


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """What an adapter adds to ``x`` times a layer's weight: ``x @ a.T @ b.T`` (LoRA; Hu et al., 2021). ``a`` float32
    ``[rank, in features]``; ``b`` float32 ``[out features, rank]``, with the adapter's scale in it.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """One at least; layers of an adapter may differ."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """``digest``: BLAKE2b-128 of its canonical config and tensors, by which it is known; names are labels. ``updates`` by name of
    the module in transformers' model, such as ``model.layers.0.self_attn.q_proj`` or ``lm_head``; empty in a worker that has none
    of its layers alone.
    """

    digest: bytes
    updates: Mapping[str, LowRankUpdate]

    @property
    def max_rank(self) -> int:
        """The largest of its layers'; 0 where there are none."""
        return max((update.rank for update in self.updates.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Of its matrices."""
        return sum(update.a.nbytes + update.b.nbytes for update in self.updates.values())


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """The tokens of a step from ``first`` to before ``end``, one at least, whose requests have the adapter of ``digest``.
    Segments of a step are in order and have no tokens in common; tokens in none of them are the base model's.
    """

    digest: bytes
    first: int
    end: int


@runtime_checkable
class AdaptedForward(Protocol):
    """A forward pass whose steps may have adapters."""

    def prepare_adapter(self, adapter: LoraAdapter) -> TakeAdapter:
        """Convert the adapter's matrices to the form that the pass reads, while steps run, on any thread.

        Raises ValueError when the adapter does not update the model's layers.
        """

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Prepare and take an adapter, between steps. Raises as ``prepare_adapter``."""

    def remove_adapter(self, digest: bytes) -> None:
        """Free the memory of an adapter, between steps. KeyError for one that is not there."""
