"""Parts of requests to messages and back: sampling parameters, the context and media."""

import enum
import math
import time
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, TypeVar, cast

import msgspec
from google.protobuf.message import Message

from penstock.common.v1 import media_pb2, sampling_pb2, structured_output_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, Unimplemented, quoted
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

# A request's context to ``penstock.enginecore.v1.EngineCoreRequest`` and back: both ends of the wire in one place.


def fill_context(message: pb.EngineCoreRequest, context: RequestContext) -> None:
    """Write the context's fields into a message that has none of them yet. ``time_left`` is set when the message is sent."""
    message.external_request_id = context.external_request_id
    if context.data_parallel_rank is not None:
        message.data_parallel_rank = context.data_parallel_rank
    message.priority = context.priority
    message.tenant = context.tenant
    if context.tenant_weight != 1.0:
        message.tenant_weight = context.tenant_weight
    message.cache_salt = context.cache_salt
    message.arrival_time = context.arrival_time
    if context.deadline is not None:
        message.deadline = context.deadline
    message.lease_kv = context.kv.lease
    message.kv_transfer_params = context.kv.params
    message.trace_context.update(context.trace_context)


def context_from_proto(message: pb.EngineCoreRequest) -> RequestContext:
    """The context; unset fields take the domain's defaults. Raises InvalidArgument for a ``time_left`` that is not finite."""
    return RequestContext(
        external_request_id=message.external_request_id,
        data_parallel_rank=message.data_parallel_rank if message.HasField("data_parallel_rank") else None,
        priority=message.priority,
        tenant=message.tenant,
        tenant_weight=message.tenant_weight if message.HasField("tenant_weight") else 1.0,
        cache_salt=message.cache_salt,
        arrival_time=message.arrival_time,
        deadline=_deadline(message),
        kv=KvParams(lease=message.lease_kv, params=message.kv_transfer_params),
        trace_context=dict(message.trace_context),
    )


def _deadline(message: pb.EngineCoreRequest) -> float | None:
    """Seconds since the Unix epoch by this machine's clock, with which alone it is compared. Raises InvalidArgument."""
    if not message.HasField("time_left"):
        return message.deadline if message.HasField("deadline") else None
    if not math.isfinite(message.time_left):
        raise InvalidArgument(f"time_left is {message.time_left}; it must be finite", field="time_left")
    return time.time() + message.time_left


# ``penstock.common.v1.SamplingParams`` to the domain and back, and the refusal of what is not served yet.

E = TypeVar("E", bound=enum.IntEnum)


def refuse_set(message: Message, names: Iterable[str], *, path: str = "") -> None:
    """Raise Unimplemented when one of the named fields of ``message`` is set."""
    present = {field.name for field, _ in message.ListFields()}
    for name in names:
        if name in present:
            refuse(f"{path}.{name}" if path else name)


def refuse(field: str) -> None:
    """Raise Unimplemented for a request field."""
    raise Unimplemented(f"{field} is not served yet", field=field)


def set_fields(message: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """The fields that are set, as arguments of ``SamplingParams``. Refuses what has no meaning: n = 0, an empty constraint."""
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
    """The domain's parameters; unset fields take the domain's defaults."""
    return SamplingParams(**set_fields(message))


def to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """The message for these parameters. Values that equal the default stay unset."""
    message = sampling_pb2.SamplingParams()
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value == default:
            continue
        if (write := _WRITE.get(name)) is not None:
            write(message, value)
        elif isinstance(value, tuple):
            getattr(message, name).extend(value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    return message


def _constraint(message: structured_output_pb2.StructuredOutput) -> StructuredOutput:
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        field = "sampling_params.structured_output"
        raise InvalidArgument(
            f"{field} is empty; set one of json_schema, json_object, regex, choice, grammar, structural_tag",
            field=field,
        )
    constraint: dict[str, Any] = {kind: getattr(message, kind)}
    if kind == "choice":
        constraint = {"choice": tuple(message.choice.options)}
    if message.json_whitespace:
        path = "sampling_params.structured_output"
        constraint["json_whitespace"] = _enum(JsonWhitespace, message.json_whitespace, f"{path}.json_whitespace")
    return StructuredOutput(**constraint)


def _add_constraint(message: sampling_pb2.SamplingParams, value: StructuredOutput) -> None:
    kind, constraint = value.constraint
    if kind == "choice":
        message.structured_output.choice.options.extend(value.choice)
    else:
        setattr(message.structured_output, kind, constraint)
    if value.json_whitespace is not JsonWhitespace.DUMPS:
        blanks = cast("structured_output_pb2.JsonWhitespace.ValueType", value.json_whitespace.value)
        message.structured_output.json_whitespace = blanks


def _enum(kind: type[E], value: int, field: str) -> E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.name for member in kind)
        raise InvalidArgument(f"{field} is {value}; known: {known}", field=field) from None


def _output_kind(value: int) -> OutputKind:
    return _enum(OutputKind, value, "sampling_params.output_kind")


def _repetition(message: sampling_pb2.RepetitionDetection) -> RepetitionDetection:
    return RepetitionDetection(
        max_pattern_size=message.max_pattern_size,
        min_pattern_size=message.min_pattern_size or 1,
        min_count=message.min_count or 2,
    )


def _add_repetition(message: sampling_pb2.SamplingParams, value: RepetitionDetection) -> None:
    message.repetition_detection.CopyFrom(sampling_pb2.RepetitionDetection(**msgspec.structs.asdict(value)))


def _add_bad_words(message: sampling_pb2.SamplingParams, value: Iterable[tuple[int, ...]]) -> None:
    for token_ids in value:
        message.bad_word_token_ids.add(token_ids=token_ids)


_READ: dict[str, Callable[[Any], Any]] = {
    "output_kind": _output_kind,
    "top_k": lambda value: max(value, 0) if value >= -1 else value,
    "logit_bias": dict,
    "structured_output": _constraint,
    "repetition_detection": _repetition,
    "bad_word_token_ids": lambda sequences: tuple(tuple(sequence.token_ids) for sequence in sequences),
}
_WRITE: dict[str, Callable[[sampling_pb2.SamplingParams, Any], None]] = {
    "structured_output": _add_constraint,
    "repetition_detection": _add_repetition,
    "bad_word_token_ids": _add_bad_words,
}
_DEFAULTS = msgspec.structs.asdict(SamplingParams())


# Media to messages of ``penstock.common.v1`` and back: tensors of any kind, and what is taken of each modality.

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
