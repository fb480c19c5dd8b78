"""The number of KV cache blocks of an engine, and the longest sequence that fits into them."""

import bisect
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig, SchedulerConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, block_bytes, group_layers
from penstock_enginecore.states.core.sizing import size_states
from penstock_enginecore.states.core.spec import StateNeeds, StatePoolConfig, rows_per_request

logger = logging.getLogger(__name__)

_MAX_BARE_BLOCKS = 2**17
"""Maximum number of blocks of a model without attention, whose blocks have no memory. The number is higher if one
sequence needs more blocks.
"""

MIN_MODEL_LEN = 2
"""Minimum sequence length: one prompt token and one output token."""


class StateDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Recurrent layers of a model, and the number of requests that use their memory at the same time.

    Attributes:
        needs: Memory needs of the recurrent layers.
        max_num_seqs: Maximum number of running requests.
        num_drafts: Maximum number of drafted tokens of a request in a step.
    """

    needs: StateNeeds
    max_num_seqs: int
    num_drafts: int

    def sized(self, available_bytes: int, cache: CacheConfig, token_bytes: int) -> tuple[StatePoolConfig, int]:
        """Call ``size_states`` with these memory needs and numbers of requests and drafts."""
        rows = rows_per_request(self.num_drafts)
        return size_states(
            self.needs,
            available_bytes,
            cache,
            max_num_seqs=self.max_num_seqs,
            rows=rows,
            token_bytes=token_bytes,
        )


def size_kv_cache(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    cache: CacheConfig,
    *,
    requested_max_model_len: int | None,
    model_max_len: int,
    max_tokens_in_flight: int,
    states: StateDemand | None = None,
    min_model_len: int = MIN_MODEL_LEN,
) -> KVCacheConfig:
    """Compute the pool sizes that fit into memory, and the longest sequence.

    If no length is requested, ``max_model_len`` is the model's own maximum length, lowered to the number of tokens that
    the pool can store for a single sequence. Recurrent states get their part of the memory first, and KV blocks get the
    rest. A model without attention gets blocks without memory, which only carry the hashes of prefixes.

    Args:
        specs: KV cache needs of each attention layer, by name.
        available_bytes: Device memory that is available for the KV cache.
        cache: Settings of the KV cache.
        requested_max_model_len: Configured maximum sequence length in tokens, or None.
        model_max_len: The model's own maximum sequence length in tokens.
        max_tokens_in_flight: Maximum number of tokens that are scheduled but not yet processed: the token budget of a
            step times the number of steps in flight. A request keeps the blocks to which these tokens attend.
        states: Memory needs of recurrent layers, or None for a model without them.
        min_model_len: Length in tokens of the shortest sequence that the model can serve.

    Raises:
        ConfigError: A sequence of the requested length, or of the minimum length, does not fit into memory. The message
            gives the sizes.
    """
    pool = _Pool(specs, requested_max_model_len or model_max_len, max_tokens_in_flight, cache.block_size)
    available_bytes = cache.kv_cache_memory or available_bytes
    state_pool = None
    if states is not None:
        pool.least_bytes, pool.left_by_states = (
            available_bytes,
            lambda size: states.sized(size, cache, pool.token_bytes)[1],
        )
        state_pool, available_bytes = states.sized(available_bytes, cache, pool.token_bytes)
    num_blocks = cache.num_blocks or pool.num_blocks_in(available_bytes, states)
    fits = pool.longest(num_blocks)
    if fits < min_model_len:
        raise ConfigError(
            f"the KV cache has only {num_blocks} blocks of {pool.block_bytes} bytes, of which one is reserved, so "
            "no request fits; set "
            f"cache.kv_cache_memory to at least {pool.size_for(min_model_len)}, or free memory for the engine"
        )
    return KVCacheConfig(
        num_blocks=num_blocks,
        block_size=pool.block_size,
        groups=pool.groups,
        max_model_len=_max_model_len(requested_max_model_len, model_max_len, fits, pool),
        states=state_pool,
    )


def num_blocks_for(groups: Sequence[KVCacheGroup], num_blocks: int) -> int:
    """Return the maximum number of blocks, over all groups, that a sequence of ``num_blocks`` blocks uses at the same
    time.
    """
    return sum(group.num_blocks_for(num_blocks) for group in groups)


class _Pool:
    """Sizes of a block pool before its number of blocks is known.

    Attributes:
        least_bytes: Size in bytes at which ``size_for`` begins its search for a sufficient size of cache memory.
        left_by_states: Returns how many bytes recurrent states leave to KV blocks if the cache memory has the given
            size, which is at least ``least_bytes``.
    """

    def __init__(
        self, specs: Mapping[str, KVCacheSpec], max_len: int, max_tokens_in_flight: int, block_size: int
    ) -> None:
        self.block_size = _common_block_size(specs) if specs else block_size
        self.groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(layer_names=()),)
        self.block_bytes = 0
        if specs:
            self.groups = group_layers(specs, max_len=max_len, max_tokens_in_flight=max_tokens_in_flight)
            self.block_bytes = block_bytes(specs, self.groups)
        self._most = -(-max_len // self.block_size)
        self.least_bytes = 0
        self.left_by_states: Callable[[int], int] = lambda size: size

    @property
    def token_bytes(self) -> int:
        """Size in bytes of the keys and values of one token in all layers, or 0 for a model without attention."""
        return self.block_bytes * len(self.groups) // self.block_size

    def num_blocks_in(self, num_bytes: int, states: StateDemand | None) -> int:
        """Return the number of blocks that fit into ``num_bytes`` of memory. If blocks need no memory, return the
        number that all running requests need, at most ``_MAX_BARE_BLOCKS`` or the number that one sequence needs.
        """
        if self.block_bytes:
            return num_bytes // self.block_bytes
        num_requests = 1 if states is None else states.max_num_seqs
        return 1 + max(min(num_requests * self._most, _MAX_BARE_BLOCKS), self._most)

    def longest(self, num_blocks: int) -> int:
        """Return the length in tokens of the longest sequence that fits into a pool of ``num_blocks`` blocks, up to the
        requested length. One of the blocks is the null block.
        """
        lengths = range(self._most + 1)
        count = bisect.bisect_right(lengths, num_blocks - 1, key=lambda n: num_blocks_for(self.groups, n))
        return max(count - 1, 0) * self.block_size

    def size_for(self, num_tokens: int) -> str:
        """Return, as text, the memory size that a sequence of ``num_tokens`` tokens and the recurrent states need
        together.
        """
        num_blocks = num_blocks_for(self.groups, -(-num_tokens // self.block_size)) + 1
        needed = num_blocks * self.block_bytes
        size = _rounded(max(needed, self.least_bytes))
        while (left := self.left_by_states(size)) < needed:
            size = _rounded(size + needed - left)
        return _size(size)


def _common_block_size(specs: Mapping[str, KVCacheSpec]) -> int:
    sizes = {spec.block_size for spec in specs.values()}
    if len(sizes) > 1:
        raise ConfigError(
            f"attention layers have block sizes {sorted(sizes)}, but all layers must have the same block size"
        )
    return sizes.pop()


def _max_model_len(requested: int | None, model_max_len: int, fits: int, pool: _Pool) -> int:
    if requested is None:
        if fits < model_max_len:
            logger.warning(
                "lowered max_model_len from %d to %d tokens, the capacity of the KV cache; the full length needs "
                "cache.kv_cache_memory of %s",
                model_max_len,
                fits,
                pool.size_for(model_max_len),
            )
        return min(model_max_len, fits)
    if requested > model_max_len:
        raise ConfigError(f"model.max_model_len is {requested}; the model supports at most {model_max_len} tokens")
    if requested < MIN_MODEL_LEN:
        raise ConfigError(f"model.max_model_len is {requested}; it must be at least {MIN_MODEL_LEN}")
    if requested > fits:
        raise ConfigError(
            f"model.max_model_len is {requested}, but the KV cache has space for {fits} tokens; lower model.max_model_len to "
            f"{fits} or set cache.kv_cache_memory to at least {pool.size_for(requested)}"
        )
    return requested


def _size(num_bytes: int) -> str:
    """Return the size, rounded up, as text that ``penstock_common.config.parse_bytes`` accepts."""
    unit, name = _unit(num_bytes)
    return f"{_rounded(num_bytes) // unit}{name}"


def _rounded(num_bytes: int) -> int:
    """Return a size in whole units, rounded up."""
    unit, _ = _unit(num_bytes)
    return -(-num_bytes // unit) * unit


def _unit(num_bytes: int) -> tuple[int, str]:
    return (2**20, "MiB") if num_bytes >= 2**20 else (2**10, "KiB")


# Models without a KV cache are encoders. Encoders compute a complete prompt in one step.


def size_without_kv_cache(
    scheduler: SchedulerConfig, *, requested_max_model_len: int | None, model_max_len: int
) -> KVCacheConfig:
    """Return the configuration of a pool that never limits requests. Any request fits into one block, and the pool has
    more blocks than the maximum number of running requests.

    The blocks are only ids and use no memory. A prompt must fit into a step, so ``max_model_len`` is at most
    ``scheduler.max_num_batched_tokens``. Raises ConfigError if ``requested_max_model_len`` is longer than this limit or
    than the model's own limit.
    """
    budget = scheduler.step_tokens
    length = min(model_max_len, budget) if requested_max_model_len is None else requested_max_model_len
    if length > model_max_len:
        raise ConfigError(f"model.max_model_len is {length}; the model supports at most {model_max_len} tokens")
    if length > budget:
        raise ConfigError(
            f"model.max_model_len is {length}; an encoder computes a prompt in one step, so it must be at most "
            f"scheduler.max_num_batched_tokens, {budget}"
        )
    # The scheduler's watermark keeps up to half of the blocks free, and block 0 is the null block.
    num_blocks = 2 * scheduler.max_num_seqs + 3
    return KVCacheConfig(
        num_blocks=num_blocks, block_size=length, groups=(KVCacheGroup(layer_names=()),), max_model_len=length
    )
