"""KV cache memory: layouts of a layer, allocation for a model, and an arena in which a block of all layers is
contiguous.

A layer has two flat tensors of *slots*, one slot per token. Block ``b`` has the slots ``b * block_size .. (b + 1) *
block_size - 1``. Block 0 is the null block, which stays zero.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import torch

from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVTensorWidth, kv_tensor_widths

FLOAT8 = torch.float8_e4m3fn
"""Dtype of the cache with ``cache.dtype: fp8``."""
LARGEST_FLOAT8 = 448.0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Order of elements in the KV cache memory of a layer.

    A backend declares a layout for each layer (``AttentionBackend.layout``). Code that allocates, reads or moves the
    memory uses this layout. Code may copy complete tiles without knowing the order inside them.
    """

    name: str
    """Name of the layout. Layouts with equal names have the same order of elements."""
    tile: int = 1
    """Number of consecutive tokens whose elements are interleaved in memory. Block sizes must be multiples of this
    number.
    """


SLOTS = KVLayout("slots")
"""Layout in which all heads of a token are contiguous in the token's slot. Reading a token is one contiguous copy for
any block size.
"""


LATENTS = KVLayout("latents")
"""Layout of a layer that caches latents (MLA): the latent and the rotated part of a token's key are contiguous in the
token's slot. There are no values.
"""


@dataclass(frozen=True, slots=True)
class KVScales:
    """Factors by which the keys and values in a layer's fp8 cache are multiplied when they are read."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()
NO_SCALES: Mapping[str, KVScales] = MappingProxyType({})
"""Empty mapping of scales by layer name. Layers that are not in such a mapping are ``UNSCALED``."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys ``[num_slots, num_kv_heads * head_size]`` and values ``[num_slots, num_kv_heads * head_size_v]`` of one
    layer.

    In layouts other than ``SLOTS``, the elements of a tile's tokens are interleaved in the tile's rows, or the layout
    defines another shape. In a cache of dtype ``FLOAT8``, elements are stored divided by ``scales`` and clamped to the
    dtype's range. Caches of other dtypes have no scales.
    """

    keys: torch.Tensor
    values: torch.Tensor
    num_kv_heads: int
    layout: KVLayout = SLOTS
    scales: KVScales = UNSCALED

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values at ``slots`` (int64, flat), each ``[len(slots), num_kv_heads, head size]``. The
        result is float32 if the cache's dtype is ``FLOAT8``.

        Raises ValueError for layouts other than ``SLOTS`` and ``LATENTS``.
        """
        self._check_layout()
        heads = (len(slots), self.num_kv_heads, -1)
        keys, values = self.keys.index_select(0, slots).view(heads), self.values.index_select(0, slots).view(heads)
        if keys.dtype != FLOAT8:
            return keys, values
        return keys.float() * self.scales.key, values.float() * self.scales.value

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``keys`` and ``values`` ``[tokens, num_kv_heads, head size]`` of new tokens at ``slots``, int64
        ``[tokens]``.

        Raises ValueError for layouts other than ``SLOTS`` and ``LATENTS``.
        """
        self._check_layout()
        for cache, new, scale in ((self.keys, keys, self.scales.key), (self.values, values, self.scales.value)):
            numbers = stored(new, cache.dtype, scale).flatten(1)
            if cache.dtype == FLOAT8:  # torch does not support index_copy_ for FLOAT8.
                cache, numbers = cache.view(torch.uint8), numbers.view(torch.uint8)
            cache.index_copy_(0, slots, numbers)

    def _check_layout(self) -> None:
        if self.layout not in (SLOTS, LATENTS):
            raise ValueError(
                f"the cache has the layout {self.layout.name!r}; it must be {SLOTS.name!r} or {LATENTS.name!r}"
            )


def stored(numbers: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Convert ``numbers`` to the form in which a cache of ``dtype`` stores them. For ``FLOAT8``, the numbers are
    divided by ``scale`` and clamped. NaN stays NaN.
    """
    if dtype != FLOAT8:
        return numbers
    return (numbers.float() * (1.0 / scale)).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of a layer, and the number of the group whose block table the layer uses.

    If ``read_only`` is true, another layer writes the keys and values.
    """

    cache: KVCache
    group: int
    read_only: bool = False


LayerCaches = dict[str, LayerCache]
"""KV caches of the layers, by the name of the attention module. Empty if no memory is allocated."""


LayoutOf = Callable[[KVCacheSpec, torch.dtype], KVLayout]
"""Type of ``AttentionBackend.layout``."""
Width = KVTensorWidth | KVCacheSpec
"""Object with the number of elements in the keys, and in the values, of one token."""


Empty = Callable[[int, int, torch.dtype], torch.Tensor]
"""Function that returns an uninitialized tensor ``[rows, columns]`` of the given dtype on the device."""


class KVMemory:
    """Allocator of a model's KV caches.

    Args:
        specs: KV cache specs by layer name.
        layout: Function that returns the layout of a layer.
        dtype: The dtype of the cache.
        scales: Scales of an fp8 cache by layer name.
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
        """Set the function ``empty``, with which ``allocate`` creates tensors."""
        self._place = empty

    def allocate(self, config: KVCacheConfig) -> LayerCaches:
        """Allocate the KV caches of all layers. The result is empty for a model whose attention uses no cache.

        The i-th layers of all groups use the same memory, which is as wide as the widest of these layers. Sharing is
        possible because no block belongs to two groups. Raises ValueError for a block size that a layout does not
        support.
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
        """Allocate a temporary cache with one group, in which layers share no memory."""
        memory = self._memory(list(self._specs.values()), block_size, num_blocks, self._anywhere)
        return {
            name: LayerCache(self._scaled(name, block_size, *parts), group=0)
            for name, parts in zip(self._specs, memory, strict=True)
        }

    def _scaled(self, name: str, block_size: int, keys: torch.Tensor, values: torch.Tensor) -> KVCache:
        """Return the cache of the layer ``name``, with its scales."""
        cache = self._view(self._specs[name], block_size, keys, values)
        return dataclasses.replace(cache, scales=self._scales.get(name, UNSCALED))

    def _memory(
        self, widths: Sequence[Width], block_size: int, num_blocks: int, empty: Empty
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return memory for keys ``[num_slots, key_width]`` and values ``[num_slots, value_width]``, for each of
        ``widths``.

        Only the null block is filled with zeros. Attention never reads a slot that its request has not written.
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
        """Return the part of ``keys`` and ``values`` that a layer uses. The memory may be wider than the layer."""
        layout = self._layout(msgspec.structs.replace(spec, block_size=block_size), self._dtype)
        if block_size % layout.tile:
            raise ValueError(
                f"the block size of {block_size} tokens is not a multiple of the layout's tile of {layout.tile} tokens"
            )
        return KVCache(keys[:, : spec.key_width], values[:, : spec.value_width], spec.num_kv_heads, layout)


def num_groups(caches: LayerCaches) -> int:
    """Return the number of groups up to the last group that has layers in ``caches``. Other pipeline stages may have
    more groups.
    """
    return 1 + max((layer.group for layer in caches.values()), default=-1)


def block_memory(layers: LayerCaches, num_blocks: int) -> list[torch.Tensor]:
    """Return the memory of a KV cache as tensors uint8 ``[num_blocks, bytes]``. Row ``i`` of a tensor has the data of
    block ``i`` for all layers that share this memory.

    Raises RuntimeError if the memory cannot be split into blocks.
    """
    storages: dict[int, torch.Tensor] = {}
    for layer in layers.values():
        for tensor in (layer.cache.keys, layer.cache.values):
            if tensor.numel():  # layers that cache latents have no values
                storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    memory = []
    for tensor in storages.values():
        rows = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        if len(rows) % num_blocks:
            raise RuntimeError(f"{len(rows)} bytes of the KV cache are not a multiple of {num_blocks} blocks")
        memory.append(rows.view(num_blocks, -1))
    return memory


def block_order(layers: LayerCaches) -> str:
    """Return a text that describes the order of a block's elements: the distinct layouts and dtypes of the layers."""
    caches = [layer.cache for layer in layers.values()]
    orders = (f"{cache.layout.name}/{cache.layout.tile} {cache.keys.dtype}" for cache in caches)
    return ", ".join(dict.fromkeys(orders)).replace("torch.", "")


def num_bytes(layers: LayerCaches) -> int:
    """Return the size of a KV cache in bytes. Memory that several layers share counts once."""
    tensors = [tensor for layer in layers.values() for tensor in (layer.cache.keys, layer.cache.values)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


HEADS = KVLayout("heads")
"""Layout ``[blocks, num_kv_heads, block_size, head size]`` of keys and values. Within a block, the tokens of each head
are contiguous.
"""


class KVArena(KVMemory):
    """Allocator that puts the keys and values of all layers into one tensor, the arena: ``[blocks, layers, 2,
    num_kv_heads, block_size, head size]``.

    Keys and values of a layer are views of the arena, in the layout ``HEADS``. If layers of several groups share
    memory, the number of ``layers`` in the shape is the number of layers in the largest group.
    """

    def __init__(
        self,
        specs: Mapping[str, KVCacheSpec],
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[str, KVScales] = NO_SCALES,
    ) -> None:
        super().__init__(specs, lambda *_: HEADS, dtype, device, scales)

    def _memory(
        self, widths: Sequence[Width], block_size: int, num_blocks: int, empty: Empty
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return memory for keys and values ``[num_blocks, block_size * width]``, for each of ``widths``. All of this
        memory is in one tensor, in which the null block is filled with zeros.
        """
        sizes = [block_size * part for width in widths for part in (width.key_width, width.value_width)]
        arena = empty(num_blocks, sum(sizes), self._dtype)
        arena[:1] = 0
        parts = torch.split(arena, sizes, dim=1)
        return list(zip(parts[::2], parts[1::2], strict=True))

    def _view(self, spec: KVCacheSpec, block_size: int, keys: torch.Tensor, values: torch.Tensor) -> KVCache:
        """Return the part of ``keys`` and ``values`` that a layer uses. Both may be wider than the layer."""

        def heads(part: torch.Tensor, head_size: int) -> torch.Tensor:
            own = part[:, : spec.num_kv_heads * block_size * head_size]
            return torch.unflatten(own, 1, (spec.num_kv_heads, block_size, head_size))

        return KVCache(heads(keys, spec.head_size), heads(values, spec.head_size_v), spec.num_kv_heads, HEADS)
