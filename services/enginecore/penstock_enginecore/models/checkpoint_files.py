"""The files of a checkpoint, before anything of them is loaded: where they are, and whether their tensors have the shapes that
config.json says.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from penstock_common.checkpoint import WEIGHT_FILES
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization.weights import open_tensors


def weight_files(config: ModelConfig) -> Path:
    """The directory of the weights; those of a hub id are downloaded."""
    directory = Path(config.path).expanduser()
    if directory.is_dir():
        return directory
    patterns = ["*.json", WEIGHT_FILES[0]]
    return Path(
        huggingface_hub.snapshot_download(config.path, revision=config.revision or None, allow_patterns=patterns)
    )


def check_shapes(directory: Path, make: Callable[[], PreTrainedModel], where: str) -> None:
    """Raise ModelLoadError for a tensor of the files that has another shape than the model's parameter of that name. Tensors that
    transformers renames or converts are not compared here, but after they are loaded. ``make``: makes the model, on the meta
    device.
    """
    if not any(directory.glob("*.safetensors")):
        return
    with torch.device("meta"):
        model = make()
    converted = _converted(get_model_conversion_mapping(model))
    parameters = {name: list(value.shape) for name, value in model.state_dict().items() if not converted(name)}
    with open_tensors(directory) as stored:
        for name, wanted in parameters.items():
            if name in stored and (found := list(stored[name].get_shape())) != wanted:
                raise ModelLoadError(mismatch(where, name, found, wanted))


def mismatch(where: str, name: str, found: Iterable[int], wanted: Iterable[int]) -> str:
    """What is said of a tensor of another shape than the model's."""
    return (
        f"{where}: tensor {name} has shape {list(found)} in the files, and by config.json {list(wanted)}; the files do not "
        "belong to this configuration: take both from the same version of the checkpoint"
    )


def _converted(transforms: Iterable[Any]) -> Callable[[str], bool]:
    """Whether transformers may make the parameter of that name of tensors of other shapes."""
    ends = {
        pattern.rstrip("$").rsplit(".", 1)[-1].rstrip("\\")
        for transform in transforms
        if isinstance(transform, WeightConverter)
        for pattern in transform.target_patterns
    }
    return lambda name: any(end in name for end in ends)
