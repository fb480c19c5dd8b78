"""Tensors of a quantized checkpoint by the names of the dense model. The tensors are dequantized when they are read."""

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
    """Tensor of a file, read by ``tensor[...]``."""

    def get_shape(self) -> list[int]:
        """Return the sizes of the dimensions."""

    def get_dtype(self) -> str:
        """Return the dtype's name in safetensors."""

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
        """Bytes of the weight's parts in the files."""
        return sum(stored_bytes(part) for part in self._parts.values())

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the weight, or a part of it, in the model's dtype. Raises ModelLoadError."""
        try:
            whole = self._scheme.dequantize(self.read(), self._dtype)
        except ValueError as e:
            raise self._wrong(e) from e
        return whole[index]

    def read(self) -> dict[str, torch.Tensor]:
        """Return the stored parts, by suffix."""
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
        tensors: Tensors by the names of the model's class.
        quantized_bytes: Bytes of quantized weights in the files.
        dense_bytes: Bytes of these weights in memory after dequantization.
    """

    tensors: dict[str, StoredTensor | DequantizedTensor]
    quantized_bytes: int
    dense_bytes: int


def dense_weights(stored: Mapping[str, StoredTensor], scheme: Scheme, dtype: torch.dtype) -> DenseWeights:
    """Return the weights in ``stored``, each in ``dtype``.

    Raises ModelLoadError, with the tensor's name, if parts are missing or do not fit, and for 8-bit floats that do not
    belong to ``scheme``.
    """
    found = dict(_quantized(stored, scheme, dtype))
    used = {scheme_part for _, names in found.values() for scheme_part in names}
    plain = {name: tensor for name, tensor in stored.items() if name not in used}
    for name, tensor in plain.items():
        if tensor.get_dtype().startswith("F8"):
            raise ModelLoadError(
                f"{name} is {tensor.get_dtype()}, which {scheme.name} weights do not use; served: {_PLAIN}"
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
    """Yield each quantized weight's dense name, the weight, and the names of its parts."""
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
    """Return the bytes of a tensor in its file."""
    return prod(tensor.get_shape()) * _BYTES.get(tensor.get_dtype(), 1)


@contextmanager
def open_tensors(directory: Path) -> Iterator[dict[str, StoredTensor]]:
    """Return a context with the readable tensors of the checkpoint in ``directory``. Raises ModelLoadError."""
    with ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {}
        for file in _files(directory):
            opened: Any = stack.enter_context(safe_open(file, framework="pt"))
            tensors.update((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 - not a mapping
        yield tensors


def _files(directory: Path) -> list[Path]:
    """Return the weight files, by the index if there is one. Other files may contain the same weights again."""
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
