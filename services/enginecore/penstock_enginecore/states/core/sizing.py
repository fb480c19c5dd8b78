"""Size of the state pool. States of running requests get memory first. Kept states and KV blocks share the rest in a
fixed proportion.
"""

import math
from fractions import Fraction

from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig
from penstock_enginecore.states.core.spec import SLOTS_PER_REQUEST, SPAN, StateNeeds, StatePoolConfig

_REQUESTS_SHARE = 4
"""Inverse of the maximum share of memory that states of running requests get: 4 means a quarter."""
_INTERVAL_WITHOUT_KEYS = 1024
"""Number of tokens between kept states for models without attention. Such models have no KV blocks that would determine
the interval.
"""
_MIN_KEPT = 1
_MAX_KEPT = 2**17
"""Maximum number of kept states. Without the limit, models with very small states would have millions of kept
states.
"""


def size_states(
    needs: StateNeeds,
    available_bytes: int,
    cache: CacheConfig,
    *,
    max_num_seqs: int,
    rows: int,
    token_bytes: int,
) -> tuple[StatePoolConfig, int]:
    """Return the size of the state pool, and the number of bytes that are left for KV blocks.

    Two slots and the open rows (stored inputs of recent tokens) of each running request get memory first, at most a
    quarter. Kept states get the share ``cache.state_share`` of the rest. If a state is smaller than the keys and values
    of a span of 16 tokens, kept states get less.

    Args:
        needs: Memory needs of the model's states.
        available_bytes: Memory for states and KV blocks.
        cache: Settings of the cache.
        max_num_seqs: Maximum number of running requests.
        rows: Number of positions in a request's ring of open rows.
        token_bytes: Size in bytes of the keys and values of one token, or 0 for a model without attention.

    Raises:
        ConfigError: The memory is too small for one request and one kept state. The message gives the needed size.
    """
    if cache.block_size != SPAN:
        raise ConfigError(
            f"cache.block_size is {cache.block_size}; a model with recurrent layers needs a block size of {SPAN}, "
            "the distance between its states in tokens"
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
    """Return the share of a tier's space, in host memory or on disk, that stores recurrent states. The rest of the
    space stores KV blocks.

    States and KV blocks share a tier in the same proportion as the memory on the device. If ``cache.state_interval`` is
    set, states get the share ``cache.state_share``. Otherwise states get the share with which the spaces for states and
    for KV blocks fill at the same rate.

    Args:
        cache: Settings of the cache.
        slot_bytes: Size of one state in bytes.
        token_bytes: Size in bytes of the keys and values of one token, or 0 for a model without attention.
        interval: Number of tokens between kept states of a sequence.
    """
    if not token_bytes:
        return Fraction(1)
    if cache.state_interval:
        return Fraction(cache.state_share).limit_denominator(1000)
    return Fraction(slot_bytes, slot_bytes + interval * token_bytes)


def interval_of(needs: StateNeeds, token_bytes: int, share: float) -> int:
    """Return the number of tokens between kept states with which the spaces for kept states and for KV blocks fill at
    the same rate. The number is a multiple of the block size.
    """
    if not token_bytes:
        return _INTERVAL_WITHOUT_KEYS
    tokens = needs.slot_bytes * (1 - share) / (share * token_bytes)
    return max(math.ceil(tokens / SPAN) * SPAN, SPAN)
