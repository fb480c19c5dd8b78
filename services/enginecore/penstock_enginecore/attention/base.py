"""Paged attention: what every backend is, and what it gets.

The KV cache of a layer is two flat tensors of *slots*, one slot per token. Block ``b`` owns the slots ``b * block_size
.. (b + 1) * block_size - 1``; block 0 is the null block, which stays zero. A slot holds all heads of its token side by
side, so that fetching a token is one contiguous copy whatever the block size is.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys ``[num_slots, num_kv_heads * head_size]`` and values ``[num_slots, num_kv_heads * head_size_v]`` of one
    layer.
    """

    keys: torch.Tensor
    values: torch.Tensor
    num_kv_heads: int

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at ``slots`` (int64, flat), as ``[len(slots), num_kv_heads, head size]``."""
        heads = (len(slots), self.num_kv_heads, -1)
        return self.keys.index_select(0, slots).view(heads), self.values.index_select(0, slots).view(heads)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens: ``slots`` int64 ``[tokens]``, ``keys`` and ``values`` ``[tokens, num_kv_heads, head
        size]``.
        """
        self.keys.index_copy_(0, slots, keys.reshape(len(slots), -1))
        self.values.index_copy_(0, slots, values.reshape(len(slots), -1))


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a step stand. Requests lie one after the other in the flat batch; arrays are on the host.

    ``query_start_loc`` ``[requests + 1]``: first token of each request. ``seq_lens`` ``[requests]``: tokens of each
    request after this step. ``block_table`` int32 ``[requests, blocks]``. ``slot_mapping`` ``[tokens]``: where each new
    token is stored.
    """

    query_start_loc: IntArray
    seq_lens: IntArray
    block_table: npt.NDArray[np.int32]
    slot_mapping: IntArray
    block_size: int

    @property
    def num_requests(self) -> int:
        """Requests in the step."""
        return len(self.seq_lens)

    def positions(self) -> IntArray:
        """Position of each new token in its request, int64 ``[tokens]``."""
        ends = self.query_start_loc[1:]
        first = self.seq_lens - ends  # a request's position of the flat batch's token 0
        positions: IntArray = np.arange(ends[-1]) + np.repeat(first, np.diff(self.query_start_loc))
        return positions

    def slots(self, request: int, start: int, end: int) -> IntArray:
        """The slots of tokens ``start`` to ``end`` of one request."""
        positions = np.arange(start, end)
        blocks: IntArray = self.block_table[request, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer attends. ``sliding_window``: tokens a query sees, itself included. ``softcap``: scores become
    ``softcap * tanh(score / softcap)``. ``sinks`` ``[num_heads]``: a logit per head that takes part in the softmax and
    has no value. ``chunk``: a query at position p sees no key before position ``p // chunk * chunk``.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    chunk: int | None = None


@dataclass(slots=True)
class StepPlan:
    """What is derived from the metadata once per step and shared between layers. ``by_reach`` belongs to the backend;
    its keys are a layer's sliding window and chunk.
    """

    metadata: AttentionMetadata
    device: torch.device
    slot_mapping: torch.Tensor = field(init=False)
    by_reach: dict[tuple[int | None, int | None], object] = field(default_factory=dict)
    _positions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.slot_mapping = torch.from_numpy(self.metadata.slot_mapping).to(self.device)

    @property
    def positions(self) -> torch.Tensor:
        """Position of each new token in its request: int64 ``[tokens]`` on the device."""
        if self._positions is None:
            self._positions = torch.from_numpy(self.metadata.positions()).to(self.device)
        return self._positions


class AttentionBackend(Protocol):
    """Keeps the keys and values of a paged cache, in an order of its own within a layer's memory, and attends over them."""

    def write(self, cache: KVCache, plan: StepPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the step's new tokens: ``keys`` and ``values`` ``[tokens, num_kv_heads, head size]``."""
        cache.write(plan.slot_mapping, keys, values)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: StepPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Causal attention of every request over its own tokens, the new ones of which have been written.

        ``query`` ``[tokens, num_heads, head_size]``; ``key`` and ``value`` ``[tokens, num_kv_heads, head size]`` are
        the new tokens', which saves a backend from reading them back. Returns ``[tokens, num_heads, head_size_v]`` in
        the query's dtype.
        """
