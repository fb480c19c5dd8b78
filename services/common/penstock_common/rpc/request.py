"""Converters between domain types and protobuf messages for request context, sampling parameters and media."""

import math
import time
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from google.protobuf.message import Message

from penstock.common.v1 import media_pb2, sampling_pb2, structured_output_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.rpc.by_field import fill, from_message, member, to_message
from penstock_common.rpc.outputs import Place, TakeShared, TakeTensor, payload, set_payload
from penstock_common.types.kv_transfer import KvParams
from penstock_common.types.media import DTYPE_BYTES, MODALITIES, MediaLimits, Modality, TensorData, TensorDtype
from penstock_common.types.request import RequestContext
from penstock_common.types.sampling import (
    JsonWhitespace,
    OutputKind,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
)

# Conversion of the request context to ``penstock.enginecore.v1.EngineCoreRequest`` and back.


def fill_context(message: pb.EngineCoreRequest, context: RequestContext) -> None:
    """Write the context into a message without context fields. ``time_left`` is set when the message is sent."""
    fill(message, context, "lora")
    message.lease_kv = context.kv.lease
    message.kv_transfer_params = context.kv.params


def context_from_proto(message: pb.EngineCoreRequest) -> RequestContext:
    """Return the request context of a message. Unset fields get the defaults of RequestContext. Raises InvalidArgument
    if ``time_left`` is not finite.
    """
    kv = KvParams(lease=message.lease_kv, params=message.kv_transfer_params)
    return from_message(message, RequestContext, lora="", deadline=_deadline(message), kv=kv)


def _deadline(message: pb.EngineCoreRequest) -> float | None:
    """Return the deadline in seconds since the Unix epoch, by the clock of this machine. Raises InvalidArgument if the
    time left is not finite.
    """
    if not message.HasField("time_left"):
        return message.deadline if message.HasField("deadline") else None
    if not math.isfinite(message.time_left):
        raise InvalidArgument(f"time_left is {message.time_left}; it must be finite", field="time_left")
    return time.time() + message.time_left


# Conversion of ``penstock.common.v1.SamplingParams`` to the domain and back. Unsupported fields are refused.


def refuse_set(message: Message, names: Iterable[str], *, path: str = "") -> None:
    """Raise Unimplemented if one of the named fields of ``message`` is set."""
    for name in names:
        has_presence = message.DESCRIPTOR.fields_by_name[name].has_presence
        if message.HasField(name) if has_presence else getattr(message, name):
            refuse(f"{path}.{name}" if path else name)


def refuse(field: str) -> None:
    """Raise Unimplemented for a request field."""
    raise Unimplemented(f"{field} is not supported yet", field=field)


def set_fields(message: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """Return the set fields as arguments of ``SamplingParams``. Raises InvalidArgument for n = 0 or an empty
    constraint.
    """
    if message.HasField("n") and message.n < 1:
        raise InvalidArgument("sampling_params.n is 0; it must be at least 1", field="sampling_params.n")
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if (read := _READ.get(field.name)) is not None:
            values[field.name] = read(value)
        else:
            values[field.name] = tuple(value) if field.is_repeated else value
    return values


def from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Return the sampling parameters. Unset fields get the defaults of SamplingParams."""
    return SamplingParams(**set_fields(message))


def to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return the message for sampling parameters. Values that equal the default stay unset."""
    constraint = None if params.structured_output is None else _constraint_to_proto(params.structured_output)
    words = [sampling_pb2.TokenSequence(token_ids=token_ids) for token_ids in params.bad_word_token_ids]
    return to_message(
        params,
        sampling_pb2.SamplingParams,
        output_kind=None if params.output_kind is OutputKind.DELTA else params.output_kind,
        structured_output=constraint,
        bad_word_token_ids=words,
    )


def _constraint(message: structured_output_pb2.StructuredOutput) -> StructuredOutput:
    kind, path = message.WhichOneof("constraint"), "sampling_params.structured_output"
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidArgument(
            f"{path} is empty; set one of json_schema, json_object, regex, choice, grammar, structural_tag", field=path
        )
    given: dict[str, Any] = {kind: tuple(message.choice.options) if kind == "choice" else getattr(message, kind)}
    if message.json_whitespace:
        given["json_whitespace"] = member(JsonWhitespace, message.json_whitespace, f"{path}.json_whitespace")
    return StructuredOutput(**given)


def _constraint_to_proto(value: StructuredOutput) -> structured_output_pb2.StructuredOutput:
    kind, constraint = value.constraint
    blanks = None if value.json_whitespace is JsonWhitespace.DUMPS else value.json_whitespace
    given: dict[str, Any] = {
        kind: {"options": constraint} if kind == "choice" else constraint,
        "json_whitespace": blanks,
    }
    return structured_output_pb2.StructuredOutput(**given)


_READ: dict[str, Callable[[Any], Any]] = {
    "output_kind": lambda value: member(OutputKind, value, "sampling_params.output_kind"),
    "top_k": lambda value: max(value, 0) if value >= -1 else value,
    "logit_bias": dict,
    "structured_output": _constraint,
    "repetition_detection": lambda value: from_message(value, RepetitionDetection),
    "bad_word_token_ids": lambda sequences: tuple(tuple(sequence.token_ids) for sequence in sequences),
}


# Conversion of media tensors and media limits to ``penstock.common.v1`` and back.

MAX_DIMENSIONS = 8
"""Maximum number of dimensions of a tensor."""
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
    """Return the media modality with this name. Raises InvalidArgument if the name is unknown."""
    known = _MODALITIES.get(text)
    if known is None:
        raise InvalidArgument(f"{path} is {quoted(text)}; known: {', '.join(MODALITIES)}", field=path)
    return known


def tensor_from_proto(
    message: tensor_pb2.Tensor, *, path: str, take: TakeTensor | None = None, shared: TakeShared | None = None
) -> TensorData:
    """Return the tensor of a message. Raises the errors of ``take`` and ``shared``.

    Args:
        message: The message of the tensor.
        path: Field path of the tensor, for errors.
        take: Returns the elements of a tensor that arrived in chunks.
        shared: Returns the elements of a tensor in shared memory.

    Raises:
        InvalidArgument: The type is unknown, the tensor has more than ``MAX_DIMENSIONS`` dimensions, or the number of
            bytes does not match its shape.
        Unimplemented: The elements are at a location that is not supported here.
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
    """Return the message for a tensor. Raises ValueError if the number of bytes does not match the tensor's shape.

    ``place`` is the location of the elements, or None if they are inline.
    """
    size = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
    if len(tensor.data) != size:
        raise ValueError(
            f"a {tensor.dtype} tensor of shape {list(tensor.shape)} has {len(tensor.data)} bytes; it must have {size} bytes"
        )
    message = tensor_pb2.Tensor(dtype=_NUMBERS[tensor.dtype], shape=tensor.shape)
    set_payload(message, tensor.data, place)
    return message


def limits_from_proto(messages: Iterable[media_pb2.MediaLimits]) -> tuple[MediaLimits, ...]:
    """Return the limits of each modality that this version knows."""
    return tuple(from_message(each, MediaLimits) for each in messages if each.modality in MODALITIES)
