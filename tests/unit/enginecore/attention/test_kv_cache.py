"""Memory of KV caches: layers that share it, and the layout that the backend requires."""

import msgspec
import pytest
import torch

from penstock_enginecore.attention.kv_cache import (
    HEADS,
    SLOTS,
    KVArena,
    KVLayout,
    KVMemory,
    LayerCaches,
    LayoutOf,
    num_bytes,
)
from penstock_enginecore.attention.reference import ReferenceAttention
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, block_bytes

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
    with pytest.raises(ValueError, match="the block size of 6 tokens is not a multiple of the layout's tile of 4"):
        memory.throwaway(6, 2)


def test_memory_in_another_layout_is_not_read_or_written_as_slots() -> None:
    cache = make_memory({"layer": SPEC}, lambda *_: TILES_OF_4).throwaway(4, 2)["layer"].cache
    slots, rows = torch.tensor([4]), torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="layout 'tiles of 4'; it must be 'slots'"):
        cache.gather(slots)
    with pytest.raises(ValueError, match="layout 'tiles of 4'"):
        cache.write(slots, rows, rows)


# The arena of KV caches: a block is contiguous memory that contains all layers.

CPU = torch.device("cpu")


def allocate(specs: dict[str, KVCacheSpec], *groups: tuple[str, ...]) -> LayerCaches:
    found = tuple(KVCacheGroup(layer_names=names) for names in groups)
    config = KVCacheConfig(num_blocks=5, block_size=4, groups=found, max_model_len=8)
    layers = KVArena(specs, torch.float32, CPU).allocate(config)
    assert num_bytes(layers) == 5 * block_bytes(specs, found)
    return layers


def test_a_block_of_all_layers_is_one_piece_of_memory() -> None:
    layers = allocate({"a": SPEC, "b": SPEC, "c": SPEC}, ("a", "b", "c"))
    parts = [part for layer in layers.values() for part in (layer.cache.keys, layer.cache.values)]
    assert {layer.cache.layout for layer in layers.values()} == {HEADS}
    assert {part.shape for part in parts} == {(5, 2, 4, 8)}
    numbers = 2 * 4 * 8
    assert [part.data_ptr() - parts[0].data_ptr() for part in parts] == [4 * numbers * i for i in range(6)]
    assert {part.stride() for part in parts} == {(6 * numbers, 32, 8, 1)}


def test_the_null_block_is_clear() -> None:
    for layer in allocate({"a": SPEC, "b": SPEC}, ("a", "b")).values():
        assert not layer.cache.keys[0].any()
        assert not layer.cache.values[0].any()


def test_layers_of_groups_share_the_parts_of_a_block() -> None:
    specs = dict.fromkeys(["a", "b", "c", "d", "e"], SPEC)
    layers = allocate(specs, ("a", "c", "e"), ("b", "d"))
    starts = {name: layer.cache.keys.data_ptr() for name, layer in layers.items()}
    assert starts["a"] == starts["b"]
    assert starts["c"] == starts["d"]
    assert len(set(starts.values())) == 3
    assert [layers[name].group for name in specs] == [0, 1, 0, 1, 0]


def test_a_narrower_layer_uses_the_beginning_of_a_part() -> None:
    wide = msgspec.structs.replace(SPEC, num_kv_heads=3, head_size_v=16)
    layers = allocate({"narrow": SPEC, "wide": wide}, ("narrow",), ("wide",))
    narrow, wider = layers["narrow"].cache, layers["wide"].cache
    assert (wider.keys.shape, wider.values.shape) == ((5, 3, 4, 8), (5, 3, 4, 16))
    assert (narrow.keys.shape, narrow.values.shape) == ((5, 2, 4, 8), (5, 2, 4, 8))
    assert narrow.keys.data_ptr() == wider.keys.data_ptr()
    assert narrow.values.data_ptr() == wider.values.data_ptr()
    wider.keys.fill_(1)
    wider.values.fill_(2)
    assert (narrow.keys == 1).all()
    assert (narrow.values == 2).all()
    narrow.values[3].fill_(3)
    assert (wider.values == 3).sum() == narrow.values[3].numel()
    assert (wider.keys == 1).all()


def test_a_throwaway_cache_has_a_part_for_each_layer() -> None:
    layers = KVArena({"a": SPEC, "b": SPEC}, torch.float16, CPU).throwaway(16, 3)
    for i, layer in enumerate(layers.values()):
        layer.cache.keys.fill_(i)
        layer.cache.values.fill_(i + 10)
    for i, layer in enumerate(layers.values()):
        assert (layer.cache.keys == i).all()
        assert (layer.cache.values == i + 10).all()
    assert {layer.cache.keys.shape for layer in layers.values()} == {(3, 2, 16, 8)}
    assert {layer.group for layer in layers.values()} == {0}


def test_a_model_without_a_cache_gets_none() -> None:
    config = KVCacheConfig(num_blocks=5, block_size=4, groups=(), max_model_len=8)
    assert KVArena({}, torch.float32, CPU).allocate(config) == {}
