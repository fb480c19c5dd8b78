"""Loading of quantized checkpoints. Weights are dequantized while they are read, or kept in linear layers and experts."""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from penstock_common.memory import in_units
from penstock_enginecore.attention.kv_cache import KVScales
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization.layers import (
    DOWN,
    GATE_UP,
    QuantizedExperts,
    QuantizedLinear,
    QuantizedStack,
    Scheme,
)
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4
from penstock_enginecore.models.quantization.weights import (
    DenseWeights,
    DequantizedTensor,
    StoredTensor,
    dense_weights,
    open_tensors,
)
from penstock_enginecore.models.state_hook import weights_read_directly

# Selection of modules that keep quantized weights, and their replacement.

_WEIGHT = ".weight"
_MIXTRAL = (".mlp.", ".block_sparse_moe.")
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of one expert's matrices in the files."""
Named = Mapping[str, DequantizedTensor]


@dataclass(frozen=True, slots=True)
class KeptLinear:
    """Quantized weight of the linear layer ``name``."""

    name: str
    tensor: DequantizedTensor

    @property
    def sources(self) -> Named:
        """Quantized weights to read from the files: the weight of this layer."""
        return {f"{self.name}{_WEIGHT}": self.tensor}

    @property
    def placeholders(self) -> dict[str, torch.Tensor]:
        """Tensor that replaces the weight during loading and uses the memory of one element."""
        return {f"{self.name}{_WEIGHT}": self.tensor.placeholder()}

    def make(self, linear: Any) -> torch.nn.Module:
        """Read the weight and return a module that replaces ``linear``."""
        return QuantizedLinear(linear, self.tensor.scheme, self.tensor.read())


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """Quantized weights of the experts module ``name``. ``gate_up`` and ``down`` have one entry per projection. An
    entry has the matrices in the files: one matrix for each expert, or a single matrix for all experts if ``merged``.
    """

    name: str
    gate_up: Sequence[Named]
    down: Sequence[Named]
    merged: bool

    @property
    def sources(self) -> Named:
        """Quantized weights to read from the files: the matrices of all experts."""
        return {name: tensor for each in (*self.gate_up, *self.down) for name, tensor in each.items()}

    @property
    def placeholders(self) -> dict[str, torch.Tensor]:
        """Tensors that replace the weights during loading and use the memory of one element each."""
        return {
            f"{self.name}.{GATE_UP}": self._placeholder(self.gate_up),
            f"{self.name}.{DOWN}": self._placeholder(self.down),
        }

    def make(self, experts: Any) -> torch.nn.Module:
        """Read the weights and return a module that replaces ``experts``."""
        return QuantizedExperts(experts, self._stack(self.gate_up), self._stack(self.down))

    def _placeholder(self, projections: Sequence[Named]) -> torch.Tensor:
        firsts = [next(iter(each.values())).placeholder() for each in projections]
        if self.merged:
            return firsts[0]
        rows = sum(len(first) for first in firsts)
        return firsts[0][0, 0].expand(len(projections[0]), rows, firsts[0].shape[1])

    def _stack(self, projections: Sequence[Named]) -> QuantizedStack:
        scheme = next(iter(projections[0].values())).scheme
        return QuantizedStack(scheme, [self._read(each) for each in projections], merged=self.merged)

    def _read(self, projection: Named) -> dict[str, torch.Tensor]:
        read = [tensor.read() for tensor in projection.values()]
        if self.merged:
            return read[0]
        common = [suffix for suffix in read[0] if all(suffix in each for each in read)]
        return {suffix: torch.stack([each[suffix] for each in read]) for suffix in common}


Kept = KeptLinear | KeptExperts


def kept_modules(skeleton: Any, weights: DenseWeights) -> list[Kept]:
    """Return the quantized ``weights`` that modules of ``skeleton`` can keep.

    These are linear layers except the head, and experts if all of their matrices are quantized.
    """
    quantized = {name: tensor for name, tensor in weights.tensors.items() if isinstance(tensor, DequantizedTensor)}
    dense = [skeleton.get_output_embeddings(), *weights_read_directly(skeleton).values()]
    found: list[Kept] = []
    for name, module in skeleton.named_modules():
        if (
            type(module) is torch.nn.Linear
            and all(module is not each for each in dense)
            and f"{name}{_WEIGHT}" in quantized
        ):
            found.append(KeptLinear(name, quantized[f"{name}{_WEIGHT}"]))
        elif {GATE_UP, DOWN} <= module._parameters.keys():
            found += _experts(name, len(module.get_parameter(DOWN)), quantized)
    return found


def _experts(name: str, count: int, quantized: Named) -> Iterator[KeptExperts]:
    """Yield the experts module ``name`` if it can keep its quantized weights."""
    whole = [f"{name}.{GATE_UP}", f"{name}.{DOWN}"]
    if all(each in quantized and isinstance(quantized[each].scheme, Mxfp4) for each in whole):
        first, second = ({each: quantized[each]} for each in whole)
        yield KeptExperts(name, [first], [second], merged=True)
        return
    for base in (name, name.replace(*_MIXTRAL)):
        for projections in _PROJECTIONS:
            names = [[f"{base}.{i}.{each}{_WEIGHT}" for i in range(count)] for each in projections]
            if all(each in quantized for of_all in names for each in of_all):
                *gate_up, down = ({each: quantized[each] for each in of_all} for of_all in names)
                yield KeptExperts(name, gate_up, [down], merged=False)
                return


def replace_module(whole: Any, name: str, by: torch.nn.Module) -> None:
    """Replace the module ``name`` in ``whole`` by ``by``."""
    parent, _, leaf = name.rpartition(".")
    setattr(whole.get_submodule(parent), leaf, by)


@torch.inference_mode(False)
@torch.no_grad()
def dequantize_kept(whole: torch.nn.Module, dtype: torch.dtype) -> int:
    """Replace all modules with quantized weights by modules with dequantized weights, one at a time. Returns the size
    of the dequantized weights in bytes.
    """
    found = [
        (name, module)
        for name, module in whole.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedExperts)
    ]
    num_bytes = 0
    while found:
        name, module = found.pop()
        dense: Any = module.dense(dtype)
        replace_module(whole, name, dense)
        weights = (
            [dense.weight]
            if isinstance(module, QuantizedLinear)
            else [getattr(dense, each) for each in (GATE_UP, DOWN)]
        )
        num_bytes += sum(weight.numel() * weight.element_size() for weight in weights)
    return num_bytes


# Scales for an fp8 KV cache that the checkpoint's author measured and stored in the checkpoint.

_KEY = (".k_proj.k_scale", ".k_scale")
_VALUE = (".v_proj.v_scale", ".v_scale")
_BOTH = (".kv_scale",)
SUFFIXES = (*_KEY, *_VALUE, *_BOTH)
"""Suffixes of the tensors' names after the attention layer's name, in the formats of compressed-tensors, ModelOpt and
AutoFP8.
"""
_IN_A_WHOLE = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?")
"""Prefix of the names of a text model's tensors in a multimodal checkpoint, if the text model has a separate prefix."""
_PLAIN = frozenset({"F16", "BF16", "F32"})


def read_kv_scales(stored: Mapping[str, StoredTensor]) -> dict[str, KVScales]:
    """Return the KV cache scales by attention layer name. Raises ModelLoadError if a layer has a scale for only its
    keys or only its values, and for scales that are not one number above 0.
    """
    keys, values = _found(stored, _KEY + _BOTH), _found(stored, _VALUE + _BOTH)
    if alone := sorted(keys.keys() ^ values.keys()):
        raise ModelLoadError(
            f"{alone[0]} has an fp8 KV cache scale for only its keys or only its values; both are needed"
        )
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
        raise ModelLoadError(f"{name} is {dtype} {shape}; a scale of the KV cache must be one number per layer")
    number = float(tensor[...].float().reshape(()))
    if not (number > 0 and math.isfinite(number)):
        raise ModelLoadError(f"{name} is {number}; a scale of the KV cache must be a number above 0")
    return number


logger = logging.getLogger(__name__)

_OF_ACTIVATIONS = (".input_scale", ".act_scale", ".activation_scale", ".output_scale", ".q_scale", ".prob_scale")
"""Suffixes of the names of activation scales, in the formats of compressed-tensors and vLLM, AutoFP8 and transformers.
Also contains the suffixes of scales for the inputs and outputs of attention.
"""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """Quantized checkpoint: the files in ``directory``, the quantization ``scheme``, and the class and configuration of
    the model.
    """

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    directory: Path
    scheme: Scheme


def load_quantized(found: QuantizedCheckpoint, dense: torch.dtype, *, keep: bool, **options: Any) -> Any:
    """Return the model and the loading report of ``from_pretrained``, with the same names and merged tensors as if the
    files were not quantized.

    transformers reads one weight at a time, and renames, merges and casts as usual. A warning reports the memory of
    dequantized weights.

    Args:
        found: The checkpoint.
        dense: The dtype of dequantized weights.
        keep: Whether linear layers and experts keep quantized weights and become ``QuantizedLinear`` and
            ``QuantizedExperts``.
        options: Arguments of ``from_pretrained``.

    Raises:
        ModelLoadError: The checkpoint cannot be loaded.
    """
    found.config.__dict__.pop("quantization_config", None)
    with open_tensors(found.directory) as every:
        if unused := sum(name.endswith(_OF_ACTIVATIONS) for name in every):
            logger.info("ignoring %d activation scales, because the engine computes the scales of activations", unused)
        weights = dense_weights(without_scales(every), found.scheme, dense)
        kept = kept_modules(_skeleton(found), weights) if keep else []
        _tell(found.scheme, weights, kept, dense)
        loaded = _make(found, weights, kept, options)
        if not all(_is_placeholder(loaded[0], name) for each in kept for name in each.placeholders):
            # transformers converts the weights of this class from the layout in the files, and can convert only
            # dequantized weights.
            kept = []
            _tell(found.scheme, weights, kept, dense)
            loaded = _make(found, weights, kept, options)
        for each in kept:
            replace_module(loaded[0], each.name, each.make(loaded[0].get_submodule(each.name)))
    _read_generation_config(loaded[0], found.directory)
    return loaded


def without_scales(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors that belong to weights, without scales of activations and of the KV cache."""
    return {name: tensor for name, tensor in stored.items() if not name.endswith(SUFFIXES + _OF_ACTIVATIONS)}


def _skeleton(found: QuantizedCheckpoint) -> Any:
    """Return the model on the meta device, without memory for its weights."""
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
    """Return whether a weight is still the one-element placeholder that was passed to transformers."""
    return set(module.get_parameter(name).stride()) == {0}


def _tell(scheme: Scheme, weights: DenseWeights, kept: Sequence[Kept], dtype: torch.dtype) -> None:
    tensors = [tensor for each in kept for tensor in each.sources.values()]
    stored = weights.quantized_bytes - sum(tensor.stored_bytes for tensor in tensors)
    dense = weights.dense_bytes - sum(prod(tensor.shape) * dtype.itemsize for tensor in tensors)
    if kept:
        linears = sum(isinstance(each, KeptLinear) for each in kept)
        experts = f" and the experts of {len(kept) - linears} layers" if len(kept) > linears else ""
        logger.info("%d linear layers%s keep their quantized weights (%s)", linears, experts, scheme.name)
    if stored:
        logger.warning(
            "quantized weights of the checkpoint (%s) are dequantized at load: %s in the files become %s in memory, "
            "as %s",
            scheme.name,
            in_units(stored),
            in_units(dense),
            str(dtype).removeprefix("torch."),
        )


def _read_generation_config(module: Any, directory: Path) -> None:
    """Read the generation config, because transformers reads it only if it gets the directory of the checkpoint."""
    if module.can_generate() and (directory / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(directory)
