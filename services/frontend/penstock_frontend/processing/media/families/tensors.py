"""Media tensors in the form in which they are sent, and base classes of the processors in media workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from penstock_common.errors import ConfigError
from penstock_common.types.media import DTYPE_BYTES, EMBEDS, TensorData, TensorDtype
from penstock_frontend.processing.media.families.base import ProcessedItem

_DTYPES: Mapping[str, TensorDtype] = {name: name for name in DTYPE_BYTES if name != "bfloat16"}
PIXELS = ("pixel_values", "pixel_values_videos")
_FLOATS: tuple[TensorDtype, ...] = ("float32", "float16", "bfloat16")
_MASKS: tuple[TensorDtype, ...] = ("int64", "int32", "bool", "uint8", "int8")
_TAKEN: Mapping[str, tuple[TensorDtype, ...]] = {
    **dict.fromkeys(PIXELS, ("uint8", *_FLOATS)),
    "input_features": _FLOATS,
    "feature_attention_mask": _MASKS,
    "input_features_mask": _MASKS,
    "pixel_attention_mask": _MASKS,
    "second_per_grid_ts": ("float64", *_FLOATS),
}
"""Accepted dtypes of each tensor, by tensor name. Engines accept the same dtypes."""


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, TensorData]:
    """Convert arrays to tensors. If a processor returns pixels as unscaled floats, the result has bytes instead."""
    tensors = {}
    for name, array in arrays.items():
        if name in PIXELS and array.dtype != np.uint8:
            whole = array.astype(np.uint8)
            if not np.array_equal(whole, array):
                raise ValueError(f"{name} has numbers that are not integers from 0 to 255")
            array = whole
        array = np.ascontiguousarray(array)
        tensors[name] = TensorData(_DTYPES[array.dtype.name], array.shape, array.tobytes())
    return tensors


def to_array(tensor: TensorData) -> npt.NDArray[Any]:
    """Return a view of a tensor's elements as an array. Raises ValueError for a dtype that numpy does not have."""
    if tensor.dtype == "bfloat16":
        raise ValueError("the tensor has the dtype bfloat16, which numpy does not support")
    return np.frombuffer(tensor.data, dtype=np.dtype(tensor.dtype).newbyteorder("<")).reshape(tensor.shape)


def taken(data: Mapping[str, TensorData], name: str, dims: Sequence[int | None]) -> TensorData:
    """Return the tensor with this name after a check. A None in ``dims`` allows any size of this dimension.

    Raises ValueError if the tensor is missing, or has another dtype or other dimensions than expected.
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
    """Return the elements of a small int64 tensor. Raises the errors of ``taken``, and ValueError if the dtype is not
    int64.
    """
    tensor = taken(data, name, dims)
    if tensor.dtype != "int64":
        raise ValueError(f"{name} is {tensor.dtype}; it must be int64")
    return [int(number) for number in to_array(tensor).reshape(-1)]


def num_embeds(data: Mapping[str, TensorData], *, least: int, most: int) -> int:
    """Return the number of embeddings in the tensor ``[rows, width]`` of precomputed embeddings.

    Raises ValueError for other tensors, or if there are too few or too many embeddings.
    """
    check_names(data, (EMBEDS,))
    rows = taken(data, EMBEDS, (None, None)).shape[0]
    if not least <= rows <= most:
        raise ValueError(
            f"{EMBEDS} has {rows} rows; it must have {f'from {least} to {most}' if least < most else most}"
        )
    return rows


def check_names(data: Mapping[str, TensorData], names: Sequence[str]) -> None:
    """Raise ValueError if a tensor is not an input of the model."""
    for name in data:
        if name not in names:
            raise ValueError(f"{name} is not an input of the model; the model accepts {', '.join(names)}")


# The classes below are processors for media workers. This code must not import torch.


class MediaProcessor:
    """Processor that refuses all media. Subclasses override the methods of the modalities that they accept."""

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Raise ValueError, because the model accepts no images."""
        del image, kwargs
        raise ValueError("the model accepts no images")

    def audio(self, samples: npt.NDArray[np.float32], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Raise ValueError, because the model accepts no audio."""
        del samples, kwargs
        raise ValueError("the model accepts no audio")

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Raise ValueError, because the model accepts no video."""
        del frames, timestamps, kwargs
        raise ValueError("the model accepts no video")


class PilImages:
    """Image processor of a checkpoint, from transformers. The processor uses only numpy and Pillow."""

    def __init__(self, folder: Path) -> None:
        """Load the image processor of the checkpoint.

        Raises ConfigError if transformers has no image processor for this checkpoint, or only one that needs
        torchvision.
        """
        # only media workers import this module, because the import takes half a second
        from transformers import AutoImageProcessor

        load: Any = AutoImageProcessor.from_pretrained
        try:
            self._processor = load(str(folder), backend="pil", local_files_only=True)
        except Exception as e:
            # transformers raises ImportError without a backend, OSError without a file, or an error of the processor's
            # class
            raise ConfigError(f"{folder}: its image processor cannot be created with numpy and Pillow: {e}") from e
        if self._processor.backend != "pil":
            name = type(self._processor).__name__
            raise ConfigError(
                f"{folder}: its image processor, {name}, exists only for torchvision, which is not supported"
            )

    def __call__(self, images: Sequence[Image] | Sequence[Sequence[Image]], **kwargs: Any) -> dict[str, TensorData]:
        """Process images, given as one list, or as one list per prompt.

        In the result, pixels are bytes that are neither rescaled nor normalized.
        """
        given = self._processor(
            images=list(images),
            return_tensors="np",
            do_rescale=False,
            do_normalize=False,
            do_convert_rgb=False,
            **kwargs,
        )
        return from_arrays({name: np.asarray(value) for name, value in given.items()})
