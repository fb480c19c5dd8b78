"""Scales of an fp8 KV cache that a checkpoint brings: those that its author has measured."""

import math
import re
from collections.abc import Mapping

from penstock_enginecore.attention.kv_cache import KVScales
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization.weights import StoredTensor

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
