"""Attention by the kernels, over the paged cache as it lies: no gather, no mask in memory.

Slots lie in chunks of 16 tokens, the keys of a head with the tokens side by side: see ``csrc/attention.h``. What the kernels
do not take (a block size that 16 does not divide, an odd head size, half precision) goes to the CPU backend of torch,
layer by layer; which of the two it is never changes while a cache lives.
"""

import ctypes
from functools import partial

import torch

from penstock_enginecore.attention.base import AttentionBackend, AttentionMetadata, AttentionParams, KVCache, StepPlan
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.structs import Attention, Cache, Group, Reach, Write

CHUNK = 16
"""Tokens of the cache that lie together: ``kChunk`` of the kernels."""
_MAX_HEAD_SIZE = 512


class NativeAttention(AttentionBackend):
    """See the module's docstring. ``fallback``: the backend for what the kernels do not take."""

    def __init__(self, library: NativeLibrary, fallback: AttentionBackend) -> None:
        self._library = library
        self._fallback = fallback

    def takes(self, cache: KVCache, block_size: int) -> bool:
        """Whether the kernels can keep and read ``cache``."""
        sizes = [part.shape[1] // cache.num_kv_heads for part in (cache.keys, cache.values)]
        return (
            cache.keys.dtype == torch.float32
            and block_size % CHUNK == 0
            and max(sizes) <= _MAX_HEAD_SIZE
            and sizes[1] % self._library.lanes == 0
        )

    def write(self, cache: KVCache, plan: StepPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See ``AttentionBackend.write``."""
        if not self.takes(cache, plan.metadata.block_size):
            self._fallback.write(cache, plan, keys, values)
            return
        keys, values = keys.flatten(1).contiguous(), values.flatten(1).contiguous()
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
        self._library.call("write", ctypes.byref(write))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: StepPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        metadata = plan.metadata
        if not self.takes(cache, metadata.block_size):
            return self._fallback.attend(query, key, value, cache, plan, params)
        tokens, num_heads, head_size = query.shape
        query = query.contiguous()
        output = query.new_empty(tokens, num_heads, value.shape[2])
        reach, sinks = reach_struct(params)
        attention = Attention(
            metadata.num_requests,
            metadata.query_start_loc.ctypes.data,
            metadata.seq_lens.ctypes.data,
            group_struct(metadata),
            cache_struct(cache),
            reach,
            num_heads,
            cache.num_kv_heads,
            head_size,
            value.shape[2],
            query.data_ptr(),
            num_heads * head_size,
            output.data_ptr(),
            num_heads * value.shape[2],
        )
        self._library.call("attend", ctypes.byref(attention))
        del sinks  # the kernel has read it
        return output


def backend(name: str, device: torch.device, library: NativeLibrary | None) -> AttentionBackend:
    """See ``create_backend``; ``library``: the kernels to attend with, None for none."""
    return create_backend(name, device, None if library is None else partial(NativeAttention, library))


def cache_struct(cache: KVCache) -> Cache:
    """The kernels' view of a layer's memory."""
    return Cache(cache.keys.data_ptr(), cache.values.data_ptr(), cache.keys.stride(0), cache.values.stride(0))


def group_struct(metadata: AttentionMetadata) -> Group:
    """The kernels' view of a group's block table and slots."""
    table = metadata.block_table
    stride = table.strides[0] // table.itemsize
    return Group(metadata.slot_mapping.ctypes.data, table.ctypes.data, stride, metadata.block_size)


def reach_struct(params: AttentionParams) -> tuple[Reach, torch.Tensor | None]:
    """The kernels' view of ``params``, and the tensor that it points into."""
    sinks = None if params.sinks is None else params.sinks.detach().float().contiguous()
    reach = Reach(
        params.sliding_window or 0,
        params.chunk or 0,
        params.scaling,
        params.softcap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )
    return reach, sinks
