"""Attention of whole sequences in which every token sees every other, without a cache that stays."""

import ctypes

import numpy as np
import torch

from penstock_enginecore.native.attention import TILE
from penstock_enginecore.native.ffi_structs import Attention, Cache, Group, Params, Write
from penstock_enginecore.native.library import NativeLibrary

_MAX_HEAD_SIZE = 512


class WholeAttention:
    """By the kernels of ``library``. Keys and values lie in memory that is used again, as in one block of a cache."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._memory = torch.empty(0)

    def takes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the kernels attend over ``[sequences, heads, tokens, head size]``: float32, as many queries as keys."""
        head_size, value_size = key.shape[3], value.shape[3]
        return (
            query.dtype == key.dtype == value.dtype == torch.float32
            and query.device.type == "cpu"
            and query.shape[2] == key.shape[2]
            and query.shape[1] % key.shape[1] == 0
            and max(head_size, value_size) <= _MAX_HEAD_SIZE
            and value_size % self._library.lanes == 0
        )

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """``[sequences, tokens, heads, value size]`` for what it takes. A sequence's numbers do not depend on the others."""
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
            # Tokens first: what the layers before have put out.
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
