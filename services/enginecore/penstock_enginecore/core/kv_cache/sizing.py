"""How many KV cache blocks there are, and how long a sequence they can hold."""

import logging
from collections.abc import Mapping

from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec

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
) -> KVCacheConfig:
    """The pool that fits, and the longest sequence it serves.

    All layers form one group; sliding-window layers get full allocation and mask the window in attention. Without a
    requested length, ``max_model_len`` is the model's own, lowered to what one sequence alone in the pool can use.
    Lengths are in tokens. Raises ConfigError with the numbers when a requested length, or not even a block, fits.
    """
    block_size = _common_block_size(specs)
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())
    num_blocks = cache.num_blocks or (cache.kv_cache_memory or available_bytes) // block_bytes
    fits = max(num_blocks - 1, 0) * block_size  # block 0 is the null block
    if fits < MIN_MODEL_LEN:
        raise ConfigError(
            f"the KV cache has room for {num_blocks} blocks of {block_bytes} bytes, one of them reserved; "
            f"set cache.kv_cache_memory to at least {_size(2 * block_bytes)}, or free memory for the engine"
        )
    return KVCacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        groups=(KVCacheGroup(layer_names=tuple(specs)),),
        max_model_len=_max_model_len(requested_max_model_len, model_max_len, fits, block_size, block_bytes),
    )


def _common_block_size(specs: Mapping[str, KVCacheSpec]) -> int:
    if not specs:
        raise ConfigError("the model has no attention layer with a KV cache; such models are not supported")
    sizes = {spec.block_size for spec in specs.values()}
    if len(sizes) > 1:
        raise ConfigError(f"layers ask for different block sizes: {sorted(sizes)}; one is supported")
    return sizes.pop()


def _max_model_len(requested: int | None, model_max_len: int, fits: int, block_size: int, block_bytes: int) -> int:
    if requested is None:
        if fits < model_max_len:
            logger.warning(
                "max_model_len lowered from %d to %d tokens, which is what the KV cache holds; "
                "cache.kv_cache_memory of %s would hold the full length",
                model_max_len,
                fits,
                _size(_bytes_for(model_max_len, block_size, block_bytes)),
            )
        return min(model_max_len, fits)
    if requested > model_max_len:
        raise ConfigError(f"model.max_model_len is {requested}; the model itself allows {model_max_len} tokens")
    if requested < MIN_MODEL_LEN:
        raise ConfigError(f"model.max_model_len is {requested}; it must be at least {MIN_MODEL_LEN}")
    if requested > fits:
        raise ConfigError(
            f"model.max_model_len is {requested}, but the KV cache holds {fits} tokens; lower model.max_model_len to "
            f"{fits} or set cache.kv_cache_memory to at least {_size(_bytes_for(requested, block_size, block_bytes))}"
        )
    return requested


def _bytes_for(num_tokens: int, block_size: int, block_bytes: int) -> int:
    return (-(-num_tokens // block_size) + 1) * block_bytes


def _size(num_bytes: int) -> str:
    """A size that ``penstock_common.config.parse_bytes`` reads, rounded up."""
    unit, name = (2**20, "MiB") if num_bytes >= 2**20 else (2**10, "KiB")
    return f"{-(-num_bytes // unit)}{name}"
