"""The memory of a layer's keys and values, and the order in which they lie in it.

A layer has two flat tensors of *slots*, one slot per token. Block ``b`` owns the slots ``b * block_size .. (b + 1) *
block_size - 1``; block 0 is the null block, which stays zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

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
