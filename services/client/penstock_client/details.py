"""The ``google.rpc`` details of a failed call.

Their messages are declared here, in a pool of their own: the package that has them generated is not needed, and may be there.
"""

from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_INT32 = descriptor_pb2.FieldDescriptorProto.TYPE_INT32
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64

_MESSAGES: dict[str, list[tuple[str, int, int | str, bool]]] = {
    "Any": [("type_url", 1, _STRING, False), ("value", 2, _BYTES, False)],
    "Status": [("code", 1, _INT32, False), ("message", 2, _STRING, False), ("details", 3, "Any", True)],
    "ErrorInfo": [("reason", 1, _STRING, False), ("domain", 2, _STRING, False)],
    "FieldViolation": [("field", 1, _STRING, False), ("description", 2, _STRING, False)],
    "BadRequest": [("field_violations", 1, "FieldViolation", True)],
    "QuotaViolation": [("subject", 1, _STRING, False), ("description", 2, _STRING, False)],
    "QuotaFailure": [("violations", 1, "QuotaViolation", True)],
    "Duration": [("seconds", 1, _INT64, False), ("nanos", 2, _INT32, False)],
    "RetryInfo": [("retry_delay", 1, "Duration", False)],
}
"""Of each its fields: name, number, type, whether it is repeated. Names of messages that stand in others are only ours: what
is on the wire has none.
"""


def _classes() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name="details.proto", package="penstock_client", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = (
                descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
                if repeated
                else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
            )
            added = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                added.type, added.type_name = (
                    descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
                    f".{file.package}.{kind}",
                )
            else:
                added.type = kind  # type: ignore[assignment]  # the stub has a type for each constant
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _classes()


@dataclass(frozen=True, slots=True)
class Details:
    """What they say; empty or None where they do not."""

    reason: str = ""
    field: str = ""
    retry_after: float | None = None
    quota_subject: str = ""


def read_details(status: bytes) -> Details:
    """Those of a serialized ``google.rpc.Status``. Kinds that are not known here are passed over."""
    reason = field = quota_subject = ""
    retry_after = None
    whole: Any = _CLASSES["Status"].FromString(status)
    for each in whole.details:
        kind = each.type_url.rpartition("google.rpc.")[2]
        if kind not in ("ErrorInfo", "BadRequest", "QuotaFailure", "RetryInfo"):
            continue
        detail: Any = _CLASSES[kind].FromString(each.value)
        if kind == "ErrorInfo":
            reason = detail.reason
        elif kind == "BadRequest" and detail.field_violations:
            field = detail.field_violations[0].field
        elif kind == "QuotaFailure" and detail.violations:
            quota_subject = detail.violations[0].subject
        elif kind == "RetryInfo":
            retry_after = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
    return Details(reason=reason, field=field, retry_after=retry_after, quota_subject=quota_subject)
