"""A model of a quantized checkpoint, its weights dequantized as they are read."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from penstock_common.memory import in_units
from penstock_enginecore.models.quantization.scheme import Scheme
from penstock_enginecore.models.quantization.weights import dense_weights, open_tensors

logger = logging.getLogger(__name__)


def load_dequantized(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    directory: Path,
    scheme: Scheme,
    dtype: torch.dtype,
    **options: Any,
) -> Any:
    """What ``from_pretrained`` of ``model_class`` makes of ``config`` and the files in ``directory`` with ``options``, as if
    these had never been quantized by ``scheme``: it reads a weight at a time, and renames, merges and casts as ever. Warns of the
    memory that takes. Raises ModelLoadError.
    """
    del config.quantization_config
    with open_tensors(directory) as stored:
        weights = dense_weights(stored, scheme, dtype)
        logger.warning(
            "the checkpoint's weights are quantized (%s) and are dequantized at load: %s of them take %s of memory as %s",
            scheme.name,
            in_units(weights.quantized_bytes),
            in_units(weights.dense_bytes),
            str(dtype).removeprefix("torch."),
        )
        make: Any = model_class.from_pretrained
        loaded = make(None, config=config, state_dict=weights.tensors, dtype=dtype, output_loading_info=True, **options)
    _read_generation_config(loaded[0], directory)
    return loaded


def _read_generation_config(module: Any, directory: Path) -> None:
    """Which transformers reads where it has the directory."""
    if module.can_generate() and (directory / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(directory)
