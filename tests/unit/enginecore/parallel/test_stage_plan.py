"""Layers dealt out to stages by bytes, or as the settings say."""

import msgspec
import pytest

from penstock_enginecore.config import CacheConfig
from penstock_enginecore.core.kv_cache.sizing import size_kv_cache
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec, block_bytes
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.parallel.stage_plan import deal_layers, largest_stage, largest_states, own_groups
from penstock_enginecore.states.core.spec import StateNeeds


def numbers(layers: list[int], num_stages: int, *, behind: int = 0) -> list[int]:
    dealt = deal_layers("Model", layers, behind=behind, num_stages=num_stages)
    assert [i for own in dealt for i in own] == list(range(len(layers)))
    return [len(own) for own in dealt]


@pytest.mark.parametrize(
    ("layers", "num_stages", "behind", "expected"),
    [
        ([1] * 8, 2, 0, [4, 4]),
        ([1] * 8, 2, 2, [5, 3]),
        ([1] * 7, 3, 0, [2, 2, 3]),
        ([1] * 9, 3, 3, [4, 4, 1]),
        ([1] * 4, 4, 100, [1, 1, 1, 1]),
        ([9, 1, 1, 1], 2, 0, [1, 3]),
        ([1, 1, 1, 9], 3, 0, [1, 2, 1]),
        ([5], 1, 1, [1]),
    ],
)
def test_the_largest_stage_has_as_few_bytes_as_can_be(
    layers: list[int], num_stages: int, behind: int, expected: list[int]
) -> None:
    assert sorted(numbers(layers, num_stages, behind=behind)) == sorted(expected)
    if behind or len(expected) == 2:
        assert numbers(layers, num_stages, behind=behind) == expected


def test_a_deep_model_is_dealt_out_to_many_stages() -> None:
    assert max(numbers([1] * 200, 64)) == 4


def test_stages_may_be_given() -> None:
    dealt = deal_layers("Model", [1] * 6, behind=0, num_stages=3, stage_layers=(1, 3, 2))
    assert dealt == [range(1), range(1, 4), range(4, 6)]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="executor.pipeline_parallel_size is 3, but Model has 2 layers.*at most 2"):
        numbers([1, 1], 3)


def test_numbers_that_do_not_sum_up_are_refused() -> None:
    with pytest.raises(
        ModelLoadError, match=r"executor.stage_layers has a sum of 7, but Model has 6 layers; change .* by 1"
    ):
        deal_layers("Model", [1] * 6, behind=0, num_stages=2, stage_layers=(3, 4))


# Groups of layers that are the same in every stage. Their memory is that of the stage's own layers.

FULL = KVCacheSpec(block_size=4, num_kv_heads=2, head_size=8, head_size_v=8, dtype_size=4)
WINDOW = msgspec.structs.replace(FULL, sliding_window=8)
KINDS = {"f": FULL, "w": WINDOW}


def stages_of(*kinds: str) -> list[dict[str, KVCacheSpec]]:
    """Return the layers' specs of each stage. Each string has an ``f`` or a ``w`` for each layer."""
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


def test_the_state_pool_is_sized_for_the_largest_stage() -> None:
    one = StateNeeds(num_layers=3, slot_bytes=300, row_bytes=10)
    other = StateNeeds(num_layers=1, slot_bytes=400, row_bytes=5)
    assert largest_states([one, None, other]) == StateNeeds(num_layers=3, slot_bytes=400, row_bytes=10)
    assert largest_states([None, None]) is None
