"""Check for settings that models with recurrent layers do not support yet."""

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
    transfer = config.kv_transfer
    drafts = config.speculative.num_speculative_tokens if config.speculative.enabled else 0
    refused = {
        f"kv_transfer.connector is {transfer.connector!r}": (bool(transfer.connector), "''"),
        f"speculative.num_speculative_tokens is {drafts}": (drafts > MAX_DRAFTS, f"at most {MAX_DRAFTS}"),
    }
    for setting, (conflicts, remedy) in refused.items():
        if conflicts:
            raise ConfigError(f"{setting}, but models with recurrent layers do not support it yet; set it to {remedy}")
