"""Tensors of a processor as they travel."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_common.types.media import DTYPE_BYTES, EMBEDS, TensorData, TensorDtype

_DTYPES: Mapping[str, TensorDtype] = {name: name for name in DTYPE_BYTES if name != "bfloat16"}
PIXELS = ("pixel_values", "pixel_values_videos")
_FLOATS: tuple[TensorDtype, ...] = ("float32", "float16", "bfloat16")
_MASKS: tuple[TensorDtype, ...] = ("int64", "int32", "bool", "uint8", "int8")
_TAKEN: Mapping[str, tuple[TensorDtype, ...]] = {
    **dict.fromkeys(PIXELS, ("uint8", *_FLOATS)),
    "input_features": _FLOATS,
    "feature_attention_mask": _MASKS,
    "pixel_attention_mask": _MASKS,
    "second_per_grid_ts": ("float64", *_FLOATS),
}
"""As engines have it."""


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, TensorData]:
    """The same as tensors. Pixels that a processor keeps as floats, though it neither rescaled nor normalized, become bytes."""
    tensors = {}
    for name, array in arrays.items():
        if name in PIXELS and array.dtype != np.uint8:
            whole = array.astype(np.uint8)
            if not np.array_equal(whole, array):
                raise ValueError(f"{name} has numbers that are no bytes of pixels")
            array = whole
        array = np.ascontiguousarray(array)
        tensors[name] = TensorData(_DTYPES[array.dtype.name], array.shape, array.tobytes())
    return tensors


def to_array(tensor: TensorData) -> npt.NDArray[Any]:
    """A view of a tensor's elements. Raises ValueError for a dtype that numpy has not."""
    if tensor.dtype == "bfloat16":
        raise ValueError("numpy has no bfloat16")
    return np.frombuffer(tensor.data, dtype=np.dtype(tensor.dtype).newbyteorder("<")).reshape(tensor.shape)


def taken(data: Mapping[str, TensorData], name: str, dims: Sequence[int | None]) -> TensorData:
    """The tensor of that name. Raises ValueError where it is missing, or has another dtype or other dimensions than ``dims``;
    None: any size.
    """
    tensor = data.get(name)
    if tensor is None:
        raise ValueError(f"{name} is missing")
    if tensor.dtype not in (known := _TAKEN.get(name, (tensor.dtype,))):
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(known)}")
    fits = len(tensor.shape) == len(dims) and all(
        size is None or size == given for size, given in zip(dims, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in dims)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be [{wanted}]")
    return tensor


def numbers(data: Mapping[str, TensorData], name: str, dims: Sequence[int | None]) -> list[int]:
    """The elements of a small int64 tensor. Raises ValueError as ``taken``, and for another dtype."""
    tensor = taken(data, name, dims)
    if tensor.dtype != "int64":
        raise ValueError(f"{name} is {tensor.dtype}; it must be int64")
    return [int(number) for number in to_array(tensor).reshape(-1)]


def num_embeds(data: Mapping[str, TensorData], *, least: int, most: int) -> int:
    """Rows of what the tower would give, which stands alone, ``[rows, width]``. Raises ValueError for fewer, or more."""
    check_names(data, (EMBEDS,))
    rows = taken(data, EMBEDS, (None, None)).shape[0]
    if not least <= rows <= most:
        raise ValueError(
            f"{EMBEDS} has {rows} rows; it must have {f'from {least} to {most}' if least < most else most}"
        )
    return rows


def check_names(data: Mapping[str, TensorData], names: Sequence[str]) -> None:
    """Raise ValueError for a tensor that the model does not take."""
    for name in data:
        if name not in names:
            raise ValueError(f"{name} is no input of the model; it takes {', '.join(names)}")
