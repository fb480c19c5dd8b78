"""Registrations of LoRA adapters to ``penstock.coordinator.v1`` and back: both ends of the wire in one place."""

from collections.abc import Iterable

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.lora_registry import MAX_REGISTRATIONS, LoraRefusal, LoraRegistration

MAX_NAME_LENGTH = 256
MAX_PATH_LENGTH = 4096
MAX_VERSION = 2**62
"""There is room for more above it: nobody can take the last one."""
_DIGEST_SIZE = 16


def registrations_to_proto(
    registrations: Iterable[LoraRegistration], refused: Iterable[LoraRefusal] = ()
) -> pb.LoraRegistrations:
    """The message of these, at most MAX_REGISTRATIONS of either."""
    return pb.LoraRegistrations(
        registrations=[
            pb.LoraRegistration(
                name=each.name,
                version=each.version,
                frontend_id=each.frontend_id,
                unloaded=each.unloaded,
                path=each.path,
                digest=each.digest,
                pinned=each.pinned,
            )
            for each in registrations
        ],
        refused=[pb.LoraRefusal(name=each.name, reason=each.reason) for each in refused],
    )


def registrations_from_proto(message: pb.LoraRegistrations) -> list[LoraRegistration]:
    """The registrations. Raises InvalidArgument for what no frontend may say."""
    count = len(message.registrations)
    if count > MAX_REGISTRATIONS:
        raise InvalidArgument(
            f"loras.registrations has {count} entries; it must have at most {MAX_REGISTRATIONS}",
            field="loras.registrations",
        )
    return [_registration(each, f"loras.registrations[{i}]") for i, each in enumerate(message.registrations)]


def _registration(message: pb.LoraRegistration, path: str) -> LoraRegistration:
    _check(f"{path}.name", len(message.name), 1, MAX_NAME_LENGTH, "characters")
    _check(f"{path}.frontend_id", len(message.frontend_id), 1, MAX_NAME_LENGTH, "characters")
    _check(f"{path}.version", message.version, 1, MAX_VERSION)
    if message.unloaded:
        return LoraRegistration(
            name=message.name, version=message.version, frontend_id=message.frontend_id, unloaded=True
        )
    _check(f"{path}.path", len(message.path), 1, MAX_PATH_LENGTH, "characters")
    _check(f"{path}.digest", len(message.digest), _DIGEST_SIZE, _DIGEST_SIZE, "bytes")
    return LoraRegistration(
        name=message.name,
        version=message.version,
        frontend_id=message.frontend_id,
        path=message.path,
        digest=message.digest,
        pinned=message.pinned,
    )


def _check(field: str, value: int, low: int, high: int, what: str = "") -> None:
    if not low <= value <= high:
        has = f"has {value} {what}; it must have" if what else f"is {value}; it must be"
        limit = f"{low}" if low == high else f"from {low} to {high}"
        raise InvalidArgument(f"{field} {has} {limit}", field=field)
