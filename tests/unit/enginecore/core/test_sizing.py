"""The size of the KV pool, and the longest sequence it serves."""

import logging

import pytest

from penstock_common.config import parse_bytes
from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig
from penstock_enginecore.core.kv_cache.sizing import size_kv_cache
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec

SPEC = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=8, head_size_v=8, dtype_size=4)
SPECS = {"layer.0": SPEC, "layer.1": SPEC}
BLOCK_BYTES = 2 * 16 * 2 * 16 * 4


def size(available=100 * BLOCK_BYTES, *, specs=SPECS, requested=None, model=4096, **cache):
    return size_kv_cache(specs, available, CacheConfig(**cache), requested_max_model_len=requested, model_max_len=model)


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


def test_an_unrequested_length_is_lowered_to_what_fits_beside_the_null_block_and_reported(caplog):
    with caplog.at_level(logging.WARNING):
        assert size(11 * BLOCK_BYTES).max_model_len == 160
    assert "from 4096 to 160" in caplog.text


def test_a_requested_length_that_fits_exactly_is_served():
    assert size(11 * BLOCK_BYTES, requested=160).max_model_len == 160


def test_a_requested_length_that_does_not_fit_says_what_to_change_and_that_helps():
    with pytest.raises(ConfigError, match=r"max_model_len is 1000, but the KV cache holds 160 tokens.*to 160") as e:
        size(11 * BLOCK_BYTES, requested=1000)
    advised = parse_bytes(str(e.value).rsplit(" ", 1)[-1])
    assert size(0, requested=1000, kv_cache_memory=advised).max_model_len == 1000


def test_a_requested_length_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 5000; the model itself allows 4096"):
        size(10_000 * BLOCK_BYTES, requested=5000)


def test_a_length_without_room_for_an_output_token_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 1; it must be at least 2"):
        size(requested=1)


@pytest.mark.parametrize("available", [0, BLOCK_BYTES - 1, 2 * BLOCK_BYTES - 1])
def test_less_than_one_usable_block_says_what_to_change(available):
    with pytest.raises(ConfigError, match=r"set cache.kv_cache_memory to at least 8KiB"):
        size(available)


def test_sliding_window_layers_get_full_allocation():
    window = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=8, head_size_v=8, dtype_size=4, sliding_window=64)
    config = size(specs={"a": SPEC, "b": window})
    assert config.num_blocks == 100
    assert config.groups[0].sliding_window is None


def test_layers_of_different_sizes_share_the_pool():
    wide = KVCacheSpec(block_size=16, num_kv_heads=6, head_size=8, head_size_v=8, dtype_size=4)
    assert size(100 * BLOCK_BYTES, specs={"a": SPEC, "b": wide}).num_blocks == 50


def test_different_block_sizes_are_refused():
    other = KVCacheSpec(block_size=32, num_kv_heads=2, head_size=8, head_size_v=8, dtype_size=4)
    with pytest.raises(ConfigError, match=r"different block sizes: \[16, 32\]"):
        size(specs={"a": SPEC, "b": other})


def test_a_model_without_kv_cache_is_refused():
    with pytest.raises(ConfigError, match="no attention layer"):
        size(specs={})
