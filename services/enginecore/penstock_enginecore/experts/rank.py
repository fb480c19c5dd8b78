"""A rank of the group that experts are spread over, as it is known before a model is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PretrainedConfig, PreTrainedModel

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig, ExpertParallelConfig
from penstock_enginecore.experts.loading import ExpertShare
from penstock_enginecore.experts.placement import Placement, fewest_slots


@dataclass(frozen=True, slots=True)
class ExpertRank:
    """Makes a rank's share of a model: ``place`` says where experts are, of numbers of layers and of experts."""

    rank: int
    place: Callable[[int, int], Placement]
    dispatch: str = ExpertParallelConfig().dispatch

    @classmethod
    def of(cls, rank: int, size: int, config: ExpertParallelConfig) -> "ExpertRank":
        """With experts in turn on ``size`` ranks."""
        return cls(rank, partial(_even, size, config.slots), config.dispatch)

    def __call__(self, model_class: type[PreTrainedModel], config: PretrainedConfig) -> ExpertShare:
        """Raises ModelLoadError for a model whose experts cannot be spread, ConfigError for sizes that do not fit it."""
        return ExpertShare(model_class, config, self.rank, self.place)


def _even(size: int, slots: int, num_layers: int, num_experts: int) -> Placement:
    return Placement.even(num_layers, num_experts, size, slots or fewest_slots(num_experts, size))


def check_spread(config: EngineCoreConfig, device: torch.device, task: str) -> None:
    """Raise ConfigError for an engine whose experts are not spread yet."""
    if device.type != "cpu":
        raise ConfigError(f"expert_parallel: model.device is {device.type}; experts are spread over CPUs only yet")
    if task != "generate":
        raise ConfigError(f"expert_parallel: models that {task} are not spread yet")
    if config.executor.num_workers > 1:
        raise ConfigError(f"expert_parallel: ranks of {config.executor.num_workers} workers are not served yet; use 1")
