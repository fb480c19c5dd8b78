"""Letting go of a model's weights, and reading them again."""

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model

logger = logging.getLogger(__name__)


def drop_weights(module: PreTrainedModel) -> None:
    """Free the parameters' memory. Shapes, dtypes, ties and buffers stay."""
    empty: dict[int, torch.nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            meta = empty.setdefault(id(parameter), torch.nn.Parameter(parameter.to("meta"), requires_grad=False))
            setattr(owner, name, meta)


def reload_weights(model: LoadedModel, config: ModelConfig, device: torch.device) -> None:
    """Read the checkpoint again and give ``model`` its parameters. Raises ModelLoadError."""
    fresh = load_model(config, device, logger.info).module
    parameters = dict(fresh.named_parameters(remove_duplicate=False))
    for path, owner in model.module.named_modules():
        for name, _ in list(owner.named_parameters(recurse=False)):
            key = f"{path}.{name}" if path else name
            if key not in parameters:
                raise ModelLoadError(f"the checkpoint of {config.path!r} has changed: it has no {key} any more")
            replacement: Any = parameters[key]
            setattr(owner, name, replacement)
