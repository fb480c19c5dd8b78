"""Media to messages of ``penstock.common.v1`` and back: tensors of any kind, and what is taken of each modality."""

from collections.abc import Iterable
from math import prod

from penstock.common.v1 import media_pb2, tensor_pb2
from penstock_common.errors import InvalidArgument, quoted
from penstock_common.rpc.outputs import Place, TakeShared, TakeTensor, payload, set_payload
from penstock_common.types.media import DTYPE_BYTES, MODALITIES, MediaLimits, Modality, TensorData, TensorDtype

MAX_DIMENSIONS = 8
"""Of a tensor."""
_DTYPES: dict[int, TensorDtype] = {
    tensor_pb2.DATA_TYPE_FLOAT32: "float32",
    tensor_pb2.DATA_TYPE_FLOAT16: "float16",
    tensor_pb2.DATA_TYPE_BFLOAT16: "bfloat16",
    tensor_pb2.DATA_TYPE_FLOAT64: "float64",
    tensor_pb2.DATA_TYPE_INT8: "int8",
    tensor_pb2.DATA_TYPE_UINT8: "uint8",
    tensor_pb2.DATA_TYPE_INT32: "int32",
    tensor_pb2.DATA_TYPE_INT64: "int64",
    tensor_pb2.DATA_TYPE_BOOL: "bool",
}
_NUMBERS = {name: tensor_pb2.DataType.ValueType(number) for number, name in _DTYPES.items()}
_MODALITIES: dict[str, Modality] = {modality: modality for modality in MODALITIES}


def modality_from_proto(text: str, *, path: str) -> Modality:
    """The modality of that name. Raises InvalidArgument."""
    known = _MODALITIES.get(text)
    if known is None:
        raise InvalidArgument(f"{path} is {quoted(text)}; known: {', '.join(MODALITIES)}", field=path)
    return known


def tensor_from_proto(
    message: tensor_pb2.Tensor, *, path: str, take: TakeTensor | None = None, shared: TakeShared | None = None
) -> TensorData:
    """The tensor. ``take`` gives what came in chunks, ``shared`` what lies in shared memory. Raises InvalidArgument for an
    unknown type, more than ``MAX_DIMENSIONS`` dimensions, or bytes that are not as many as its shape says; Unimplemented for
    elements that are elsewhere; and what ``take`` and ``shared`` raise.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidArgument(
            f"{path}.dtype is {message.dtype}; known: {', '.join(_DTYPES.values())}", field=f"{path}.dtype"
        )
    if len(message.shape) > MAX_DIMENSIONS:
        raise InvalidArgument(
            f"{path}.shape has {len(message.shape)} dimensions; the limit is {MAX_DIMENSIONS}", field=f"{path}.shape"
        )
    data = payload(message, take, path=path, element_bytes=DTYPE_BYTES[dtype], shared=shared)
    return TensorData(dtype=dtype, shape=tuple(message.shape), data=data)


def tensor_to_proto(tensor: TensorData, place: Place | None = None) -> tensor_pb2.Tensor:
    """The message of a tensor. ``place``: where its elements are; None: inline. Raises ValueError for one whose bytes are not as
    many as its shape says.
    """
    size = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
    if len(tensor.data) != size:
        raise ValueError(f"a tensor of {tensor.dtype} {list(tensor.shape)} has {len(tensor.data)} bytes, not {size}")
    message = tensor_pb2.Tensor(dtype=_NUMBERS[tensor.dtype], shape=tensor.shape)
    set_payload(message, tensor.data, place)
    return message


def limits_from_proto(messages: Iterable[media_pb2.MediaLimits]) -> tuple[MediaLimits, ...]:
    """What is taken of each modality, as far as this revision knows it."""
    return tuple(
        MediaLimits(modality=modality, max_items=each.max_items, max_tokens=each.max_tokens)
        for each in messages
        if (modality := _MODALITIES.get(each.modality)) is not None
    )


def limits_to_proto(limits: Iterable[MediaLimits]) -> list[media_pb2.MediaLimits]:
    """The messages of these limits."""
    return [
        media_pb2.MediaLimits(modality=each.modality, max_items=each.max_items, max_tokens=each.max_tokens)
        for each in limits
    ]
