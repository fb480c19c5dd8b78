"""Memory of KV caches in which a block is one piece, the keys and values of all layers: what offload and transfer want."""

from collections.abc import Mapping, Sequence

import torch

from penstock_enginecore.attention.kv_cache import NO_SCALES, KVCache, KVLayout, KVScales
from penstock_enginecore.attention.kv_memory import Empty, KVMemory, Width
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec

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
