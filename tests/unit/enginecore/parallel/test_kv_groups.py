"""Groups of layers that mean the same in every stage, and take what the stage's own layers take."""

import msgspec
import pytest

from penstock_enginecore.config import CacheConfig
from penstock_enginecore.core.kv_cache.sizing import size_kv_cache
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec, block_bytes
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.parallel.stage_plan import largest_stage, own_groups

FULL = KVCacheSpec(block_size=4, num_kv_heads=2, head_size=8, head_size_v=8, dtype_size=4)
WINDOW = msgspec.structs.replace(FULL, sliding_window=8)
KINDS = {"f": FULL, "w": WINDOW}


def stages_of(*kinds: str) -> list[dict[str, KVCacheSpec]]:
    """A string of ``f`` and ``w`` for each stage."""
    return [{f"layers.{s}.{i}": KINDS[kind] for i, kind in enumerate(of_stage)} for s, of_stage in enumerate(kinds)]


def sized(stages: list[dict[str, KVCacheSpec]], memory: int, max_model_len: int = 256) -> KVCacheConfig:
    return size_kv_cache(
        largest_stage(stages),
        memory,
        CacheConfig(),
        requested_max_model_len=max_model_len,
        model_max_len=max_model_len,
        max_tokens_in_flight=16,
    )


@pytest.mark.parametrize(
    "kinds",
    [("fff", "fff"), ("ff", "ffff"), ("wwf", "wwf"), ("wwww", "ffff"), ("wwwww", "fwwww", "wwfww"), ("f", "wwwwwww")],
)
def test_every_layer_has_a_group_of_its_kind_and_no_stage_takes_more_than_it_has(kinds: tuple[str, ...]) -> None:
    stages, memory = stages_of(*kinds), 2**20
    config = sized(stages, memory)
    used = []
    for specs in stages:
        own = own_groups(config, specs)
        assert [group.layer_names for group in own.groups] != []
        assert sorted(name for group in own.groups for name in group.layer_names) == sorted(specs)
        for group, whole in zip(own.groups, config.groups, strict=True):
            assert msgspec.structs.replace(group, layer_names=()) == msgspec.structs.replace(whole, layer_names=())
            assert all(specs[name].sliding_window == group.sliding_window for name in group.layer_names)
        used.append(block_bytes(specs, own.groups) * config.num_blocks)
    assert max(used) <= memory


def test_the_largest_of_alike_stages_uses_all_of_its_memory() -> None:
    stages = stages_of("ffff", "ff")
    config = sized(stages, 100 * 4 * FULL.page_size_bytes)
    assert config.num_blocks == 100
    assert block_bytes(stages[1], own_groups(config, stages[1]).groups) == 2 * FULL.page_size_bytes


def test_a_window_that_no_sequence_leaves_is_no_group() -> None:
    stages = stages_of("wf", "wf")
    config = sized(stages, 2**20, max_model_len=8)
    assert len(config.groups) == 1
    assert [group.layer_names for group in own_groups(config, stages[1]).groups] == [tuple(stages[1])]


def test_layers_of_one_kind_that_differ_in_size_are_refused() -> None:
    first, second = stages_of("ff", "ff")
    second["layers.1.1"] = msgspec.structs.replace(FULL, num_kv_heads=1)
    with pytest.raises(ModelLoadError, match=r"keys and values of 'layers.1.1' and 'layers.0.0' differ in size"):
        largest_stage([first, second])
