"""Paged attention: what every backend is, and what it gets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.kv_cache import NO_SCALES, SLOTS, KVCache, KVLayout, KVMemory, KVScales
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec

# Sums of values that leave out, rather than multiply by nothing, what a query does not see.
#
# Nothing times a number that is infinite or NaN is NaN: a product with a masked value would carry it to tokens
# that do not see it.


def weighted_values(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``weights`` ``[..., queries, keys]``, 0 where ``visible`` (bool, ``[queries, keys]``) is not, times ``values``
    ``[..., keys, size]``. NaN where a query sees an infinite value or NaN.
    """
    finite = values.isfinite()
    if finite.all():
        return weights @ values
    sums = weights @ values.where(finite, 0)
    seen = visible.float() @ (~finite).float()
    return sums.masked_fill(seen > 0, torch.nan)


IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a step stand. Requests lie one after the other in the flat batch; arrays are on the host.

    ``query_start_loc`` ``[requests + 1]``: first token of each request. ``seq_lens`` ``[requests]``: tokens of each
    request after this step. ``block_table`` int32 ``[requests, blocks]``. ``slot_mapping`` ``[tokens]``: where each new
    token is stored. ``key_ends`` ``[tokens]``: a query sees no key at or behind this position of its request;
    None: none behind itself.
    It is above the query's own position, at most the request's tokens, and no smaller than that of the token before. Windows and
    chunks bound what is seen from below as ever.
    """

    query_start_loc: IntArray
    seq_lens: IntArray
    block_table: npt.NDArray[np.int32]
    slot_mapping: IntArray
    block_size: int
    key_ends: IntArray | None = None

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

    def spans(self, request: int) -> IntArray | None:
        """``key_ends`` of a request's new tokens, None where each of them sees none behind itself."""
        if self.key_ends is None:
            return None
        start, end = self.query_start_loc[request : request + 2]
        ends = self.key_ends[start:end]
        length = int(self.seq_lens[request])
        return None if (ends == np.arange(length - len(ends), length) + 1).all() else ends

    def slots(self, request: int, start: int, end: int) -> IntArray:
        """The slots of tokens ``start`` to ``end`` of one request."""
        positions = np.arange(start, end)
        blocks: IntArray = self.block_table[request, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer attends. ``sliding_window``: tokens a query sees, itself included. ``softcap``: scores become
    ``softcap * tanh(score / softcap)``. ``sinks`` ``[num_heads]``: a logit per head that takes part in the softmax and
    has no value. ``attention_chunk``: a query at position p sees no key before position
    ``p // attention_chunk * attention_chunk``.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    attention_chunk: int | None = None


@dataclass(slots=True)
class StepPlan:
    """What is derived from the metadata of one KV cache group once per step, and shared by the layers of the group.

    ``by_mask`` belongs to the backend, for what it derives when the first layer of a kind attends; its keys are a layer's
    sliding window and attention chunk.
    """

    metadata: AttentionMetadata
    device: torch.device
    by_mask: dict[tuple[int | None, int | None], object] = field(default_factory=dict)
    _slot_mapping: torch.Tensor | None = None
    _positions: torch.Tensor | None = None

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Where each new token is stored: int64 ``[tokens]`` on the device."""
        if self._slot_mapping is None:
            self._slot_mapping = torch.from_numpy(self.metadata.slot_mapping).to(self.device)
        return self._slot_mapping

    @property
    def positions(self) -> torch.Tensor:
        """Position of each new token in its request: int64 ``[tokens]`` on the device."""
        if self._positions is None:
            self._positions = torch.from_numpy(self.metadata.positions()).to(self.device)
        return self._positions


class AttentionBackend(Protocol):
    """Keeps the keys and values of a paged cache and attends over them.

    In a step, ``plan`` comes once per KV cache group; then ``write`` and ``attend`` once per layer, with the group's plan.
    Nothing of a step may be kept in the backend itself: steps may be planned while the one before computes.

    ``keeps_float8``: whether ``write`` and ``attend`` take a cache of ``FLOAT8`` with its scales (``cache.dtype: fp8``), as
    ``KVCache.write`` and ``gather`` do.
    """

    keeps_float8: bool = False

    def layout(self, spec: KVCacheSpec, dtype: torch.dtype) -> KVLayout:  # noqa: ARG002 - the same for all here
        """How ``write`` puts a layer of ``spec`` into its memory, and ``attend`` reads it; asked when that is allocated."""
        return SLOTS

    def memory(
        self,
        specs: Mapping[str, KVCacheSpec],
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[str, KVScales] = NO_SCALES,
    ) -> KVMemory:
        """Allocates the caches of the layers in ``specs``, by their names, in the layouts that they have here. ``scales``: of an
        fp8 cache.
        """
        return KVMemory(specs, self.layout, dtype, device, scales)

    def plan(self, metadata: AttentionMetadata, device: torch.device) -> StepPlan:
        """What the layers of a group share in a step. Called on the host, before the first layer runs: here a backend copies to
        the device, and decides how to split the work.
        """
        return StepPlan(metadata, device)

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
