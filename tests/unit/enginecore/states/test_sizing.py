"""Size of the state pool: running requests, kept states and KV blocks share the memory in proportion."""

import re
from typing import Any

import msgspec
import pytest

from penstock_common.config.settings import parse_bytes
from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig
from penstock_enginecore.core.kv_cache.sizing import StateDemand, size_kv_cache
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.states.core.sizing import interval_of, size_states
from penstock_enginecore.states.core.spec import (
    SPAN,
    StateNeeds,
    StatePoolConfig,
    StateSpec,
    rows_per_request,
    span_start,
)

SLOT, ROW, TOKEN = 10_000, 100, 40
NEEDS = StateNeeds(num_layers=3, slot_bytes=SLOT, row_bytes=ROW)
REQUEST = 2 * SLOT + SPAN * ROW


def size(
    available: int, *, max_num_seqs: int = 4, rows: int = SPAN, token_bytes: int = TOKEN, **cache: Any
) -> tuple[StatePoolConfig, int]:
    settings = CacheConfig(**{"block_size": SPAN} | cache)
    return size_states(NEEDS, available, settings, max_num_seqs=max_num_seqs, rows=rows, token_bytes=token_bytes)


def kept(config: StatePoolConfig) -> int:
    """Return the number of slots besides the zero slot and those of requests."""
    return config.num_slots - 1 - 2 * config.num_requests


# Running requests.


def test_every_request_gets_two_slots_and_its_rows_if_a_quarter_of_the_memory_is_enough() -> None:
    config, _ = size(16 * REQUEST)
    assert config.num_requests == 4
    assert config.rows_per_request == SPAN


def test_running_requests_get_no_more_than_a_quarter_of_the_memory() -> None:
    assert size(16 * REQUEST - 1)[0].num_requests == 3
    assert size(4 * 100 * REQUEST, max_num_seqs=1000)[0].num_requests == 100


def test_rings_for_drafts_take_memory_of_requests() -> None:
    assert size(16 * REQUEST, rows=2 * SPAN)[0].num_requests == 3
    assert (rows_per_request(0), rows_per_request(1), rows_per_request(15)) == (SPAN, 2 * SPAN, 2 * SPAN)


def test_there_is_room_for_one_request_although_it_takes_more_than_a_quarter() -> None:
    assert size(4 * (2 * SLOT + REQUEST), max_num_seqs=1)[0].num_requests == 1


# Kept states and KV blocks.


def test_kept_states_and_blocks_fill_up_together() -> None:
    config, left = size(100 * REQUEST)
    tokens = left // TOKEN
    assert abs(tokens / config.interval - kept(config)) < 2


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_of_kept_states_is_that_of_the_setting(share: float) -> None:
    available = 400 * REQUEST
    config, left = size(available, state_share=share)
    rest = available - config.num_requests * REQUEST - SLOT
    assert kept(config) * SLOT / rest == pytest.approx(share, abs=0.02)
    assert left == rest - kept(config) * SLOT


def test_all_memory_is_used_once() -> None:
    for available in (4 * (2 * SLOT + REQUEST), 20 * REQUEST, 1000 * REQUEST + 7):
        config, left = size(available)
        used = config.num_slots * SLOT + config.num_requests * SPAN * ROW
        assert 0 <= left == available - used


def test_an_explicit_interval_is_used_as_it_is_and_the_share_remains() -> None:
    config, _ = size(400 * REQUEST, state_interval=32, state_share=0.25)
    assert config.interval == 32
    rest = 400 * REQUEST - config.num_requests * REQUEST - SLOT
    assert kept(config) == int(rest * 0.25) // SLOT


def test_a_small_share_still_keeps_one_state() -> None:
    config, left = size(4 * (2 * SLOT + REQUEST), state_interval=16, state_share=0.01)
    assert kept(config) == 1
    assert left > 0


def test_the_number_of_kept_states_has_a_limit() -> None:
    tiny = StateNeeds(num_layers=1, slot_bytes=8, row_bytes=1)
    config, left = size_states(tiny, 2**30, CacheConfig(), max_num_seqs=4, rows=SPAN, token_bytes=1)
    assert kept(config) == 2**17
    assert left == 2**30 - config.num_slots * 8 - config.num_requests * SPAN


# The interval.


@pytest.mark.parametrize(
    ("slot_bytes", "token_bytes", "share", "interval"),
    [
        (10_000, 40, 0.5, 256),
        (10_240, 40, 0.5, 256),
        (10_241, 40, 0.5, 272),
        (10_000, 40, 0.2, 1008),
        (10_000, 40, 0.8, 64),
        (1, 40, 0.5, 16),
        (641, 40, 0.5, 32),
    ],
)
def test_the_interval_is_bytes_of_a_slot_over_bytes_of_a_token_in_whole_blocks_rounded_up(
    slot_bytes: int, token_bytes: int, share: float, interval: int
) -> None:
    needs = StateNeeds(num_layers=1, slot_bytes=slot_bytes, row_bytes=1)
    assert interval_of(needs, token_bytes, share) == interval


def test_the_interval_follows_from_the_shapes_of_layers() -> None:
    heads = StateSpec(
        channels=6144, kernel=4, input_size=2, num_heads=16, num_key_heads=16, key_size=128, value_size=128
    )
    needs = StateNeeds(num_layers=18, slot_bytes=18 * heads.slot_bytes, row_bytes=18 * heads.row_bytes)
    token_bytes = 6 * 2 * 2 * 256 * 2
    assert heads.slot_bytes == 16 * 128 * 128 * 4 + 6144 * 3 * 2
    assert interval_of(needs, token_bytes, 0.5) == 1600


# Models without attention.


def test_without_attention_all_memory_besides_requests_is_for_kept_states() -> None:
    config, left = size(400 * REQUEST, token_bytes=0)
    assert config.interval == 1024
    assert kept(config) == (400 * REQUEST - config.num_requests * REQUEST - SLOT) // SLOT
    assert left < SLOT


def test_without_attention_an_explicit_interval_changes_no_sizes() -> None:
    config, left = size(400 * REQUEST, token_bytes=0, state_interval=48)
    default, default_left = size(400 * REQUEST, token_bytes=0)
    assert (msgspec.structs.replace(config, interval=1024), left) == (default, default_left)


# Errors.


def test_too_little_memory_is_refused_with_the_bytes_that_would_do_and_these_do() -> None:
    with pytest.raises(ConfigError, match=r"the cache has 1000 bytes; a model with 3 recurrent layers") as e:
        size(1000)
    found = re.search(r"needs at least (\d+) bytes for one request", str(e.value))
    assert found is not None
    least = int(found[1])
    assert "cache.kv_cache_memory" in str(e.value)
    config, left = size(least)
    assert (config.num_requests, kept(config) >= 1, left > 0) == (1, True, True)
    with pytest.raises(ConfigError):
        size(least - 1)


def test_other_block_sizes_than_a_span_are_refused_with_the_one_that_works() -> None:
    with pytest.raises(
        ConfigError, match=r"cache\.block_size is 32; a model with recurrent layers needs a block size of 16"
    ):
        size(100 * REQUEST, block_size=32)


@pytest.mark.parametrize("interval", [0, 8, 20, -16])
def test_an_interval_that_is_not_in_whole_blocks_is_refused(interval: int) -> None:
    with pytest.raises(ConfigError, match=r"cache\.state_interval"):
        CacheConfig(state_interval=interval)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_that_leaves_nothing_for_one_side_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"cache\.state_share"):
        CacheConfig(state_share=share)


# The whole cache.

SPEC = KVCacheSpec(block_size=SPAN, num_kv_heads=1, head_size=5, head_size_v=5, dtype_size=2)


def size_whole(
    available: int,
    specs: dict[str, KVCacheSpec],
    *,
    num_drafts: int = 0,
    requested: int | None = None,
    **cache: Any,
) -> KVCacheConfig:
    return size_kv_cache(
        specs,
        available,
        CacheConfig(**{"block_size": SPAN} | cache),
        requested_max_model_len=requested,
        model_max_len=100_000,
        max_tokens_in_flight=32,
        states=StateDemand(needs=NEEDS, max_num_seqs=4, num_drafts=num_drafts),
    )


def test_blocks_get_the_memory_that_states_leave() -> None:
    config = size_whole(100 * REQUEST, {"a": SPEC, "b": SPEC})
    states, left = size(100 * REQUEST)
    assert config.states == states
    assert config.num_blocks == left // (2 * SPAN * 10 * 2)


def test_the_size_that_is_configured_counts_for_states_as_well() -> None:
    config = size_whole(1, {"a": SPEC, "b": SPEC}, kv_cache_memory=100 * REQUEST)
    assert config.states == size(100 * REQUEST)[0]


def test_drafts_double_the_rings() -> None:
    config = size_whole(100 * REQUEST, {"a": SPEC, "b": SPEC}, num_drafts=1)
    assert config.states is not None
    assert config.states.rows_per_request == 2 * SPAN


def test_a_model_without_attention_has_blocks_without_memory_for_every_running_request() -> None:
    config = size_whole(100 * REQUEST, {})
    assert config.block_size == SPAN
    assert [group.layer_names for group in config.groups] == [()]
    assert config.max_model_len == 100_000
    assert config.num_blocks == 1 + 4 * -(-100_000 // SPAN)


@pytest.mark.parametrize("head_size", [2**14, 50_000])
def test_memory_for_states_but_not_for_two_tokens_is_refused_with_the_size_that_would_do(head_size: int) -> None:
    specs = {"a": msgspec.structs.replace(SPEC, head_size=head_size, head_size_v=head_size)}
    with pytest.raises(ConfigError, match=r"set cache\.kv_cache_memory to at least (\S+), or free") as e:
        size_whole(4 * (2 * SLOT + REQUEST), specs)
    assert size_whole(size_in(e.value), specs).max_model_len >= 2


@pytest.mark.parametrize("length", [2000, 3333, 100_000])
def test_a_length_that_does_not_fit_is_refused_with_the_size_that_would_do(length: int) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is .* to at least (\S+)$") as e:
        size_whole(4 * (2 * SLOT + REQUEST), {"a": SPEC, "b": SPEC}, requested=length)
    config = size_whole(size_in(e.value), {"a": SPEC, "b": SPEC}, requested=length)
    assert config.max_model_len == length


def size_in(error: ConfigError) -> int:
    """Return the size of memory that an error asks for."""
    found = re.search(r"to at least (\S+?)(,|$)", str(error))
    assert found is not None
    return parse_bytes(found[1])


def test_positions_belong_to_the_span_that_begins_at_or_before_them() -> None:
    assert [span_start(position) for position in (0, 15, 16, 31, 32)] == [0, 0, 16, 16, 32]
