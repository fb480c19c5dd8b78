"""What an engine's configuration leaves to the model."""

import msgspec

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig, SchedulerConfig
from penstock_enginecore.core.model_info import ModelInfo


def settled(config: EngineCoreConfig, model: ModelInfo) -> SchedulerConfig:
    """The scheduler's configuration, with what it leaves to the model filled in."""
    scheduling = config.scheduler
    if scheduling.async_scheduling is None:
        runs_ahead = model.runs_ahead and not config.data_parallel.grouped
        scheduling = msgspec.structs.replace(scheduling, async_scheduling=runs_ahead)
    if scheduling.max_num_batched_tokens is None:
        splits = scheduling.enable_chunked_prefill and model.supports_chunked_prefill
        most = scheduling.step_tokens
        together = (info.max_tokens for info in model.media if info.attends_both_ways)
        tokens = max(model.step_tokens, min(scheduling.max_num_seqs, most), *together) if splits else most
        scheduling = msgspec.structs.replace(scheduling, max_num_batched_tokens=tokens)
    if scheduling.max_prompt_batch_tokens is None:
        scheduling = msgspec.structs.replace(scheduling, max_prompt_batch_tokens=model.prompt_batch_tokens)
    return scheduling


def max_steps_of(config: EngineCoreConfig) -> int:
    """Steps that the executor is given at once: one in each stage, and where tokens are not waited for, one more that the first
    stage need not wait for.
    """
    steps = config.executor.pipeline_parallel_size + bool(config.scheduler.async_scheduling)
    return max(config.executor.max_concurrent_batches, steps)


def check_model(config: EngineCoreConfig, model: ModelInfo) -> None:
    """Raises ConfigError for what the model cannot do."""
    _check_pooling(config, model)
    _check_speculative(config, model)


def _check_pooling(config: EngineCoreConfig, model: ModelInfo) -> None:
    """Raises ConfigError for a model that pools in a group of ranks."""
    if config.data_parallel.grouped and model.pooling is not None:
        raise ConfigError(
            f"data_parallel.size is {config.data_parallel.size} and the model pools; ranks of a group generate"
        )


def _check_speculative(config: EngineCoreConfig, model: ModelInfo) -> None:
    """Raises ConfigError for what cannot be had together with drafts."""
    method, stages = config.speculative.method, config.executor.pipeline_parallel_size
    if not method:
        return
    if model.pooling is not None:
        raise ConfigError(f"speculative.method is {method} and the model pools; only models that generate have drafts")
    if stages > 1:
        raise ConfigError(
            f"speculative.method is {method} and executor.pipeline_parallel_size {stages}; engines with drafts have 1 stage"
        )
