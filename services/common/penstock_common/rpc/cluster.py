"""Converters between domain types and ``penstock.coordinator.v1``: cluster views and LoRA registrations."""

from collections.abc import Iterable

from penstock.common.v1 import control_pb2, stats_pb2
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.lora_registry import MAX_REGISTRATIONS, LoraHeld, LoraRefusal, LoraRegistration
from penstock_common.rpc.by_field import from_message, to_message
from penstock_common.rpc.data_parallel import pool_group_from_proto, pool_group_to_proto
from penstock_common.rpc.stats import check_held
from penstock_common.types.cluster import ClusterView, EngineStatus, ViewDelta


def view_from_proto(message: pb.ClusterView) -> ClusterView:
    """Return the cluster view. An engine in an unknown state becomes LOADING, so that it receives no requests."""
    return ClusterView(
        engines=tuple(map(engine_from_proto, message.engines)), groups=tuple(map(pool_group_from_proto, message.groups))
    )


def view_to_proto(view: ClusterView) -> pb.ClusterView:
    """Return the message for a cluster view."""
    message = groups_to_proto(view)
    message.engines.extend(to_message(engine, control_pb2.EngineStatus) for engine in view.engines)
    return message


def groups_to_proto(view: ClusterView) -> pb.ClusterView:
    """Return a message with only the groups of a view."""
    message = pb.ClusterView(groups=map(pool_group_to_proto, view.groups))
    if len(view.groups) == 1:  # earlier versions of the frontend read only these fields
        only = view.groups[0].view
        message.group_epoch, message.current_wave, message.engines_running = only.group.epoch, only.wave, only.running
    return message


def delta_to_proto(delta: ViewDelta, *, base_version: int) -> pb.ViewDelta:
    """Return the message for the changes since the view with ``base_version``."""
    return to_message(
        delta,
        pb.ViewDelta,
        base_version=base_version,
        loads=to_message(delta.loads, pb.EngineLoads) if delta.loads.indices else None,
        loras=[
            pb.EngineLoras(index=index, loras=to_message(held, stats_pb2.LoraHeld))
            for index, held in delta.loras.items()
        ],
    )


def delta_from_proto(message: pb.ViewDelta) -> ViewDelta:
    """Return the changes since the view with ``message.base_version``."""
    loras = {each.index: from_message(each.loras, LoraHeld) for each in message.loras}
    for held in loras.values():
        check_held(held)
    return from_message(message, ViewDelta, changed=tuple(map(engine_from_proto, message.changed)), loras=loras)


def engine_from_proto(message: control_pb2.EngineStatus) -> EngineStatus:
    """Return one engine of a view."""
    engine = from_message(message, EngineStatus)
    check_held(engine.loras)
    return engine


# Conversion of LoRA registrations to ``penstock.coordinator.v1`` and back.

MAX_NAME_LENGTH = 256
MAX_PATH_LENGTH = 4096
MAX_VERSION = 2**62
"""Highest version that a frontend may send. The limit ensures that no frontend can use up all version numbers."""
_DIGEST_SIZE = 16


def registrations_to_proto(
    registrations: Iterable[LoraRegistration], refused: Iterable[LoraRefusal] = ()
) -> pb.LoraRegistrations:
    """Return the message for registrations and refusals, at most MAX_REGISTRATIONS of each kind."""
    return pb.LoraRegistrations(
        registrations=[to_message(each, pb.LoraRegistration) for each in registrations],
        refused=[to_message(each, pb.LoraRefusal) for each in refused],
    )


def registrations_from_proto(message: pb.LoraRegistrations) -> list[LoraRegistration]:
    """Return the LoRA registrations of a message. Raises InvalidArgument for values that no frontend may send."""
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
        return from_message(message, LoraRegistration, path="", digest=b"", pinned=False)
    _check(f"{path}.path", len(message.path), 1, MAX_PATH_LENGTH, "characters")
    _check(f"{path}.digest", len(message.digest), _DIGEST_SIZE, _DIGEST_SIZE, "bytes")
    return from_message(message, LoraRegistration)


def _check(field: str, value: int, low: int, high: int, what: str = "") -> None:
    if not low <= value <= high:
        has = f"has {value} {what}; it must have" if what else f"is {value}; it must be"
        limit = f"{low}" if low == high else f"from {low} to {high}"
        raise InvalidArgument(f"{field} {has} {limit}", field=field)
