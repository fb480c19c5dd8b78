"""A model of a quantized checkpoint: its weights dequantized as they are read, or kept in its linear layers and experts."""

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

# Which modules of a model keep quantized weights, and how they come to do so or cease to.

_WEIGHT = ".weight"
_MIXTRAL = (".mlp.", ".block_sparse_moe.")
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What the matrices of one expert are called in files."""
Named = Mapping[str, DequantizedTensor]


@dataclass(frozen=True, slots=True)
class KeptLinear:
    """The weight of the linear layer called ``name``."""

    name: str
    tensor: DequantizedTensor

    @property
    def sources(self) -> Named:
        """Its weight in the files."""
        return {f"{self.name}{_WEIGHT}": self.tensor}

    @property
    def placeholders(self) -> dict[str, torch.Tensor]:
        """In place of the weight, of one number's memory."""
        return {f"{self.name}{_WEIGHT}": self.tensor.placeholder()}

    def make(self, linear: Any) -> torch.nn.Module:
        """What keeps the weight in place of ``linear``. Reads it."""
        return QuantizedLinear(linear, self.tensor.scheme, self.tensor.read())


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """Weights of the experts called ``name``, as their matrices in the files: for ``gate_up`` and ``down`` those of the
    projections, for each of these one per expert, or one of all that is ``merged``.
    """

    name: str
    gate_up: Sequence[Named]
    down: Sequence[Named]
    merged: bool

    @property
    def sources(self) -> Named:
        """Its weights in the files."""
        return {name: tensor for each in (*self.gate_up, *self.down) for name, tensor in each.items()}

    @property
    def placeholders(self) -> dict[str, torch.Tensor]:
        """In place of the weights, of one number's memory each."""
        return {
            f"{self.name}.{GATE_UP}": self._placeholder(self.gate_up),
            f"{self.name}.{DOWN}": self._placeholder(self.down),
        }

    def make(self, experts: Any) -> torch.nn.Module:
        """What keeps the weights in place of ``experts``. Reads them."""
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
    """What of the quantized ``weights`` the modules of ``skeleton`` can keep: linear layers, its head aside, and experts all of
    whose matrices are quantized.
    """
    quantized = {name: tensor for name, tensor in weights.tensors.items() if isinstance(tensor, DequantizedTensor)}
    head = skeleton.get_output_embeddings()
    found: list[Kept] = []
    for name, module in skeleton.named_modules():
        if type(module) is torch.nn.Linear and module is not head and f"{name}{_WEIGHT}" in quantized:
            found.append(KeptLinear(name, quantized[f"{name}{_WEIGHT}"]))
        elif {GATE_UP, DOWN} <= module._parameters.keys():
            found += _experts(name, len(module.get_parameter(DOWN)), quantized)
    return found


def _experts(name: str, count: int, quantized: Named) -> Iterator[KeptExperts]:
    """One, or none."""
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
    """Put ``by`` in place of the module of this ``name`` in ``whole``."""
    parent, _, leaf = name.rpartition(".")
    setattr(whole.get_submodule(parent), leaf, by)


@torch.inference_mode(False)
@torch.no_grad()
def dequantize_kept(whole: torch.nn.Module, dtype: torch.dtype) -> int:
    """Put modules with dense weights in place of all that keep quantized ones, one at a time. Returns how many bytes these
    weights take.
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
