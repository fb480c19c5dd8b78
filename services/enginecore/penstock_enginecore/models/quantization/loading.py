"""A model of a quantized checkpoint: its weights dequantized as they are read, or kept in its linear layers and experts."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from penstock_common.memory import in_units
from penstock_enginecore.attention.kv_cache import KVScales
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization.kept import Kept, KeptLinear, kept_modules, replace_module
from penstock_enginecore.models.quantization.scheme import Scheme
from penstock_enginecore.models.quantization.weights import DenseWeights, StoredTensor, dense_weights, open_tensors

# Scales of an fp8 KV cache that a checkpoint brings: those that its author has measured.

_KEY = (".k_proj.k_scale", ".k_scale")
_VALUE = (".v_proj.v_scale", ".v_scale")
_BOTH = (".kv_scale",)
SUFFIXES = (*_KEY, *_VALUE, *_BOTH)
"""Of the tensors' names, behind that of an attention layer: compressed-tensors', ModelOpt's and AutoFP8's."""
_IN_A_WHOLE = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?")
"""How a text model's names begin in a checkpoint with towers, where it has names of its own."""
_PLAIN = frozenset({"F16", "BF16", "F32"})


def read_kv_scales(stored: Mapping[str, StoredTensor]) -> dict[str, KVScales]:
    """By the name of the attention layer. ModelLoadError for a layer that has a scale of its keys or values alone, and for scales
    that are not one number above 0 each.
    """
    keys, values = _found(stored, _KEY + _BOTH), _found(stored, _VALUE + _BOTH)
    if alone := sorted(keys.keys() ^ values.keys()):
        raise ModelLoadError(f"{alone[0]} has a scale of its keys or of its values in an fp8 KV cache, and not of both")
    return {layer: KVScales(keys[layer], values[layer]) for layer in keys}


def _found(stored: Mapping[str, StoredTensor], suffixes: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for name, tensor in stored.items():
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix is not None:
            found[_IN_A_WHOLE.sub("model.", name.removesuffix(suffix))] = _number(name, tensor)
    return found


def _number(name: str, tensor: StoredTensor) -> float:
    shape, dtype = tensor.get_shape(), tensor.get_dtype()
    if math.prod(shape) != 1 or dtype not in _PLAIN:
        raise ModelLoadError(f"{name} is {dtype} {shape}; served as a scale of the KV cache: one number of a layer")
    number = float(tensor[...].float().reshape(()))
    if not (number > 0 and math.isfinite(number)):
        raise ModelLoadError(f"{name} is {number}; a scale of the KV cache must be a number above 0")
    return number


logger = logging.getLogger(__name__)

_OF_ACTIVATIONS = (".input_scale", ".act_scale", ".activation_scale", ".output_scale", ".q_scale", ".prob_scale")
"""Suffixes of scales that activations were to be divided by: compressed-tensors' and vLLM's, AutoFP8's, transformers'; and those
of what attention reads and puts out."""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The files in ``directory``, quantized by ``scheme``, of a model of ``model_class`` and ``config``."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    directory: Path
    scheme: Scheme


def load_quantized(found: QuantizedCheckpoint, dense: torch.dtype, *, keep: bool, **options: Any) -> Any:
    """What ``from_pretrained`` of the model's class makes of the files with ``options``, as if these had never been quantized:
    it reads a weight at a time, and renames, merges and casts as ever. If ``keep``, linear layers and experts keep their weights
    as they are, and become ``QuantizedLinear`` and ``QuantizedExperts``; others become ``dense``. Warns of the memory that takes.
    Raises ModelLoadError.
    """
    found.config.__dict__.pop("quantization_config", None)
    with open_tensors(found.directory) as every:
        stored = {name: tensor for name, tensor in every.items() if not name.endswith(SUFFIXES + _OF_ACTIVATIONS)}
        if unused := sum(name.endswith(_OF_ACTIVATIONS) for name in every):
            logger.info("%d scales of activations are not used: activations are not quantized", unused)
        weights = dense_weights(stored, found.scheme, dense)
        kept = kept_modules(_skeleton(found), weights) if keep else []
        _tell(found.scheme, weights, kept, dense)
        loaded = _make(found, weights, kept, options)
        if not all(_is_placeholder(loaded[0], name) for each in kept for name in each.placeholders):
            # transformers has weights of this class in another form than the files, into which only dense ones can be brought.
            kept = []
            _tell(found.scheme, weights, kept, dense)
            loaded = _make(found, weights, kept, options)
        for each in kept:
            replace_module(loaded[0], each.name, each.make(loaded[0].get_submodule(each.name)))
    _read_generation_config(loaded[0], found.directory)
    return loaded


def _skeleton(found: QuantizedCheckpoint) -> Any:
    """The model without memory."""
    make: Any = found.model_class
    with torch.device("meta"):
        return make._from_config(found.config)


def _make(found: QuantizedCheckpoint, weights: DenseWeights, kept: Sequence[Kept], options: dict[str, Any]) -> Any:
    state: dict[str, Any] = dict(weights.tensors)
    for each in kept:
        for name in each.sources:
            del state[name]
        state.update(each.placeholders)
    make: Any = found.model_class.from_pretrained
    return make(None, config=found.config, state_dict=state, output_loading_info=True, **options)


def _is_placeholder(module: Any, name: str) -> bool:
    """Whether a weight came as it was given."""
    return set(module.get_parameter(name).stride()) == {0}


def _tell(scheme: Scheme, weights: DenseWeights, kept: Sequence[Kept], dtype: torch.dtype) -> None:
    tensors = [tensor for each in kept for tensor in each.sources.values()]
    stored = weights.quantized_bytes - sum(tensor.stored_bytes for tensor in tensors)
    dense = weights.dense_bytes - sum(prod(tensor.shape) * dtype.itemsize for tensor in tensors)
    if kept:
        linears = sum(isinstance(each, KeptLinear) for each in kept)
        experts = f" and the experts of {len(kept) - linears}" if len(kept) > linears else ""
        logger.info("%d linear layers%s keep their quantized weights (%s)", linears, experts, scheme.name)
    if stored:
        logger.warning(
            "the checkpoint's weights are quantized (%s) and are dequantized at load: %s of them take %s of memory as %s",
            scheme.name,
            in_units(stored),
            in_units(dense),
            str(dtype).removeprefix("torch."),
        )


def _read_generation_config(module: Any, directory: Path) -> None:
    """Which transformers reads where it has the directory."""
    if module.can_generate() and (directory / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(directory)
