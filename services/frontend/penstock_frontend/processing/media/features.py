"""Tensors that clients have processed themselves: what must be so whatever the model is."""

import math
from collections.abc import Mapping

import numpy as np

from penstock_common.errors import quoted
from penstock_common.types.media import DTYPE_BYTES, LARGEST_NUMBER, TensorData
from penstock_frontend.processing.media import refusals

_MAX_TENSORS = 64
_MAX_DIMENSIONS = 8
_BEYOND_IN_BFLOAT16 = 0x4780
"""The bits, without the sign, of the least bfloat16 beyond ``LARGEST_NUMBER``."""


def check_tensors(tensors: Mapping[str, TensorData], *, field: str) -> None:
    """Raise InvalidArgument for too many tensors, for bytes that are not those of the shape, and for numbers that are not finite
    or beyond float16's range. Looks at every number: for a thread, where they are many.
    """
    if not tensors:
        raise refusals.unreadable(field, "has no tensors")
    if len(tensors) > _MAX_TENSORS:
        raise refusals.too_large(field, f"has {len(tensors)} tensors", "the limit", _MAX_TENSORS)
    for name, tensor in tensors.items():
        where = f"{field}.tensors[{name[:64]!r}]"
        if len(tensor.shape) > _MAX_DIMENSIONS or any(length < 0 for length in tensor.shape):
            raise refusals.unreadable(field, f"has a tensor {quoted(name)} of the shape {list(tensor.shape[:16])}")
        needed = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if len(tensor.data) != needed:
            raise refusals.unreadable(
                where,
                f"has {len(tensor.data)} bytes; {tensor.dtype} of the shape {list(tensor.shape)} has {needed}",
            )
        if not needed:
            raise refusals.unreadable(where, "is empty")
        if not _is_in_range(tensor):
            raise refusals.unreadable(where, f"has numbers that are not finite, or beyond {LARGEST_NUMBER}")


def _is_in_range(tensor: TensorData) -> bool:
    if tensor.dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, "<u2")
        return bool(((bits & 0x7FFF) < _BEYOND_IN_BFLOAT16).all())
    if not tensor.dtype.startswith("float"):
        return True
    numbers = np.frombuffer(tensor.data, np.dtype(tensor.dtype).newbyteorder("<"))
    return bool((np.abs(numbers) <= LARGEST_NUMBER).all())
