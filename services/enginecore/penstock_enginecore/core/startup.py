"""How much KV cache an engine gets when it starts, and how long a sequence it serves with that."""

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Executor, Progress
from penstock_enginecore.core.kv_cache.no_cache import size_without_kv_cache
from penstock_enginecore.core.kv_cache.sizing import size_kv_cache
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.model_info import ModelInfo


def size_engine(
    config: EngineCoreConfig, executor: Executor, model: ModelInfo, progress: Progress, *, max_steps: int
) -> KVCacheConfig:
    """The KV cache for a model that ``executor`` has loaded, when up to ``max_steps`` steps are in flight.

    Prepares the kernels, and runs the model once. Raises ConfigError with the numbers when what is asked for does not fit.
    """
    progress("preparing the kernels, and a forward pass of one token")
    specs = executor.kv_cache_specs()
    if not specs:
        sized = size_without_kv_cache(
            config.scheduler, requested_max_model_len=config.model.max_model_len, model_max_len=model.max_len
        )
        progress(f"no KV cache; sequences of up to {sized.max_model_len} tokens")
        return sized
    sized = size_kv_cache(
        specs,
        executor.available_kv_cache_memory(),
        config.cache,
        requested_max_model_len=config.model.max_model_len,
        model_max_len=model.max_len,
        max_tokens_in_flight=config.scheduler.step_tokens * max_steps,
    )
    tokens = (sized.num_blocks - 1) * sized.block_size
    groups = len(sized.groups)
    use = f"{tokens} tokens in all" if groups == 1 else f"shared by {groups} groups of layers"
    progress(
        f"KV cache: {sized.num_blocks} blocks of {sized.block_size} tokens, {use}; "
        f"sequences of up to {sized.max_model_len} tokens"
    )
    return sized
