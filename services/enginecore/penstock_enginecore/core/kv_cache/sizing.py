"""How many KV cache blocks an engine gets when it starts, and how long a sequence they can hold."""

import bisect
import logging
from collections.abc import Mapping, Sequence

from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig, SchedulerConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, block_bytes, group_layers

logger = logging.getLogger(__name__)

MIN_MODEL_LEN = 2
"""One prompt token and one output token."""


def size_kv_cache(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    cache: CacheConfig,
    *,
    requested_max_model_len: int | None,
    model_max_len: int,
    max_tokens_in_flight: int,
) -> KVCacheConfig:
    """The pool that fits, and the longest sequence it serves.

    ``max_tokens_in_flight``: tokens that may be scheduled and not yet processed at once, a step's budget times the steps
    in flight. A request keeps the blocks of their windows. Without a requested length, ``max_model_len`` is the model's
    own, lowered to what one sequence alone in the pool can use. Lengths are in tokens. Raises ConfigError with the
    numbers when a requested length, or not even a block, fits.
    """
    pool = _Pool(specs, requested_max_model_len or model_max_len, max_tokens_in_flight)
    num_blocks = cache.num_blocks or (cache.kv_cache_memory or available_bytes) // pool.block_bytes
    fits = pool.longest(num_blocks)
    if fits < MIN_MODEL_LEN:
        raise ConfigError(
            f"the KV cache has room for {num_blocks} blocks of {pool.block_bytes} bytes, one of them reserved; "
            f"set cache.kv_cache_memory to at least {pool.size_for(MIN_MODEL_LEN)}, or free memory for the engine"
        )
    return KVCacheConfig(
        num_blocks=num_blocks,
        block_size=pool.block_size,
        groups=pool.groups,
        max_model_len=_max_model_len(requested_max_model_len, model_max_len, fits, pool),
    )


def num_blocks_for(groups: Sequence[KVCacheGroup], num_blocks: int) -> int:
    """The most blocks, over all groups, that a sequence filling ``num_blocks`` blocks holds at once."""
    return sum(group.num_blocks_for(num_blocks) for group in groups)


class _Pool:
    """A pool whose number of blocks is still open."""

    def __init__(self, specs: Mapping[str, KVCacheSpec], max_len: int, max_tokens_in_flight: int) -> None:
        self.block_size = _common_block_size(specs)
        self.groups = group_layers(specs, max_len=max_len, max_tokens_in_flight=max_tokens_in_flight)
        self.block_bytes = block_bytes(specs, self.groups)
        self._most = -(-max_len // self.block_size)

    def longest(self, num_blocks: int) -> int:
        """Tokens of the longest sequence, in whole blocks and no longer than asked for, beside the null block."""
        lengths = range(self._most + 1)
        count = bisect.bisect_right(lengths, num_blocks - 1, key=lambda n: num_blocks_for(self.groups, n))
        return max(count - 1, 0) * self.block_size

    def size_for(self, num_tokens: int) -> str:
        """Memory that holds a sequence of so many tokens."""
        num_blocks = num_blocks_for(self.groups, -(-num_tokens // self.block_size)) + 1
        return _size(num_blocks * self.block_bytes)


def _common_block_size(specs: Mapping[str, KVCacheSpec]) -> int:
    if not specs:
        raise ConfigError("the model has no attention layer with a KV cache; such models are not supported")
    sizes = {spec.block_size for spec in specs.values()}
    if len(sizes) > 1:
        raise ConfigError(f"layers ask for different block sizes: {sorted(sizes)}; one is supported")
    return sizes.pop()


def _max_model_len(requested: int | None, model_max_len: int, fits: int, pool: _Pool) -> int:
    if requested is None:
        if fits < model_max_len:
            logger.warning(
                "max_model_len lowered from %d to %d tokens, which is what the KV cache holds; "
                "cache.kv_cache_memory of %s would hold the full length",
                model_max_len,
                fits,
                pool.size_for(model_max_len),
            )
        return min(model_max_len, fits)
    if requested > model_max_len:
        raise ConfigError(f"model.max_model_len is {requested}; the model itself allows {model_max_len} tokens")
    if requested < MIN_MODEL_LEN:
        raise ConfigError(f"model.max_model_len is {requested}; it must be at least {MIN_MODEL_LEN}")
    if requested > fits:
        raise ConfigError(
            f"model.max_model_len is {requested}, but the KV cache holds {fits} tokens; lower model.max_model_len to "
            f"{fits} or set cache.kv_cache_memory to at least {pool.size_for(requested)}"
        )
    return requested


def _size(num_bytes: int) -> str:
    """A size that ``penstock_common.config.parse_bytes`` reads, rounded up."""
    unit, name = (2**20, "MiB") if num_bytes >= 2**20 else (2**10, "KiB")
    return f"{-(-num_bytes // unit)}{name}"


# A model that keeps nothing between steps: encoders see a whole prompt at once.


def size_without_kv_cache(
    scheduler: SchedulerConfig, *, requested_max_model_len: int | None, model_max_len: int
) -> KVCacheConfig:
    """A pool that limits nothing: one block holds any request, and there are more blocks than requests may run.

    The blocks are numbers only, no memory stands behind them. A prompt must fit into a step, so ``max_model_len`` is at
    most ``scheduler.max_num_batched_tokens``. Raises ConfigError for a requested length that is longer.
    """
    budget = scheduler.step_tokens
    length = min(model_max_len, budget) if requested_max_model_len is None else requested_max_model_len
    if length > model_max_len:
        raise ConfigError(f"model.max_model_len is {length}; the model itself allows {model_max_len} tokens")
    if length > budget:
        raise ConfigError(
            f"model.max_model_len is {length}; an encoder computes a prompt in one step, so it must be at most "
            f"scheduler.max_num_batched_tokens, {budget}"
        )
    # The watermark keeps up to half of the blocks free, and block 0 is the null block.
    num_blocks = 2 * scheduler.max_num_seqs + 3
    return KVCacheConfig(
        num_blocks=num_blocks, block_size=length, groups=(KVCacheGroup(layer_names=()),), max_model_len=length
    )
