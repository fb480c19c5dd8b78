"""``penstock.common.v1.SamplingParams`` to the domain and back, and the refusal of what is not served yet."""

from collections.abc import Iterable
from typing import Any

import msgspec
from google.protobuf.message import Message

from penstock.common.v1 import sampling_pb2
from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.sampling import OutputKind, SamplingParams

NOT_SERVED_YET = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "spaces_between_special_tokens": True,
    "structured_output": None,
    "repetition_detection": None,
}
"""Fields whose feature comes later, with the value that asks for nothing."""


def refuse_not_served(message: sampling_pb2.SamplingParams, *, path: str = "sampling_params") -> None:
    """Raise Unimplemented when a field of a later feature asks for something."""
    for field, value in message.ListFields():
        if field.name in NOT_SERVED_YET and value != NOT_SERVED_YET[field.name]:
            refuse(f"{path}.{field.name}")


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
    """The fields that are set, as arguments of ``SamplingParams``. Refuses what is not served yet, and n = 0."""
    if message.HasField("n") and message.n < 1:
        raise InvalidArgument("sampling_params.n is 0; it must be at least 1", field="sampling_params.n")
    refuse_not_served(message)
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name in NOT_SERVED_YET:
            continue
        if field.name == "output_kind":
            value = OutputKind(value)
        elif field.is_repeated:
            value = tuple(value)
        elif field.name == "top_k":
            value = max(value, 0) if value >= -1 else value
        values[field.name] = value
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
        if isinstance(value, tuple):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


_DEFAULTS = {
    name: value for name, value in msgspec.structs.asdict(SamplingParams()).items() if name not in NOT_SERVED_YET
}
