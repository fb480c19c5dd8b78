"""Interface of backends for paged attention, and the data types of this interface."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.kv_cache import LATENTS, NO_SCALES, SLOTS, KVCache, KVLayout, KVMemory, KVScales
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec

# Weighted sums of attention values that leave out masked values.
#
# Zero times infinity or NaN is NaN. Therefore a weight of zero does not remove a masked value that is infinite or NaN:
# the product would be NaN for tokens that do not attend to the value.


def weighted_values(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the matrix product of ``weights`` and ``values``, with NaN where a query attends to a value that is
    infinite or NaN.

    Args:
        weights: ``[..., queries, keys]``, 0 where ``visible`` is false.
        values: ``[..., keys, size]``.
        visible: Whether a query attends to a key, bool ``[queries, keys]``.
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
    """Positions and KV cache slots of the tokens in a step. The tokens of all requests follow one another in one flat
    batch. Arrays are on the host.

    Attributes:
        query_start_loc: ``[requests + 1]``, index of the first token of each request in the flat batch.
        seq_lens: ``[requests]``, number of tokens of each request after this step.
        block_table: int32 ``[requests, blocks]``, block ids of each request.
        slot_mapping: ``[tokens]``, slot of the KV cache in which each new token is stored.
        block_size: Number of tokens per block.
        key_ends: ``[tokens]``, the end of each query's keys, as a position in its request, or None for causal
            attention. An end is greater than the query's position and at most the request's length. The ends never
            decrease within a request. Attention windows and chunks also apply.
        windowed_ends: Whether ``key_ends`` applies only to layers with a sliding window. The attention of the other
            layers is then causal.
    """

    query_start_loc: IntArray
    seq_lens: IntArray
    block_table: npt.NDArray[np.int32]
    slot_mapping: IntArray
    block_size: int
    key_ends: IntArray | None = None
    windowed_ends: bool = False

    @property
    def num_requests(self) -> int:
        """Number of requests in the step."""
        return len(self.seq_lens)

    @property
    def decodes_only(self) -> bool:
        """Whether each request has exactly one new token."""
        return bool((np.diff(self.query_start_loc) == 1).all())

    def positions(self) -> IntArray:
        """Return the position of each new token in its request, int64 ``[tokens]``."""
        ends = self.query_start_loc[1:]
        first = self.seq_lens - ends  # Position in the request that index 0 of the flat batch would have.
        positions: IntArray = np.arange(ends[-1]) + np.repeat(first, np.diff(self.query_start_loc))
        return positions

    def ends_for(self, sliding_window: int | None) -> IntArray | None:
        """Return ``key_ends``, or None if they do not apply to layers with this sliding window."""
        return None if self.windowed_ends and sliding_window is None else self.key_ends

    def spans(self, request: int) -> IntArray | None:
        """Return the part of ``key_ends`` for one request's new tokens, or None if their attention is causal."""
        if self.key_ends is None:
            return None
        start, end = self.query_start_loc[request : request + 2]
        ends = self.key_ends[start:end]
        length = int(self.seq_lens[request])
        return None if (ends == np.arange(length - len(ends), length) + 1).all() else ends

    def slots(self, request: int, start: int, end: int) -> IntArray:
        """Return the KV cache slots of the tokens at positions ``start`` to ``end`` of one request."""
        positions = np.arange(start, end)
        blocks: IntArray = self.block_table[request, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Attention parameters of a layer.

    Attributes:
        scaling: Factor by which the attention scores are multiplied.
        sliding_window: Number of tokens that a query attends to, including its own token. None means no limit.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[num_heads]``, an additional logit for each head, which takes part in the softmax but has no value
            vector.
        attention_chunk: A query at position p attends to no key before ``p // attention_chunk * attention_chunk``.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    attention_chunk: int | None = None


@dataclass(slots=True)
class StepPlan:
    """Data derived from the metadata of one KV cache group once per step, and shared by the layers of the group.

    Only the backend uses ``by_mask``. The key is a mask: a layer's sliding window and attention chunk. The data for a
    mask is derived when the first layer with this mask computes attention.
    """

    metadata: AttentionMetadata
    device: torch.device
    by_mask: dict[tuple[int | None, int | None], object] = field(default_factory=dict)
    _slot_mapping: torch.Tensor | None = None
    _positions: torch.Tensor | None = None

    @property
    def slot_mapping(self) -> torch.Tensor:
        """KV cache slot in which each new token is stored, int64 ``[tokens]`` on the device."""
        if self._slot_mapping is None:
            self._slot_mapping = torch.from_numpy(self.metadata.slot_mapping).to(self.device)
        return self._slot_mapping

    @property
    def positions(self) -> torch.Tensor:
        """Position of each new token in its request, int64 ``[tokens]`` on the device."""
        if self._positions is None:
            self._positions = torch.from_numpy(self.metadata.positions()).to(self.device)
        return self._positions


class AttentionBackend(Protocol):
    """Backend that stores keys and values in a paged cache and computes attention over them.

    In a step, ``plan`` is called once per KV cache group. Then ``write`` and ``attend`` are called once per layer, with
    the plan of the layer's group. The backend object must not store data of a step, because the next step may be
    planned while a step computes. ``keeps_float8`` is true if ``write`` and ``attend`` support a cache of dtype
    ``FLOAT8`` with scales (``cache.dtype: fp8``), as ``KVCache.write`` and ``KVCache.gather`` do. ``keeps_latents`` is
    true if the backend has ``attend_latents``.
    """

    keeps_float8: bool = False
    keeps_latents: bool = False

    def layout(self, spec: KVCacheSpec, dtype: torch.dtype) -> KVLayout:  # noqa: ARG002 - the same for all dtypes
        """Return the memory layout that ``write`` and ``attend`` use for a layer with ``spec``. The method is called
        when the layer's memory is allocated.
        """
        return LATENTS if spec.keeps_latents else SLOTS

    def memory(
        self,
        specs: Mapping[str, KVCacheSpec],
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[str, KVScales] = NO_SCALES,
    ) -> KVMemory:
        """Return an allocator for the caches of the layers in ``specs``, by name, in this backend's layouts.

        ``scales`` are the scales of an fp8 cache.
        """
        return KVMemory(specs, self.layout, dtype, device, scales)

    def plan(self, metadata: AttentionMetadata, device: torch.device) -> StepPlan:
        """Return the data that the layers of a group share in a step. The method is called on the host, before the
        first layer runs.

        In this method, a backend can copy data to the device, and decide how to split the work.
        """
        return StepPlan(metadata, device)

    def write(self, cache: KVCache, plan: StepPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``keys`` and ``values`` ``[tokens, num_kv_heads, head size]`` of the step's new tokens in the cache."""
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
        """Return the result of causal attention of each request over its own tokens, ``[tokens, num_heads,
        head_size_v]``, in the query's dtype.

        The caller has already stored the new tokens with ``write``. ``query`` is ``[tokens, num_heads, head_size]``.
        ``key`` and ``value`` are the keys and values of the new tokens, ``[tokens, num_kv_heads, head size]``, so a
        backend need not read them from the cache.
        """

    def attend_latents(
        self,
        query: torch.Tensor,  # noqa: ARG002 - used by backends that keep latents
        cache: KVCache,  # noqa: ARG002
        plan: StepPlan,  # noqa: ARG002
        params: AttentionParams,  # noqa: ARG002
        latent: int,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return the result of causal attention over a cache with the layout ``LATENTS``, ``[tokens, num_heads,
        latent]``, in the query's dtype.

        Args:
            query: ``[tokens, num_heads, width]``: queries in the latent space, then their rotated part.
            cache: KV cache of the layer. The caller has already stored the new tokens with ``write``.
            plan: Data of the step.
            params: The scale of the scores. Windows, chunks, soft caps and sinks are not supported.
            latent: Number of elements of a latent, which are the value.
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} does not compute attention over latents")
