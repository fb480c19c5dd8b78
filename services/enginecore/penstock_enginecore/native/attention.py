"""Attention by the CPU kernels, which read the paged KV cache directly, without gathering keys or storing masks."""

import ctypes

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionBackend, AttentionMetadata, AttentionParams, StepPlan
from penstock_enginecore.attention.kv_cache import LATENTS, KVCache, KVLayout
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.native.ffi_structs import Attention, Cache, Group, Params, Write
from penstock_enginecore.native.library import NativeLibrary

TILE = 16
"""Number of tokens whose keys and values are stored together in the cache. The kernels call this number ``kChunk``."""
TILES = KVLayout("tiles of 16", TILE)
"""Cache layout for float32, in tiles of 16 tokens for each head.

Keys are stored element by element: element 0 of all 16 tokens, then element 1. Values are stored token by token. A tile
uses the memory of its 16 slots. ``csrc/attention.h`` reads this layout.
"""
PAIRS = KVLayout("tiles of 16 in pairs", TILE)
"""Cache layout for bfloat16: like ``TILES``, but pairs of elements of a key are stored together, and the elements of
the values of two tokens alternate. See ``csrc/attention_pairs.h``.
"""
MAX_HEAD_SIZE = 512
_MAX_LATENT_WIDTH = 640
"""Largest number of elements of a row in a cache of latents (``kMaxLatentWidth``)."""


class NativeAttention(AttentionBackend):
    """Attention backend with the CPU kernels.

    The KV cache of a layer has the layout ``TILES``, or ``PAIRS`` if its dtype is bfloat16 and inputs of matrix
    products may be rounded. The backend ``fallback`` handles layers that the kernels do not support, in its own layout.
    Reasons are block sizes that are not a multiple of 16, odd head sizes and float16.
    """

    def __init__(self, library: NativeLibrary, fallback: AttentionBackend) -> None:
        self.library = library
        self._fallback = fallback

    @property
    def keeps_latents(self) -> bool:  # type: ignore[override]  # depends on the fallback
        """Whether the backend can compute attention over latents."""
        return self._fallback.keeps_latents

    def layout(self, spec: KVCacheSpec, dtype: torch.dtype) -> KVLayout:
        """Return the layout ``TILES`` or ``PAIRS`` if the kernels support the layer, otherwise the layout of
        ``fallback``.
        """
        taken = (
            not spec.keeps_latents
            and (dtype == torch.float32 or (dtype == self.library.rounds_to and spec.head_size % 2 == 0))
            and spec.block_size % TILE == 0
            and max(spec.head_size, spec.head_size_v) <= MAX_HEAD_SIZE
            and spec.head_size_v % self.library.lanes == 0
        )
        return kernel_layout(self.library, dtype) if taken else self._fallback.layout(spec, dtype)

    def write(self, cache: KVCache, plan: StepPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values into the KV cache in the cache's layout."""
        if not _is_ours(cache):
            self._fallback.write(cache, plan, keys, values)
            return
        keys, values = keys.flatten(1).float().contiguous(), values.flatten(1).float().contiguous()
        write = Write(
            len(keys),
            plan.metadata.slot_mapping.ctypes.data,
            cache_struct(cache),
            cache.num_kv_heads,
            keys.shape[1] // cache.num_kv_heads,
            values.shape[1] // cache.num_kv_heads,
            keys.data_ptr(),
            keys.shape[1],
            values.data_ptr(),
            values.shape[1],
        )
        self.library.call("write", ctypes.byref(write))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: StepPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Compute attention over the KV cache, which may have the kernels' layout or the fallback's layout."""
        if not _is_ours(cache):
            return self._fallback.attend(query, key, value, cache, plan, params)
        return self._call("attend", query, cache, plan.metadata, params, value.shape[2])

    def attend_latents(
        self, query: torch.Tensor, cache: KVCache, plan: StepPlan, params: AttentionParams, latent: int
    ) -> torch.Tensor:
        """Compute attention over latents. The backend ``fallback`` computes widths and dtypes that the kernels do not
        support, over the same memory.
        """
        if not takes_latents(self.library, cache.keys.dtype, cache.keys.shape[1], latent):
            return self._fallback.attend_latents(query, cache, plan, params, latent)
        return self._call("attend_latents", query, cache, plan.metadata, params, latent)

    def _call(
        self,
        name: str,
        query: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
        value_size: int,
    ) -> torch.Tensor:
        """Call the kernel ``name`` for queries ``[tokens, heads, head size]``, and return its output in their dtype."""
        tokens, num_heads, head_size = query.shape
        numbers = query.float().contiguous()
        output = numbers.new_empty(tokens, num_heads, value_size)
        how, sinks = params_struct(params)
        attention = Attention(
            metadata.num_requests,
            metadata.query_start_loc.ctypes.data,
            metadata.seq_lens.ctypes.data,
            group_struct(metadata),
            cache_struct(cache),
            how,
            num_heads,
            cache.num_kv_heads,
            head_size,
            value_size,
            numbers.data_ptr(),
            num_heads * head_size,
            output.data_ptr(),
            num_heads * value_size,
            None if metadata.ends_for(params.sliding_window) is None else key_ends_of(metadata),
        )
        self.library.call(name, ctypes.byref(attention))
        del sinks  # the kernel has read this memory by now
        return output.to(query.dtype)


def takes_latents(library: NativeLibrary, dtype: torch.dtype, width: int, latent: int) -> bool:
    """Return whether the kernels support a cache of latents in ``dtype`` with rows of ``width`` elements."""
    together = 1 if dtype == torch.float32 else 2
    return (
        dtype in (torch.float32, library.rounds_to)
        and width % (together * library.lanes) == 0
        and latent % library.lanes == 0
        and width <= _MAX_LATENT_WIDTH
        and latent <= MAX_HEAD_SIZE
    )


def kernel_layout(library: NativeLibrary, dtype: torch.dtype, *, latents: bool = False) -> KVLayout:
    """Return the kernels' cache layout for elements of ``dtype``, for keys and values or for latents. Raises ValueError
    unless ``dtype`` is float32 or the dtype to which the kernels round inputs.
    """
    if dtype not in (torch.float32, library.rounds_to):
        raise ValueError(f"the kernels do not support a KV cache in {str(dtype).removeprefix('torch.')}")
    if latents:
        return LATENTS
    return TILES if dtype == torch.float32 else PAIRS


def _is_ours(cache: KVCache) -> bool:
    return cache.layout in (TILES, PAIRS)


def cache_struct(cache: KVCache) -> Cache:
    """Return the struct that describes the KV cache of a layer to the kernels."""
    keys, values = cache.keys, cache.values
    pairs = cache.layout == PAIRS or (cache.layout == LATENTS and keys.dtype == torch.bfloat16)
    return Cache(keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0), pairs)


def group_struct(metadata: AttentionMetadata) -> Group:
    """Return the struct that describes the block table and the slots of a KV cache group to the kernels."""
    table = metadata.block_table
    stride = table.strides[0] // table.itemsize
    return Group(metadata.slot_mapping.ctypes.data, table.ctypes.data, stride, metadata.block_size)


def key_ends_of(metadata: AttentionMetadata) -> int | None:
    """Return the address of ``metadata.key_ends``, or None if ``key_ends`` is None or no query attends to later keys."""
    ends = metadata.key_ends
    if ends is None or all(metadata.spans(request) is None for request in range(metadata.num_requests)):
        return None
    if not ends.flags.c_contiguous or ends.dtype != np.int64 or len(ends) != len(metadata.slot_mapping):
        raise ValueError(
            f"key_ends is {ends.dtype} {list(ends.shape)}; it must be contiguous int64 [{len(metadata.slot_mapping)}]"
        )
    return ends.ctypes.data


def params_struct(params: AttentionParams) -> tuple[Params, torch.Tensor | None]:
    """Return the struct that describes ``params`` to the kernels, and the tensor to which the struct points. The tensor
    must outlive the struct.
    """
    sinks = None if params.sinks is None else params.sinks.detach().float().contiguous()
    struct = Params(
        params.sliding_window or 0,
        params.attention_chunk or 0,
        params.scaling,
        params.softcap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )
    return struct, sinks


# Bidirectional attention of whole sequences, without a KV cache that is kept between calls.


class WholeAttention:
    """Bidirectional attention by the kernels of ``library``. Each call stores keys and values in the same memory,
    arranged like one block of a KV cache.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._memory = torch.empty(0)

    def takes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether the kernels support these tensors ``[sequences, heads, tokens, head size]``. The tensors must
        be float32 with the same number of tokens.
        """
        head_size, value_size = key.shape[3], value.shape[3]
        return (
            query.dtype == key.dtype == value.dtype == torch.float32
            and query.device.type == "cpu"
            and query.shape[2] == key.shape[2]
            and query.shape[1] % key.shape[1] == 0
            and max(head_size, value_size) <= MAX_HEAD_SIZE
            and value_size % self._library.lanes == 0
        )

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the output ``[sequences, tokens, heads, value size]``. The results of a sequence do not depend on the
        other sequences.
        """
        count, num_heads, tokens, head_size = query.shape
        num_kv_heads, value_size = key.shape[1], value.shape[3]
        output = query.new_empty(count, tokens, num_heads, value_size)
        room = tokens + -tokens % TILE
        self._reserve(room * num_kv_heads * (head_size + value_size))
        keys = self._memory.data_ptr()
        values = keys + room * num_kv_heads * head_size * self._memory.itemsize
        cache = Cache(keys, values, num_kv_heads * head_size, num_kv_heads * value_size, 0)
        slots, ends = np.arange(tokens), np.full(tokens, tokens)
        table = np.zeros(1, dtype=np.int32)
        starts, lengths = np.array([0, tokens]), np.array([tokens])
        group = Group(slots.ctypes.data, table.ctypes.data, 1, room)
        for number in range(count):
            # The kernels expect the dimension of tokens before the dimension of heads, as the layers before produce it.
            q, k, v = (x[number].transpose(0, 1).contiguous() for x in (query, key, value))
            write = Write(
                tokens,
                slots.ctypes.data,
                cache,
                num_kv_heads,
                head_size,
                value_size,
                k.data_ptr(),
                num_kv_heads * head_size,
                v.data_ptr(),
                num_kv_heads * value_size,
            )
            self._library.call("write", ctypes.byref(write))
            attention = Attention(
                1,
                starts.ctypes.data,
                lengths.ctypes.data,
                group,
                cache,
                Params(0, 0, scaling, 0.0, None),
                num_heads,
                num_kv_heads,
                head_size,
                value_size,
                q.data_ptr(),
                num_heads * head_size,
                output[number].data_ptr(),
                num_heads * value_size,
                ends.ctypes.data,
            )
            self._library.call("attend", ctypes.byref(attention))
        return output

    def _reserve(self, numbers: int) -> None:
        if self._memory.numel() < numbers:
            self._memory = torch.zeros(numbers)
