"""Size of the state pool: running requests first, then kept states and KV blocks in proportion."""

import math
from fractions import Fraction

from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig
from penstock_enginecore.states.core.spec import SLOTS_PER_REQUEST, SPAN, StateNeeds, StatePoolConfig

_REQUESTS_SHARE = 4
"""Running requests get at most one part in this many of the memory."""
_INTERVAL_WITHOUT_KEYS = 1024
"""Tokens between kept states of models without attention, whose tokens take no other memory."""
_MIN_KEPT = 1
_MAX_KEPT = 2**17
"""Maximum number of kept states. Models with very small states would have millions."""


def size_states(
    needs: StateNeeds,
    available_bytes: int,
    cache: CacheConfig,
    *,
    max_num_seqs: int,
    rows: int,
    token_bytes: int,
) -> tuple[StatePoolConfig, int]:
    """Return the size of the state pool, and the bytes that are left for KV blocks.

    Two slots and the open rows of each running request come first, with at most a quarter of the memory.
    ``cache.state_share`` of the rest holds kept states. States that are smaller than the keys of a span get less.

    Args:
        needs: Memory needs of the model's states.
        available_bytes: Memory for states and KV blocks.
        cache: Settings of the cache.
        max_num_seqs: Maximum number of running requests.
        rows: Positions of a request's ring of open rows.
        token_bytes: Bytes of keys and values of one token, or 0 for a model without attention.

    Raises:
        ConfigError: Not even one request and one kept state fit. The message has the bytes.
    """
    if cache.block_size != SPAN:
        raise ConfigError(
            f"cache.block_size is {cache.block_size}; a model with recurrent states needs {SPAN}, the distance between "
            "its states"
        )
    request_bytes = needs.request_bytes(rows)
    least = (1 + _MIN_KEPT) * needs.slot_bytes + request_bytes
    if available_bytes < _REQUESTS_SHARE * least:
        raise ConfigError(
            f"the cache has {available_bytes} bytes; a model with {needs.num_layers} recurrent layers needs at least "
            f"{_REQUESTS_SHARE * least} bytes for one request; set cache.kv_cache_memory to at least that, or free memory "
            "for the engine"
        )
    num_requests = max(min(max_num_seqs, available_bytes // _REQUESTS_SHARE // request_bytes), 1)
    rest = available_bytes - num_requests * request_bytes - needs.slot_bytes
    interval = cache.state_interval or interval_of(needs, token_bytes, cache.state_share)
    if cache.state_interval and token_bytes:
        kept = int(rest * cache.state_share) // needs.slot_bytes
    else:
        kept = rest // (needs.slot_bytes + interval * token_bytes)
    kept = min(max(kept, _MIN_KEPT), _MAX_KEPT)
    config = StatePoolConfig(
        num_slots=1 + SLOTS_PER_REQUEST * num_requests + kept,
        num_requests=num_requests,
        rows_per_request=rows,
        interval=interval,
    )
    return config, rest - kept * needs.slot_bytes


def tier_share_of_states(cache: CacheConfig, *, slot_bytes: int, token_bytes: int, interval: int) -> Fraction:
    """Return the share of a tier in host memory or on disk that holds states. The rest holds KV blocks.

    States and KV blocks share a tier as they share the memory on the device: kept states get ``cache.state_share`` if
    ``cache.state_interval`` is set. Otherwise they get the share with which both fill at the same rate.

    Args:
        cache: Settings of the cache.
        slot_bytes: Bytes of one state.
        token_bytes: Bytes of keys and values of one token, or 0 for a model without attention.
        interval: Tokens between kept states.
    """
    if not token_bytes:
        return Fraction(1)
    if cache.state_interval:
        return Fraction(cache.state_share).limit_denominator(1000)
    return Fraction(slot_bytes, slot_bytes + interval * token_bytes)


def interval_of(needs: StateNeeds, token_bytes: int, share: float) -> int:
    """Return the tokens between kept states, in whole blocks, that fill kept states and KV blocks at the same rate."""
    if not token_bytes:
        return _INTERVAL_WITHOUT_KEYS
    tokens = needs.slot_bytes * (1 - share) / (share * token_bytes)
    return max(math.ceil(tokens / SPAN) * SPAN, SPAN)
