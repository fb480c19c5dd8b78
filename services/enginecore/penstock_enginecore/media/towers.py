"""Weights of a model's vision and audio encoders. When the engine sleeps, the engine frees these weights together with
the model's other weights.
"""

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.forward.modules import copy_weights, module_bytes, module_tensors
from penstock_enginecore.models.multimodal.base import MediaEncoder


class Towers:
    """Vision and audio encoder modules of a model. There are no modules if ``encoder`` is None."""

    def __init__(self, encoder: MediaEncoder | None) -> None:
        self._modules = [] if encoder is None else list(encoder.modules)

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the encoders' parameters."""
        return sum(map(module_bytes, self._modules))

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of the encoders, in a fixed order."""
        return [tensor for module in self._modules for tensor in module_tensors(module)]

    def read(self, others: "Towers") -> None:
        """Copy the weights of ``others`` into these encoders. ``others`` must come from the same checkpoint. Raises
        RuntimeError if shapes differ.
        """
        copy_weights(others.weights(), self.weights())

    def to(self, device: torch.device) -> None:
        for module in self._modules:
            module.to(device)


def check_towers(config: EngineCoreConfig, encoder: MediaEncoder | None) -> None:
    """Raise ConfigError if the model has vision or audio encoders and the configuration does not support them."""
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
            f"{way}, which is not supported for a model that accepts {modalities}; set multimodal.enabled "
            "to false to serve only text"
        )
