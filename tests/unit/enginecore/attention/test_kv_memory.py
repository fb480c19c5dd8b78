"""Memory of KV caches: who shares it, and that it lies as the backend says."""

import msgspec
import pytest
import torch

from penstock_enginecore.attention.kv_cache import SLOTS, KVLayout, KVMemory, LayoutOf
from penstock_enginecore.attention.reference import ReferenceAttention
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec

SPEC = KVCacheSpec(block_size=4, num_kv_heads=2, head_size=8, head_size_v=8, dtype_size=4)
TILES_OF_4 = KVLayout("tiles of 4", 4)


def make_memory(specs: dict[str, KVCacheSpec], layout: LayoutOf) -> KVMemory:
    return KVMemory(specs, layout, torch.float32, torch.device("cpu"))


def test_layers_of_different_heads_share_memory_as_wide_as_the_wider() -> None:
    specs = {"narrow": SPEC, "wide": msgspec.structs.replace(SPEC, num_kv_heads=3)}
    groups = tuple(KVCacheGroup(layer_names=(name,)) for name in specs)
    memory = make_memory(specs, ReferenceAttention().layout)
    layers = memory.allocate(KVCacheConfig(num_blocks=4, block_size=4, groups=groups, max_model_len=8))
    small, large = (layer.cache for layer in layers.values())
    slots = torch.tensor([5, 9])
    for cache, heads in ((large, 3), (small, 2)):
        keys = torch.randn(2, heads, SPEC.head_size)
        cache.write(slots, keys, keys + 1)
        read = cache.gather(slots)
        assert torch.equal(read[0], keys)
        assert torch.equal(read[1], keys + 1)
    assert small.keys.data_ptr() == large.keys.data_ptr()


def test_each_layer_lies_as_the_backend_says_for_the_block_size_it_gets() -> None:
    specs = {"plain": SPEC, "other": msgspec.structs.replace(SPEC, head_size=16)}

    def layout(spec: KVCacheSpec, dtype: torch.dtype) -> KVLayout:
        assert dtype == torch.float32
        return TILES_OF_4 if spec.head_size == 16 and spec.block_size % 4 == 0 else SLOTS

    memory = make_memory(specs, layout)
    for block_size, found in ((8, [SLOTS, TILES_OF_4]), (6, [SLOTS, SLOTS])):
        assert [each.cache.layout for each in memory.throwaway(block_size, 2).values()] == found


def test_blocks_that_hold_no_whole_tiles_are_refused() -> None:
    memory = make_memory({"layer": SPEC}, lambda *_: TILES_OF_4)
    with pytest.raises(ValueError, match="blocks of 6 tokens do not hold whole tiles of 4"):
        memory.throwaway(6, 2)


def test_memory_in_another_layout_is_not_read_or_written_as_slots() -> None:
    cache = make_memory({"layer": SPEC}, lambda *_: TILES_OF_4).throwaway(4, 2)["layer"].cache
    slots, rows = torch.tensor([4]), torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="layout 'tiles of 4', not in 'slots'"):
        cache.gather(slots)
    with pytest.raises(ValueError, match="layout 'tiles of 4'"):
        cache.write(slots, rows, rows)
