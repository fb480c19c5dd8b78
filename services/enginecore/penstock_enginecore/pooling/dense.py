"""The linear layers that some embedding models put after pooling."""

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.pooling.config import DenseConfig


@dataclass(frozen=True, slots=True)
class Dense:
    """``linear`` and the activation behind it, in float32."""

    linear: torch.nn.Linear
    activation: torch.nn.Module

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        output: torch.Tensor = self.activation(self.linear(vectors))
        return output


def load_dense(config: DenseConfig, device: torch.device) -> Dense:
    """Read a layer's weights. Raises ModelLoadError."""
    try:
        weights = _read(config)
        with torch.device(device):
            linear = torch.nn.Linear(config.in_features, config.out_features, bias=config.bias)
        linear.load_state_dict({name.removeprefix("linear."): tensor.float() for name, tensor in weights.items()})
    except (OSError, RuntimeError, SafetensorError) as e:
        raise ModelLoadError(f"{config.directory}: the weights of Dense cannot be read: {e}") from e
    return Dense(linear.requires_grad_(False), getattr(torch.nn, config.activation)())


def _read(config: DenseConfig) -> dict[str, torch.Tensor]:
    file = config.directory / "model.safetensors"
    if file.is_file():
        return load_file(file)
    weights: dict[str, torch.Tensor] = torch.load(config.directory / "pytorch_model.bin", weights_only=True)
    return weights
