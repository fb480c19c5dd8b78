"""An engine whose experts are shared with other ranks: what it has room for, as its model is loaded."""

import torch
from transformers import PretrainedConfig, PreTrainedModel

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.experts.loading import ExpertShare
from penstock_enginecore.experts.placement import check_slots, fewest_slots


class SharedModel:
    """Makes a rank's share of the model that is loaded, and keeps it."""

    def __init__(self, config: EngineCoreConfig) -> None:
        self._config = config
        self._share: ExpertShare | None = None

    @property
    def share(self) -> ExpertShare:
        """RuntimeError before the model was loaded."""
        if self._share is None:
            raise RuntimeError("no model was loaded with this")
        return self._share

    def __call__(self, model_class: type[PreTrainedModel], config: PretrainedConfig) -> ExpertShare:
        """Raises ModelLoadError for a model whose experts cannot be spread, ConfigError for sizes that do not fit it."""
        self._share = ExpertShare(model_class, config, self._slots)
        return self._share

    def _slots(self, num_experts: int) -> int:
        """The smallest group has to hold all."""
        sizes, slots = self._config.data_parallel, self._config.expert_parallel.slots
        if sizes.size > num_experts:
            raise ConfigError(
                f"data_parallel.size is {sizes.size}; the model's {num_experts} experts go to at most as many ranks"
            )
        slots = slots or fewest_slots(num_experts, sizes.min_size)
        check_slots(num_experts, sizes.min_size, slots)
        return slots


def check_shared(config: EngineCoreConfig, device: torch.device, task: str) -> None:
    """Raise ConfigError for an engine whose experts are not shared yet."""
    if device.type != "cpu":
        raise ConfigError(
            f"expert_parallel.enabled is true and model.device {device.type!r}; experts are shared by CPUs alone yet"
        )
    if task != "generate":
        raise ConfigError(f"expert_parallel.enabled is true and the model is to {task}; such models are not shared yet")
    if config.executor.resolved_kind != "uniproc":
        raise ConfigError(
            f"expert_parallel.enabled is true and executor.kind {config.executor.kind!r}; ranks that share experts have 'uniproc'"
        )
