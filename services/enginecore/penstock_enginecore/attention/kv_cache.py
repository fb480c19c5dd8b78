"""The memory of a layer's keys and values, and the order in which they lie in it.

A layer has two flat tensors of *slots*, one slot per token. Block ``b`` owns the slots ``b * block_size .. (b + 1) *
block_size - 1``; block 0 is the null block, which stays zero.
"""

from dataclasses import dataclass

import torch


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
class KVCache:
    """Keys ``[num_slots, num_kv_heads * head_size]`` and values ``[num_slots, num_kv_heads * head_size_v]`` of one
    layer. In other layouts than ``SLOTS`` the rows of a tile share their numbers, or the tensors have the shape that the layout
    says.
    """

    keys: torch.Tensor
    values: torch.Tensor
    num_kv_heads: int
    layout: KVLayout = SLOTS

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at ``slots`` (int64, flat), as ``[len(slots), num_kv_heads, head size]``. ValueError in another
        layout than ``SLOTS``.
        """
        self._check_layout()
        heads = (len(slots), self.num_kv_heads, -1)
        return self.keys.index_select(0, slots).view(heads), self.values.index_select(0, slots).view(heads)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens: ``slots`` int64 ``[tokens]``, ``keys`` and ``values`` ``[tokens, num_kv_heads, head
        size]``. ValueError in another layout than ``SLOTS``.
        """
        self._check_layout()
        self.keys.index_copy_(0, slots, keys.reshape(len(slots), -1))
        self.values.index_copy_(0, slots, values.reshape(len(slots), -1))

    def _check_layout(self) -> None:
        if self.layout != SLOTS:
            raise ValueError(f"the cache lies in the layout {self.layout.name!r}, not in {SLOTS.name!r}")


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's part of the KV cache and the number of the group whose block table it uses."""

    cache: KVCache
    group: int


LayerCaches = dict[str, LayerCache]
"""By the name of the attention module. Empty where nothing is allocated."""
