"""Attention of long prompts by a library that reads contiguous keys and values.

The keys and values of a request are gathered from the blocks of its KV cache into scratch memory, part by part, and the
results of the parts are merged by their log-sum-exp. cuDNN builds a plan for each shape, which takes up to half a
second. Therefore queries and keys are padded to the few shapes of ``Sizes``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata, AttentionParams, IntArray
from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales
from penstock_enginecore.forward.cuda.buffers import StepInputs
from penstock_enginecore.forward.cuda.kernel_api import GroupInputs

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], tuple[torch.Tensor, torch.Tensor]]
"""Attention function of a library.

The arguments are a query ``[1, heads, rows, head size]``, keys ``[1, kv_heads, keys, head size]``, values ``[1,
kv_heads, keys, head_size_v]``, the factor of the scores, and whether query i attends only to keys 0 to i. The results
are the output ``[1, heads, rows, head_size_v]``, and the logarithms of the sums of the exponentials of the scores,
float32, with ``heads * rows`` elements.
"""


def cudnn(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with cuDNN; see ``Attend``. Raises RuntimeError if cuDNN does not support the shape."""
    # scaled_dot_product_attention does not return the log-sum-exp, and never selects cuDNN for causal_lower_right.
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, sums, *_ = attend(query, keys, values, None, True, 0.0, causal, scale=scaling)
    return out, sums


_MAX_BLOCK_SIZE = 1024
"""Maximum number of tokens of a block, the limit of ``cache.block_size``."""


class Geometry(NamedTuple):
    """Sizes of an attention layer on which the plans of a library depend."""

    heads: int
    kv_heads: int
    head_size: int
    head_size_v: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits and shapes of attention by a library.

    Attributes:
        fewest_tokens: Minimum number of new tokens of a request. With fewer tokens, up to twice ``rows[0]`` rows of
            padding would take more time than a faster library saves.
        fewest_keys: Minimum length of a request. In shorter prompts, attention takes less than a tenth of the step, so
            a graph and one launch for all requests save more.
        rows: Numbers of queries in one call, ascending. Each is a multiple of the first.
        pieces: Numbers of keys before the queries in one call, ascending. The first is ``rows[0]``, and each is a
            multiple of it.
    """

    fewest_tokens: int = 512
    fewest_keys: int = 4096
    rows: tuple[int, ...] = (512, 1024, 2048)
    pieces: tuple[int, ...] = (512, 2048, 8192)

    def blocks(self, before: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield the first position and the number of queries of each call for the positions ``before`` to ``length``.

        Positions and numbers are multiples of ``rows[0]``. Queries before ``before`` and from ``length`` on are padding.
        """
        least = self.rows[0]
        start, end = before // least * least, -(-length // least) * least
        yield from _split(start, end, self.rows)

    def keys(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield the first position and the number of keys of each piece of the positions 0 to ``start``."""
        yield from _split(0, start, self.pieces)


SIZES = Sizes()


def _split(start: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    while start < end:
        size = max(size for size in sizes if size <= end - start)
        yield start, size
        start += size


def is_plain(params: AttentionParams) -> bool:
    """Return whether a layer has neither a soft cap nor sinks, which libraries do not support."""
    return params.softcap is None and params.sinks is None


def limit_of(params: AttentionParams) -> int | None:
    """Return the maximum length of a request for which the window and the attention chunks of a layer include all keys,
    or None for no limit.
    """
    return min((limit for limit in (params.sliding_window, params.attention_chunk) if limit is not None), default=None)


class Prompt(NamedTuple):
    """Request with many new tokens.

    Attributes:
        request: Index of the request in the step.
        first: Index of its first new token in the step.
        new: Number of its new tokens.
        length: Number of its tokens after the step.
    """

    request: int
    first: int
    new: int
    length: int


class LibraryAttention:
    """Attention of long prompts by a library.

    All calls use the same scratch memory, because layers and steps run one after the other. The size of the scratch
    memory does not depend on the lengths of requests. The first step with a request of many new tokens allocates it.
    This is the profiling step, so the memory is counted before the engine chooses the size of the KV cache.

    Args:
        attend: Attention function of the library.
        geometries: Sizes of the layers that the library can compute.
        dtype: The dtype of queries, keys and values.
        sizes: Limits and shapes.
        most_keys: Maximum length of a request, because all layers have windows or attention chunks of at most this
            size, or None for no limit.
    """

    def __init__(
        self,
        attend: Attend,
        geometries: Sequence[Geometry],
        dtype: torch.dtype,
        sizes: Sizes = SIZES,
        most_keys: int | None = None,
    ) -> None:
        self.sizes = sizes
        self._attend = attend
        self._geometries = geometries
        self._dtype = dtype
        self._most_keys = np.iinfo(np.int64).max if most_keys is None else most_keys
        self._scratch: dict[Geometry, _Scratch] = {}

    def has_prompts(self, attention: Sequence[AttentionMetadata]) -> bool:
        """Return whether the library computes requests of a step with this metadata of its KV cache groups."""
        return len(self._long(attention, self.sizes.fewest_keys)) > 0

    def _long(self, attention: Sequence[AttentionMetadata], fewest_keys: int) -> IntArray:
        """Return the indices of the requests with many new tokens and at least ``fewest_keys`` tokens. Steps with
        ``key_ends`` have none.
        """
        first, lengths = attention[0], attention[0].seq_lens
        long = np.diff(first.query_start_loc) >= self.sizes.fewest_tokens
        has_ends = any(metadata.key_ends is not None for metadata in attention)
        return np.flatnonzero(long & (lengths >= fewest_keys) & (lengths <= self._most_keys) & (not has_ends))

    def chosen(self, attention: Sequence[AttentionMetadata], lengths: torch.Tensor) -> "StepPrompts | None":
        """Return the requests of a step whose attention the library computes, or None if there are none. The choice
        reads only data on the host.

        Args:
            attention: Metadata of each KV cache group.
            lengths: Lengths of the requests on the device, int32 ``[requests]``, with padding.
        """
        self.reserve(attention, lengths.device)
        found = self._long(attention, self.sizes.fewest_keys)
        if not len(found):
            return None
        starts, ends = attention[0].query_start_loc, attention[0].seq_lens
        new = np.diff(starts)
        prompts = tuple(Prompt(int(i), int(starts[i]), int(new[i]), int(ends[i])) for i in found)
        others = None
        if len(prompts) < np.count_nonzero(new):
            others = lengths.clone()
            for prompt in prompts:
                others[prompt.request].zero_()
        return StepPrompts(self, prompts, others)

    def supports(
        self, prompts: Sequence[Prompt], params: AttentionParams, query: torch.Tensor, keys: torch.Tensor
    ) -> bool:
        """Return whether the library can compute a layer for ``prompts``. Windows and attention chunks must include all
        tokens of each request.
        """
        longest = max(prompt.length for prompt in prompts)
        limit = limit_of(params)
        return is_plain(params) and (limit is None or limit >= longest) and query.dtype == keys.dtype == self._dtype

    def compute(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        prompt: Prompt,
        scaling: float,
        out: torch.Tensor,
    ) -> None:
        """Compute attention of one request into its rows of ``out``.

        Args:
            query: ``[tokens, heads, head size]``.
            keys: ``[blocks, kv_heads, block_size, head size]``.
            values: ``[blocks, kv_heads, block_size, head_size_v]``.
            table: Blocks of the request, int32 on the device.
            prompt: The request.
            scaling: Factor of the scores.
            out: ``[tokens, heads, head_size_v]``.
        """
        scratch = self._scratch_for(Geometry(query.shape[1], keys.shape[1], query.shape[2], out.shape[2]), query.device)
        before = prompt.length - prompt.new
        for start, rows in self.sizes.blocks(before, prompt.length):
            begin, end = max(start, before), min(start + rows, prompt.length)
            tokens = slice(prompt.first + begin - before, prompt.first + end - before)
            part, mine = query[tokens], slice(begin - start, end - start)
            if len(part) < rows:
                part = scratch.query[:rows]
                part[mine].copy_(query[tokens])
            merged = _Merged(scratch)
            queries = part.transpose(0, 1)[None]
            for position, count in self.sizes.keys(start):
                pages = scratch.gather(keys, values, table, position, position + count, count)
                merged.add(*self._attend(queries, *pages, scaling, False))
            pages = scratch.gather(keys, values, table, start, end, rows)
            merged.add(*self._attend(queries, *pages, scaling, True))
            out[tokens].copy_(merged.result()[mine])

    def release(self) -> None:
        """Free the scratch memory. A later step allocates it again."""
        self._scratch.clear()

    def reserve(self, attention: Sequence[AttentionMetadata], device: torch.device) -> None:
        """Allocate the scratch memory of all layers, if a request of the step has many new tokens. This includes a run of
        the largest call, so that the peak memory of the step includes the memory of this call.
        """
        if self._scratch or not len(self._long(attention, 0)):
            return
        for geometry in self._geometries:
            scratch = self._scratch_for(geometry, device)
            count = self.sizes.pieces[-1]
            queries = scratch.query[: self.sizes.rows[-1]].transpose(0, 1)[None]
            pages = scratch.keys[None, :, :count], scratch.values[None, :, :count]
            merged = _Merged(scratch)
            for _ in range(2):
                merged.add(*self._attend(queries, *pages, 1.0, False))

    @torch.inference_mode(False)
    def _scratch_for(self, geometry: Geometry, device: torch.device) -> "_Scratch":
        if geometry not in self._scratch:
            self._scratch[geometry] = _Scratch.allocate(geometry, self.sizes, self._dtype, device)
        return self._scratch[geometry]


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Scratch memory of the layers with one geometry.

    Attributes:
        query: Queries with padding, ``[rows, heads, head size]``.
        keys: Contiguous keys, ``[kv_heads, keys, head size]``.
        values: Contiguous values, ``[kv_heads, keys, head_size_v]``.
        sums: Merged output, float32 ``[rows, heads, head_size_v]``.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def allocate(cls, geometry: Geometry, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> "_Scratch":
        """Return scratch memory for the largest call, and for the rest of its first and last block. The memory
        initially contains zeros, because padding that is NaN could make other results NaN.
        """
        heads, kv_heads, size, size_v = geometry
        rows, count = sizes.rows[-1], max(sizes.rows[-1], sizes.pieces[-1]) + 2 * _MAX_BLOCK_SIZE
        query = torch.zeros(rows, heads, size, dtype=dtype, device=device)
        keys = torch.zeros(kv_heads, count, size, dtype=dtype, device=device)
        values = torch.zeros(kv_heads, count, size_v, dtype=dtype, device=device)
        return cls(query, keys, values, torch.zeros(rows, heads, size_v, dtype=torch.float32, device=device))

    def gather(
        self, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, begin: int, end: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous keys and values of the positions ``begin`` to ``end``, followed by zeros up to ``count``
        rows, each ``[1, kv_heads, count, head size]``.
        """
        block_size = keys.shape[2]
        first, last = begin // block_size, -(-end // block_size)
        blocks, skipped = table[first:last], begin - first * block_size
        found = []
        for pages, room in ((keys, self.keys), (values, self.values)):
            target = torch.unflatten(room[:, : len(blocks) * block_size], 1, (len(blocks), block_size))
            torch.index_select(pages.transpose(0, 1), 1, blocks, out=target)
            rows = room[:, skipped : skipped + count]
            if end - begin < count:
                rows[:, end - begin :].zero_()
            found.append(rows[None])
        return found[0], found[1]


class _Merged:
    """Attention over several parts of the keys, merged by their log-sum-exp in order."""

    def __init__(self, scratch: _Scratch) -> None:
        self._scratch = scratch
        self._first: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        self._total = torch.empty(0)

    def add(self, out: torch.Tensor, total: torch.Tensor) -> None:
        """Add the results of an ``Attend``."""
        part = out[0].transpose(0, 1)
        total = total.reshape(part.shape[1], part.shape[0]).t()[..., None]
        if self._first is None:
            self._first, self._total = part, total
            return
        if self._sums is None:
            self._sums = self._scratch.sums[: len(part)].copy_(self._first)
        both = torch.logaddexp(self._total, total)
        self._sums.mul_((self._total - both).exp_()).addcmul_(part, (total - both).exp_())
        self._total = both

    def result(self) -> torch.Tensor:
        """Return the output ``[rows, heads, head_size_v]``. The next object with the same scratch memory overwrites it."""
        return cast("torch.Tensor", self._first if self._sums is None else self._sums)


@dataclass(frozen=True, slots=True)
class StepPrompts:
    """``LongPrompts`` of one step.

    Attributes:
        library: Computes the attention.
        prompts: Requests that the library computes.
        other_lens: Lengths of the requests on the device, 0 for ``prompts``, or None if the step has no other requests.
    """

    library: LibraryAttention
    prompts: tuple[Prompt, ...]
    other_lens: torch.Tensor | None

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: GroupInputs,
        params: AttentionParams,
        out: torch.Tensor,
        scales: KVScales,
    ) -> GroupInputs | None:
        """Compute attention of the requests; see ``LongPrompts.attend``. If the library does not support the layer,
        this method computes nothing, and the kernels compute all requests.
        """
        if scales != UNSCALED or not self.library.supports(self.prompts, params, query, keys):
            return replace(group, prompts=None)
        for prompt in self.prompts:
            table = group.block_table[prompt.request]
            self.library.compute(query, keys, values, table, prompt, params.scaling, out)
        return None if self.other_lens is None else replace(group, prompts=None, seq_lens=self.other_lens)


def with_prompts(
    attention: Sequence[AttentionMetadata], inputs: StepInputs, library: LibraryAttention | None
) -> StepInputs:
    """Return ``inputs``, the padded inputs of a step with this metadata of its KV cache groups, with the requests that
    ``library`` computes. Returns ``inputs`` itself if there are none.
    """
    prompts = None if library is None else library.chosen(attention, inputs.groups[0].seq_lens)
    if prompts is None:
        return inputs
    return replace(inputs, groups=tuple(replace(group, prompts=prompts) for group in inputs.groups))
