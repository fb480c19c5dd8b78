"""The size of the KV pool, and the longest sequence it serves."""

import logging

import msgspec
import pytest

from penstock_common.config.settings import parse_bytes
from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig
from penstock_enginecore.core.kv_cache.sizing import size_kv_cache
from penstock_enginecore.core.kv_cache.spec import MAX_GROUPS, KVCacheGroup, KVCacheSpec, block_bytes

SPEC = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=8, head_size_v=8, dtype_size=4)
SPECS = {"layer.0": SPEC, "layer.1": SPEC}
BLOCK_BYTES = 2 * 16 * 2 * 16 * 4


def size(available=100 * BLOCK_BYTES, *, specs=SPECS, requested=None, model=4096, in_flight=32, **cache):
    return size_kv_cache(
        specs,
        available,
        CacheConfig(**cache),
        requested_max_model_len=requested,
        model_max_len=model,
        max_tokens_in_flight=in_flight,
    )


def test_all_memory_becomes_blocks_of_one_group_of_all_layers():
    config = size(100 * BLOCK_BYTES + 1)
    assert config.num_blocks == 100
    assert config.block_size == 16
    assert [group.layer_names for group in config.groups] == [("layer.0", "layer.1")]


def test_kv_cache_memory_wins_over_what_is_free():
    assert size(kv_cache_memory=40 * BLOCK_BYTES).num_blocks == 40


def test_num_blocks_fixes_the_pool():
    assert size(num_blocks=7).num_blocks == 7


def test_the_models_length_holds_where_it_fits():
    assert size(model=500).max_model_len == 500


def test_a_default_length_is_lowered_to_fit_the_pool_and_reported(caplog):
    with caplog.at_level(logging.WARNING):
        assert size(11 * BLOCK_BYTES).max_model_len == 160
    assert "from 4096 to 160" in caplog.text


def test_a_requested_length_that_fits_exactly_is_served():
    assert size(11 * BLOCK_BYTES, requested=160).max_model_len == 160


def test_a_requested_length_that_does_not_fit_says_what_to_change_and_that_helps():
    with pytest.raises(
        ConfigError, match=r"max_model_len is 1000, but the KV cache has space for 160 tokens.*to 160"
    ) as e:
        size(11 * BLOCK_BYTES, requested=1000)
    advised = parse_bytes(str(e.value).rsplit(" ", 1)[-1])
    assert size(0, requested=1000, kv_cache_memory=advised).max_model_len == 1000


def test_a_requested_length_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 5000; the model supports at most 4096"):
        size(10_000 * BLOCK_BYTES, requested=5000)


def test_a_length_without_room_for_an_output_token_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 1; it must be at least 2"):
        size(requested=1)


@pytest.mark.parametrize("available", [0, BLOCK_BYTES - 1, 2 * BLOCK_BYTES - 1])
def test_less_than_one_usable_block_says_what_to_change(available):
    with pytest.raises(ConfigError, match=r"set cache.kv_cache_memory to at least 8KiB"):
        size(available)


def with_window(window=None, chunk=None, **sizes):
    return msgspec.structs.replace(SPEC, sliding_window=window, attention_chunk=chunk, **sizes)


def layers(*specs):
    return {f"layer.{i}": spec for i, spec in enumerate(specs)}


def test_each_kind_of_layer_is_a_group_and_groups_share_memory():
    config = size(20 * BLOCK_BYTES, specs=layers(SPEC, with_window(64), SPEC, with_window(64)))
    assert [group.layer_names for group in config.groups] == [("layer.0", "layer.2"), ("layer.1", "layer.3")]
    assert [group.sliding_window for group in config.groups] == [None, 64]
    assert config.num_blocks == 20  # a block has memory for two layers, although the model has four layers


def test_a_windowed_group_holds_the_keys_of_the_tokens_in_flight_and_a_block_more():
    config = size(specs=layers(SPEC, with_window(64)), in_flight=33)
    assert [group.max_blocks for group in config.groups] == [None, 7]


def test_the_longest_sequence_counts_windows_once():
    # 7 of 19 usable blocks hold the window and the tokens in flight.
    assert size(0, specs=layers(SPEC, with_window(64)), in_flight=33, num_blocks=20).max_model_len == 12 * 16


def test_a_model_of_windows_alone_serves_its_own_length_in_a_small_pool():
    assert size(0, specs=layers(with_window(64)), in_flight=33, num_blocks=8).max_model_len == 4096
    assert size(0, specs=layers(with_window(64)), in_flight=33, num_blocks=7).max_model_len == 6 * 16


def test_a_requested_length_with_windows_says_what_to_change_and_that_helps():
    specs = layers(SPEC, with_window(64))
    with pytest.raises(ConfigError, match="the KV cache has space for 48 tokens") as e:
        size(0, specs=specs, requested=1000, num_blocks=8)
    advised = parse_bytes(str(e.value).rsplit(" ", 1)[-1])
    assert size(0, specs=specs, requested=1000, kv_cache_memory=advised).max_model_len == 1000


def test_a_window_that_no_sequence_leaves_is_none():
    assert size(specs=layers(SPEC, with_window(500)), model=500).groups == (
        KVCacheGroup(layer_names=("layer.0", "layer.1")),
    )


def test_chunked_attention_is_a_kind_of_its_own():
    config = size(specs=layers(SPEC, with_window(64), with_window(chunk=64)))
    assert [(group.sliding_window, group.attention_chunk) for group in config.groups] == [
        (None, None),
        (64, None),
        (None, 64),
    ]
    assert config.groups[2].max_blocks == config.groups[1].max_blocks == 7


def test_a_kind_of_many_layers_is_cut_into_groups_as_large_as_the_others():
    config = size(specs=layers(*[with_window(64)] * 20, *[SPEC] * 4))
    assert [(len(group.layer_names), group.sliding_window) for group in config.groups] == [(4, 64)] * 5 + [(4, None)]
    assert {name for group in config.groups for name in group.layer_names} == set(layers(*range(24)))


def test_there_are_never_more_groups_than_a_step_can_bear():
    config = size(specs=layers(*[with_window(64)] * 60, SPEC))
    assert 2 < len(config.groups) <= MAX_GROUPS


def test_memory_that_layers_of_different_heads_share_fits_the_wider():
    wide = with_window(64, num_kv_heads=4)
    config = size(30 * BLOCK_BYTES, specs=layers(SPEC, wide))
    assert len(config.groups) == 2
    assert config.num_blocks == 30  # as wide as two layers of SPEC


def test_layers_too_different_to_share_get_full_allocation():
    huge = with_window(num_kv_heads=200)
    config = size(specs=layers(huge, *[with_window(2048)] * 3), available=10_000 * BLOCK_BYTES)
    assert [len(group.layer_names) for group in config.groups] == [4]
    assert not config.groups[0].is_windowed


def test_layers_of_different_sizes_share_the_pool():
    wide = KVCacheSpec(block_size=16, num_kv_heads=6, head_size=8, head_size_v=8, dtype_size=4)
    assert size(100 * BLOCK_BYTES, specs={"a": SPEC, "b": wide}).num_blocks == 50


def test_different_block_sizes_are_refused():
    other = KVCacheSpec(block_size=32, num_kv_heads=2, head_size=8, head_size_v=8, dtype_size=4)
    with pytest.raises(ConfigError, match=r"have block sizes \[16, 32\]"):
        size(specs={"a": SPEC, "b": other})


def test_layers_of_a_drafter_have_memory_of_their_own_in_every_group():
    window = msgspec.structs.replace(SPEC, sliding_window=32)
    specs = {"layer.0": SPEC, "layer.1": window, "layer.2": SPEC, "draft.layer.0": window}
    cut = {False: ("layer.0", "layer.2"), True: ("layer.1", "draft.layer.0")}
    groups = [
        KVCacheGroup(layer_names=names, sliding_window=32 if windowed else None) for windowed, names in cut.items()
    ]
    # Two tensors of the model, of which the second one has only one layer, and one tensor of the drafter.
    assert block_bytes(specs, groups) == 3 * SPEC.page_size_bytes


# Layers that store only some positions.

CROSS = msgspec.structs.replace(SPEC, end_position=90)
OWN = msgspec.structs.replace(SPEC, first_position=96)
PARTS = {"cross.0": CROSS, "cross.1": CROSS, "own.0": OWN, "own.1": OWN}


def test_layers_with_other_positions_are_groups_of_their_own_and_need_only_the_blocks_they_store():
    config = size(17 * BLOCK_BYTES, specs=PARTS, model=500)
    assert [(group.layer_names, group.first_block, group.end_block) for group in config.groups] == [
        (("cross.0", "cross.1"), 0, 6),
        (("own.0", "own.1"), 6, None),
    ]
    # 6 blocks of sound and 10 blocks of text, and the null block
    assert config.max_model_len == 16 * 16


def test_a_pool_without_room_for_the_shortest_sequence_says_what_to_change():
    sizes = {"requested_max_model_len": None, "model_max_len": 500, "max_tokens_in_flight": 32, "min_model_len": 98}
    with pytest.raises(ConfigError, match=r"no request fits; set cache.kv_cache_memory to at least") as e:
        size_kv_cache(PARTS, 7 * BLOCK_BYTES, CacheConfig(), **sizes)
    advised = parse_bytes(str(e.value).split("at least ")[1].split(",")[0])
    assert size_kv_cache(PARTS, advised, CacheConfig(), **sizes).max_model_len == 7 * 16
