"""KV cache memory: its layout per layer, its allocation for a model, and an arena where a block of all layers is one piece.

A layer has two flat tensors of *slots*, one slot per token. Block ``b`` owns the slots ``b * block_size .. (b + 1) *
block_size - 1``; block 0 is the null block, which stays zero.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import torch

from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVTensorWidth, kv_tensor_widths

FLOAT8 = torch.float8_e4m3fn
"""What numbers of a cache are with ``cache.dtype: fp8``."""
LARGEST_FLOAT8 = 448.0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The order of numbers within a layer's memory. A backend declares one for each layer (``AttentionBackend.layout``), and
    whoever allocates, reads or moves the memory goes by it. What lies in whole tiles keeps its meaning when it is copied.
    """

    name: str
    """Equal names are equal orders."""
    tile: int = 1
    """Tokens whose numbers lie among one another: block sizes are multiples of it."""


SLOTS = KVLayout("slots")
"""All heads of a token side by side in its slot, so that fetching a token is one contiguous copy whatever the block size."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """What the numbers of a layer's fp8 cache are multiplied by when they are read: those of ``key`` and those of ``value``."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()
NO_SCALES: Mapping[str, KVScales] = MappingProxyType({})
"""By layer name; those that are not named are ``UNSCALED``."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys ``[num_slots, num_kv_heads * head_size]`` and values ``[num_slots, num_kv_heads * head_size_v]`` of one
    layer. In other layouts than ``SLOTS`` the rows of a tile share their numbers, or the tensors have the shape that the layout
    says. In ``FLOAT8`` numbers are divided by their ``scales``, those beyond its range being its largest; other caches have none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    num_kv_heads: int
    layout: KVLayout = SLOTS
    scales: KVScales = UNSCALED

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at ``slots`` (int64, flat), as ``[len(slots), num_kv_heads, head size]``, in float32 if they are kept
        in ``FLOAT8``. ValueError in another layout than ``SLOTS``.
        """
        self._check_layout()
        heads = (len(slots), self.num_kv_heads, -1)
        keys, values = self.keys.index_select(0, slots).view(heads), self.values.index_select(0, slots).view(heads)
        if keys.dtype != FLOAT8:
            return keys, values
        return keys.float() * self.scales.key, values.float() * self.scales.value

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens: ``slots`` int64 ``[tokens]``, ``keys`` and ``values`` ``[tokens, num_kv_heads, head
        size]``. ValueError in another layout than ``SLOTS``.
        """
        self._check_layout()
        for cache, new, scale in ((self.keys, keys, self.scales.key), (self.values, values, self.scales.value)):
            numbers = stored(new, cache.dtype, scale).reshape(len(slots), -1)
            if cache.dtype == FLOAT8:  # which torch does not copy by index
                cache, numbers = cache.view(torch.uint8), numbers.view(torch.uint8)
            cache.index_copy_(0, slots, numbers)

    def _check_layout(self) -> None:
        if self.layout != SLOTS:
            raise ValueError(f"the cache lies in the layout {self.layout.name!r}, not in {SLOTS.name!r}")


def stored(numbers: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """``numbers`` as a cache of ``dtype`` holds them, of ``FLOAT8`` divided by ``scale``. NaN stays NaN."""
    if dtype != FLOAT8:
        return numbers
    return (numbers.float() * (1.0 / scale)).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's part of the KV cache and the number of the group whose block table it uses."""

    cache: KVCache
    group: int


LayerCaches = dict[str, LayerCache]
"""By the name of the attention module. Empty where nothing is allocated."""


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


HEADS = KVLayout("heads")
"""Keys and values ``[blocks, num_kv_heads, block_size, head size]``: the tokens of a head of a block follow one another."""


class KVArena(KVMemory):
    """An arena ``[blocks, layers, 2, num_kv_heads, block_size, head size]``: a layer's keys and values are views of it, in the
    layout ``HEADS``. Where layers of several groups share memory, a block has as many parts as the largest group has layers.
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
        """Keys and values ``[num_blocks, block_size * width]`` of each width, in one piece of memory. The null block is
        cleared.
        """
        sizes = [block_size * part for width in widths for part in (width.key_width, width.value_width)]
        arena = empty(num_blocks, sum(sizes), self._dtype)
        arena[:1] = 0
        parts = torch.split(arena, sizes, dim=1)
        return list(zip(parts[::2], parts[1::2], strict=True))

    def _view(self, spec: KVCacheSpec, block_size: int, keys: torch.Tensor, values: torch.Tensor) -> KVCache:
        """A layer's view of a part that may be wider than the layer."""

        def heads(part: torch.Tensor, head_size: int) -> torch.Tensor:
            own = part[:, : spec.num_kv_heads * block_size * head_size]
            return torch.unflatten(own, 1, (spec.num_kv_heads, block_size, head_size))

        return KVCache(heads(keys, spec.head_size), heads(values, spec.head_size_v), spec.num_kv_heads, HEADS)
