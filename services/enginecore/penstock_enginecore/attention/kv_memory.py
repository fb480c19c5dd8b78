"""Allocates the KV cache of a model."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from penstock_enginecore.attention.kv_cache import (
    NO_SCALES,
    UNSCALED,
    KVCache,
    KVLayout,
    KVScales,
    LayerCache,
    LayerCaches,
)
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVTensorWidth, kv_tensor_widths

LayoutOf = Callable[[KVCacheSpec, torch.dtype], KVLayout]
"""What ``AttentionBackend.layout`` is."""
Width = KVTensorWidth | KVCacheSpec
"""Either says how many numbers the keys of a token take, and the values."""


Empty = Callable[[int, int, torch.dtype], torch.Tensor]
"""Makes a tensor ``[rows, columns]`` of a type of numbers on the device, of no meaning."""


class KVMemory:
    """``specs``: by layer name. ``layout``: how a layer of a spec lies in memory. Numbers are kept in ``dtype`` on
    ``device``, in fp8 by the ``scales`` of their layers.
    """

    def __init__(
        self,
        specs: Mapping[str, KVCacheSpec],
        layout: LayoutOf,
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[str, KVScales] = NO_SCALES,
    ) -> None:
        self._specs = dict(specs)
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._scales = dict(scales)
        self._place: Empty = self._anywhere

    def place(self, empty: Empty) -> None:
        """Have ``allocate`` take memory from ``empty``."""
        self._place = empty

    def allocate(self, config: KVCacheConfig) -> LayerCaches:
        """The whole cache. The i-th layers of all groups share memory, as wide as the widest: no block belongs to two groups.
        Empty for a model without layers that attend over a cache. ValueError for a block size that a layout does not take.
        """
        if not self._specs:
            return {}
        widths = kv_tensor_widths(self._specs, config.groups)
        shared = self._memory(widths, config.block_size, config.num_blocks, self._place)
        index = {name: (i, g) for g, group in enumerate(config.groups) for i, name in enumerate(group.layer_names)}
        return {
            name: LayerCache(self._scaled(name, config.block_size, *shared[index[name][0]]), group=index[name][1])
            for name in self._specs
        }

    def throwaway(self, block_size: int, num_blocks: int) -> LayerCaches:
        """A cache of one group, each layer with memory of its own."""
        memory = self._memory(list(self._specs.values()), block_size, num_blocks, self._anywhere)
        return {
            name: LayerCache(self._scaled(name, block_size, *parts), group=0)
            for name, parts in zip(self._specs, memory, strict=True)
        }

    def _scaled(self, name: str, block_size: int, keys: torch.Tensor, values: torch.Tensor) -> KVCache:
        """The view of the layer called ``name``."""
        cache = self._view(self._specs[name], block_size, keys, values)
        return dataclasses.replace(cache, scales=self._scales.get(name, UNSCALED))

    def _memory(
        self, widths: Sequence[Width], block_size: int, num_blocks: int, empty: Empty
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys ``[num_slots, key_width]`` and values ``[num_slots, value_width]`` of each width. Only the null block is cleared:
        attention reads no slot that its request has not written.
        """
        memory = []
        for width in widths:
            keys, values = (
                empty(num_blocks * block_size, numbers, self._dtype) for numbers in (width.key_width, width.value_width)
            )
            keys[:block_size] = 0
            values[:block_size] = 0
            memory.append((keys, values))
        return memory

    def _anywhere(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=self._device)

    def _view(self, spec: KVCacheSpec, block_size: int, keys: torch.Tensor, values: torch.Tensor) -> KVCache:
        """A layer's view of memory that may be wider than the layer."""
        layout = self._layout(msgspec.structs.replace(spec, block_size=block_size), self._dtype)
        if block_size % layout.tile:
            raise ValueError(f"blocks of {block_size} tokens do not hold whole tiles of {layout.tile}")
        return KVCache(keys[:, : spec.key_width], values[:, : spec.value_width], spec.num_kv_heads, layout)


def num_groups(caches: LayerCaches) -> int:
    """The groups up to the last one that has layers among ``caches``: others may have some behind it."""
    return 1 + max((layer.group for layer in caches.values()), default=-1)


def block_memory(layers: LayerCaches, num_blocks: int) -> list[torch.Tensor]:
    """The memory of a KV cache, each tensor uint8 ``[num_blocks, bytes]``: a row is what a block has there, of all layers that
    share it. RuntimeError for memory that is not so.
    """
    storages: dict[int, torch.Tensor] = {}
    for layer in layers.values():
        for tensor in (layer.cache.keys, layer.cache.values):
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    memory = []
    for tensor in storages.values():
        rows = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        if len(rows) % num_blocks:
            raise RuntimeError(f"{len(rows)} bytes of the KV cache are no {num_blocks} blocks")
        memory.append(rows.view(num_blocks, -1))
    return memory


def block_order(layers: LayerCaches) -> str:
    """How the numbers of a block lie: the layouts of its layers and their types, each once."""
    caches = [layer.cache for layer in layers.values()]
    orders = (f"{cache.layout.name}/{cache.layout.tile} {cache.keys.dtype}" for cache in caches)
    return ", ".join(dict.fromkeys(orders)).replace("torch.", "")


def num_bytes(layers: LayerCaches) -> int:
    """Bytes of a KV cache; memory that layers share counts once."""
    tensors = [tensor for layer in layers.values() for tensor in (layer.cache.keys, layer.cache.values)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
