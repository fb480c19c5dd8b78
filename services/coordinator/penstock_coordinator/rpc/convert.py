"""Validation and conversion of ``penstock.coordinator.v1`` messages."""

import math
from collections.abc import Mapping, Sequence

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import messages_pb2 as enginecore_pb
from penstock_common.addresses import split
from penstock_common.errors import InvalidArgument, quoted
from penstock_common.lora_registry import LoraRefusal, LoraRegistration
from penstock_common.rpc import cluster, data_parallel, stats
from penstock_common.rpc.by_field import from_message, to_message
from penstock_common.rpc.request import refuse_set
from penstock_common.types.cluster import DEFAULT_POOL, EngineRegistration
from penstock_common.types.data_parallel import (
    FirstRequest,
    GroupRegistration,
    PeerLost,
    PrepareFailed,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
    rank_name,
)
from penstock_common.types.outputs import SchedulerStats
from penstock_coordinator.groups import FromRank
from penstock_coordinator.view_channel import Subscription

MAX_NAME_LENGTH = 256
"""Maximum length of ids, incarnations, addresses, pools and model names, in characters."""
FINGERPRINT_BYTES = 16
"""Size of the fingerprint of a KvLayout, in bytes."""
MAX_POOLS = 64
"""Maximum number of pools in a frontend's subscription."""
PLAIN_FIELDS = frozenset({"engine_index", "timestamp", "scheduler_stats"})
"""Fields of a plain load report. Such reports have a fast path, because there are thousands of them per second."""
REQUEST_FIELDS = ("outputs", "utility_output", "finished_requests", "kv_events")
"""Fields of ``EngineCoreOutputs`` that engines may send only to frontends."""


def registration(report: pb.EngineReport | None) -> EngineRegistration:
    """Convert the first message of an engine's stream. Raises InvalidArgument if the message is not a valid
    ``register`` message.
    """
    kind = "no message" if report is None else report.WhichOneof("message") or "an empty message"
    if report is None or kind != "register":
        raise InvalidArgument(f"register must be the first message of EngineSession, not {kind}", field="register")
    register = report.register
    for name in ("engine_id", "incarnation", "address", "model"):
        _check_name(f"register.{name}", getattr(register, name))
    _check_address("register.address", register.address)
    pool = register.pool or DEFAULT_POOL
    _check_name("register.pool", pool)
    _check_kv(register)
    group = _group(register) if register.HasField("group") else None
    return from_message(register, EngineRegistration, group=group)


def _check_kv(register: pb.Register) -> None:
    """Raise InvalidArgument if the KV transfer fields of a ``register`` message are not valid."""
    if register.kv_address:
        _check_name("register.kv_address", register.kv_address)
        _check_address("register.kv_address", register.kv_address)
    if (size := len(register.kv_fingerprint)) not in (0, FINGERPRINT_BYTES):
        raise InvalidArgument(
            f"register.kv_fingerprint has {size} bytes; it must have {FINGERPRINT_BYTES} bytes, or be empty",
            field="register.kv_fingerprint",
        )


def _group(register: pb.Register) -> GroupRegistration:
    group, path = register.group, "register.group"
    if "#" in register.incarnation:
        raise InvalidArgument(
            f"register.incarnation is {quoted(register.incarnation)}; the incarnation of a rank must not contain '#'"
        )
    if group.size < 2:
        raise InvalidArgument(f"{path}.size is {group.size}; it must be at least 2", field=f"{path}.size")
    if not 1 <= group.min_size <= group.size:
        raise InvalidArgument(
            f"{path}.min_size is {group.min_size}; it must be from 1 to size = {group.size}", field=f"{path}.min_size"
        )
    _check_name(f"{path}.meeting_address", group.meeting_address)
    _check_address(f"{path}.meeting_address", group.meeting_address)
    report = data_parallel.report_from_proto(group.report, rank_name(register.engine_id, register.incarnation))
    return from_message(group, GroupRegistration, report=report)


def from_rank(report: pb.EngineReport, rank: str) -> FromRank:
    """Convert a message from a rank of a data-parallel group. Raises InvalidArgument for any other message."""
    match report.WhichOneof("message"):
        case "rank_report":
            return data_parallel.report_from_proto(report.rank_report, rank)
        case "start_wave":
            return data_parallel.wave_from_proto(report.start_wave, StartWave, rank)
        case "wave_complete":
            return data_parallel.wave_from_proto(report.wave_complete, WaveComplete, rank)
        case "peer_lost":
            return PeerLost(rank, report.peer_lost.epoch)
        case "prepare_failed":
            return PrepareFailed(rank, report.prepare_failed.epoch)
        case _:
            raise InvalidArgument(
                "the message is empty; it must have outputs, draining, notification, or a field for ranks",
                field="message",
            )


def to_rank(message: StartDpWave | Reconfigure, meetings: Mapping[str, str]) -> pb.EngineCommand:
    """Convert a message that is sent to a rank. ``meetings`` has the address of each rank's rendezvous store."""
    if isinstance(message, StartDpWave):
        return pb.EngineCommand(start_dp_wave=to_message(message, pb.StartDpWave, group_epoch=message.epoch))
    members = message.group.members
    inside = message.engine in members
    reconfigure = to_message(
        message,
        pb.Reconfigure,
        data_parallel_size=len(members),
        rank=members.index(message.engine) if inside else 0,
        rank_change=pb.RANK_CHANGE_UNSPECIFIED if inside else pb.RANK_CHANGE_SHUTDOWN_CURRENT_RANK,
        group=data_parallel.group_to_proto(message.group, meetings),
        base_epoch=message.base,
    )
    return pb.EngineCommand(reconfigure=reconfigure)


def load(outputs: enginecore_pb.EngineCoreOutputs) -> SchedulerStats | None:
    """Return the statistics of a report, or None if the report only renews the lease.

    Raises InvalidArgument or Unimplemented if the report has fields that only frontends accept.
    """
    present = {field.name for field, _ in outputs.ListFields()}
    for name in () if present <= PLAIN_FIELDS else REQUEST_FIELDS:
        if name in present:
            raise InvalidArgument(
                f"outputs.{name} is only for frontends; an engine may send only outputs.scheduler_stats to the coordinator",
                field=f"outputs.{name}",
            )
    if "scheduler_stats" not in present:
        return None
    if outputs.scheduler_stats.current_wave:
        refuse_set(outputs.scheduler_stats, ("current_wave",), path="outputs.scheduler_stats")
    return stats.from_proto(outputs.scheduler_stats, path="outputs.scheduler_stats")


def check_draining(draining: enginecore_pb.Draining) -> None:
    """Raise InvalidArgument if the message does not have a valid end time of the drain.

    ``deadline`` is used only if ``time_left`` is not set.
    """
    name = "time_left" if draining.HasField("time_left") else "deadline"
    value: float = getattr(draining, name)
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgument(f"draining.{name} is {value}; it must be finite and at least 0", field=f"draining.{name}")


def check_shutdown_complete(notification: pb.Notification.ValueType) -> None:
    """Raise InvalidArgument if ``notification`` is not SHUTDOWN_COMPLETE, which is the only valid value."""
    if notification != pb.NOTIFICATION_SHUTDOWN_COMPLETE:
        raise InvalidArgument(
            f"notification is {notification}; it must be NOTIFICATION_SHUTDOWN_COMPLETE"
            f" ({pb.NOTIFICATION_SHUTDOWN_COMPLETE})",
            field="notification",
        )


def hello(report: pb.FrontendReport | None) -> pb.FrontendHello:
    """Convert the first message of a frontend's stream. Raises InvalidArgument if the message is not a valid ``hello``
    message.
    """
    kind = "no message" if report is None else report.WhichOneof("message") or "an empty message"
    if report is None or kind != "hello":
        raise InvalidArgument(f"hello must be the first message of FrontendSession, not {kind}", field="hello")
    for name in ("frontend_id", "incarnation"):
        _check_name(f"hello.{name}", getattr(report.hello, name))
    return report.hello


def subscription(hello: pb.FrontendHello) -> tuple[Subscription, bool]:
    """Return the subscription of a frontend, and whether the frontend supports deltas. Raises InvalidArgument if a name
    is not valid or there are too many pools.
    """
    views = hello.views
    if len(views.pools) > MAX_POOLS:
        raise InvalidArgument(
            f"hello.views.pools has {len(views.pools)} names; it must have at most {MAX_POOLS}",
            field="hello.views.pools",
        )
    if views.model:
        _check_name("hello.views.model", views.model)
    for pool in views.pools:
        _check_name("hello.views.pools", pool)
    return Subscription(model=views.model, pools=frozenset(views.pools)), views.deltas


def adapters(registrations: Sequence[LoraRegistration], refused: Sequence[LoraRefusal] = ()) -> bytes:
    """Encode a message with adapter names, which is sent instead of a view."""
    return pb.ClusterView(loras=cluster.registrations_to_proto(registrations, refused)).SerializeToString()


def from_frontend(report: pb.FrontendReport) -> int | FirstRequest | list[LoraRegistration] | None:
    """Convert a frontend's message. Raises InvalidArgument for unexpected messages.

    Returns the number of requests that the frontend holds, the first request of a group, LoRA registrations, or None if
    the frontend leaves.
    """
    kind = report.WhichOneof("message")
    if kind == "demand":
        return report.demand.num_held_requests
    if kind == "first_request":
        first = report.first_request
        if not first.rank.engine_id or not first.rank.incarnation:
            raise InvalidArgument("first_request.rank is empty; it must name a rank", field="first_request.rank")
        wave = data_parallel.checked("first_request.wave", first.wave)
        return FirstRequest(data_parallel.member_from_proto(first.rank), first.group_epoch, wave)
    if kind == "loras":
        return cluster.registrations_from_proto(report.loras)
    if kind == "notification":
        check_shutdown_complete(report.notification)
        return None
    if kind is None:
        raise InvalidArgument(
            "the message is empty; it must have demand, first_request, loras or notification", field="message"
        )
    raise InvalidArgument("hello was sent twice on this stream; it must be only the first message", field="hello")


def _check_name(field: str, value: str) -> None:
    if not value:
        raise InvalidArgument(f"{field} is required", field=field)
    if len(value) > MAX_NAME_LENGTH:
        raise InvalidArgument(
            f"{field} has {len(value)} characters; it must have at most {MAX_NAME_LENGTH}", field=field
        )


def _check_address(field: str, value: str) -> None:
    try:
        split(value)
    except ValueError as e:
        raise InvalidArgument(f"{field} is {quoted(value)}; it {e}", field=field) from None
