"""Settings that models with recurrent layers do not support yet."""

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.states.core.spec import MAX_DRAFTS


def check_states(config: EngineCoreConfig, model: ModelInfo) -> None:
    """Raise ConfigError, with the setting and a remedy, if the model has recurrent layers and a setting does not work
    with their states.
    """
    if model.states is None:
        return
    cache, transfer, stages = config.cache, config.kv_transfer, config.executor.pipeline_parallel_size
    workers = stages * config.executor.tensor_parallel_size
    drafts = config.speculative.num_speculative_tokens if config.speculative.enabled else 0
    refused = {
        f"cache.host_memory is {cache.host_memory} with {stages} stages": (bool(cache.host_memory) and stages > 1, "0"),
        f"kv_transfer.transport is {transfer.transport!r} with {workers} workers": (
            transfer.enabled and workers > 1,
            "'off'",
        ),
        f"kv_transfer.connector is {transfer.connector!r}": (bool(transfer.connector), "''"),
        f"speculative.num_speculative_tokens is {drafts}": (drafts > MAX_DRAFTS, f"at most {MAX_DRAFTS}"),
    }
    for setting, (conflicts, remedy) in refused.items():
        if conflicts:
            raise ConfigError(f"{setting}, but models with recurrent layers do not support it yet; set it to {remedy}")
