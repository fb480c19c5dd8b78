"""The weights of a model's towers, which sleep with those of the model."""

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.forward.modules import copy_weights, module_bytes, module_tensors
from penstock_enginecore.models.multimodal.base import MediaEncoder


class Towers:
    """Of ``encoder``; None: there are none, and every answer is that of nothing."""

    def __init__(self, encoder: MediaEncoder | None) -> None:
        self._modules = [] if encoder is None else list(encoder.modules)

    @property
    def weight_bytes(self) -> int:
        """Of their parameters."""
        return sum(map(module_bytes, self._modules))

    def weights(self) -> list[torch.Tensor]:
        """Parameters and buffers, in an order of the model's."""
        return [tensor for module in self._modules for tensor in module_tensors(module)]

    def read(self, others: "Towers") -> None:
        """Copy the weights of ``others``, those of the same checkpoint. RuntimeError where they differ in shape."""
        copy_weights(others.weights(), self.weights())

    def to(self, device: torch.device) -> None:
        for module in self._modules:
            module.to(device)


def check_towers(config: EngineCoreConfig, encoder: MediaEncoder | None) -> None:
    """Raise ConfigError for a model with towers that is to be served in a way in which their rows do not go yet."""
    if encoder is None:
        return
    executor = config.executor
    way = ""
    if executor.pipeline_parallel_size > 1:
        way = f"executor.pipeline_parallel_size is {executor.pipeline_parallel_size}"
    elif config.expert_parallel.enabled:
        way = "expert_parallel.enabled is true"
    if way:
        modalities = ", ".join(info.modality for info in encoder.media)
        raise ConfigError(
            f"{way}, and the model takes {modalities}, which is not served so yet; set multimodal.enabled to false to serve text "
            "alone"
        )
