"""Sizing of an engine whose model keeps nothing between steps: encoders see a whole prompt at once."""

from penstock_common.errors import ConfigError
from penstock_enginecore.config import SchedulerConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup


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
