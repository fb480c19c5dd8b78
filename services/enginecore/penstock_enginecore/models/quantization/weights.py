"""Tensors of a quantized checkpoint, with the names that they have in the model without quantization. The tensors are
dequantized when they are read.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import safe_open

from penstock_common.files import MAX_INDEX_BYTES, read_json
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization.layers import Scheme

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8}
_PLAIN = "BF16, F16, F32"


class StoredTensor(Protocol):
    """Tensor in a file. The expression ``tensor[...]`` reads the tensor."""

    def get_shape(self) -> list[int]:
        """Return the size of each dimension."""

    def get_dtype(self) -> str:
        """Return the name of the dtype, as in safetensors files."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the tensor, or a part of it."""


class DequantizedTensor:
    """Quantized weight that is read and dequantized in every access. An access needs a little more memory than the
    dense weight.
    """

    def __init__(self, name: str, scheme: Scheme, parts: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
        self._name = name
        self._scheme = scheme
        self._parts = parts
        self._dtype = dtype
        try:
            self.shape = scheme.dense_shape({suffix: tuple(part.get_shape()) for suffix, part in parts.items()})
        except ValueError as e:
            raise self._wrong(e) from e

    @property
    def stored_bytes(self) -> int:
        """Size of the weight's parts in the files, in bytes."""
        return sum(stored_bytes(part) for part in self._parts.values())

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the dequantized weight, or a slice of it, in the model's dtype. Raises ModelLoadError if the stored
        tensors do not fit the quantization scheme.
        """
        try:
            whole = self._scheme.dequantize(self.read(), self._dtype)
        except ValueError as e:
            raise self._wrong(e) from e
        return whole[index]

    def read(self) -> dict[str, torch.Tensor]:
        """Read and return the weight's parts, without dequantizing them, by suffix."""
        return {suffix: part[...] for suffix, part in self._parts.items()}

    @property
    def scheme(self) -> Scheme:
        """The quantization scheme."""
        return self._scheme

    def placeholder(self) -> torch.Tensor:
        """Return a tensor of the weight's shape and dtype that uses the memory of one element."""
        return torch.zeros((), dtype=self._dtype).expand(self.shape)

    def _wrong(self, error: ValueError) -> ModelLoadError:
        return ModelLoadError(f"the weight {self._name} is not a valid {self._scheme.name} weight: {error}")


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Weights of a checkpoint.

    Attributes:
        tensors: Tensors by the names that the model's class uses.
        quantized_bytes: Size of the quantized weights in the files, in bytes.
        dense_bytes: Size of these weights in memory after dequantization, in bytes.
    """

    tensors: dict[str, StoredTensor | DequantizedTensor]
    quantized_bytes: int
    dense_bytes: int


def dense_weights(stored: Mapping[str, StoredTensor], scheme: Scheme, dtype: torch.dtype) -> DenseWeights:
    """Return the weights in ``stored``, each in ``dtype``. Raises ModelLoadError, with the tensor's name, if parts of a
    quantized weight are missing or do not fit, and for 8-bit floats that do not belong to a weight in ``scheme``.
    """
    found = dict(_quantized(stored, scheme, dtype))
    used = {scheme_part for _, names in found.values() for scheme_part in names}
    plain = {name: tensor for name, tensor in stored.items() if name not in used}
    for name, tensor in plain.items():
        if tensor.get_dtype().startswith("F8"):
            raise ModelLoadError(
                f"{name} is {tensor.get_dtype()}, which {scheme.name} weights do not use; supported: {_PLAIN}"
            )
    weights = {name: weight for name, (weight, _) in found.items()}
    return DenseWeights(
        {**plain, **weights},
        sum(weight.stored_bytes for weight in weights.values()),
        sum(prod(weight.shape) for weight in weights.values()) * dtype.itemsize,
    )


def _quantized(
    stored: Mapping[str, StoredTensor], scheme: Scheme, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[DequantizedTensor, list[str]]]]:
    """Yield, for each quantized weight: its name without quantization, the weight, and the names of its parts."""
    first = scheme.parts[0]
    for name, tensor in stored.items():
        if not name.endswith(first.suffix) or tensor.get_dtype() not in first.dtypes:
            continue
        base = name.removesuffix(first.suffix)
        parts = {part.suffix: stored[base + part.suffix] for part in scheme.parts if base + part.suffix in stored}
        for part in scheme.parts:
            if part.required and part.suffix not in parts:
                raise ModelLoadError(f"{name} is {scheme.name}, but there is no {base}{part.suffix}")
            if part.suffix in parts and (dtype_found := parts[part.suffix].get_dtype()) not in part.dtypes:
                wanted = " or ".join(sorted(part.dtypes))
                raise ModelLoadError(f"{base}{part.suffix} is {dtype_found}; in {scheme.name} it must be {wanted}")
        dense = base + scheme.dense
        yield dense, (DequantizedTensor(dense, scheme, parts, dtype), [base + suffix for suffix in parts])


def stored_bytes(tensor: StoredTensor) -> int:
    """Return the size of a tensor in its file, in bytes."""
    return prod(tensor.get_shape()) * _BYTES.get(tensor.get_dtype(), 1)


@contextmanager
def open_tensors(directory: Path) -> Iterator[dict[str, StoredTensor]]:
    """Return a context with the tensors of the checkpoint in ``directory``, which can be read inside the context.
    Raises ModelLoadError.
    """
    with ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {}
        for file in _files(directory):
            opened: Any = stack.enter_context(safe_open(file, framework="pt"))
            tensors.update((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 - not a mapping
        yield tensors


def _files(directory: Path) -> list[Path]:
    """Return the weight files. If there is an index, these are the files that the index names, because other files may
    contain the same weights again.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            content = msgspec.convert(read_json(index, MAX_INDEX_BYTES), _Index)
        except (OSError, ValueError) as e:
            raise ModelLoadError(f"{index} cannot be read: {e}") from e
        return sorted({directory / name for name in content.weight_map.values()})
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise ModelLoadError(
            f"{str(directory)!r} has no *.safetensors; quantized weights in other formats are not supported"
        )
    return found


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
