"""Converters between domain types and protobuf messages of data-parallel groups."""

from collections.abc import Mapping
from typing import TypeVar

from penstock.common.v1 import data_parallel_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.by_field import fill, from_message, to_message
from penstock_common.types.data_parallel import (
    GroupView,
    Pauses,
    Place,
    PoolGroup,
    RankGroup,
    RankReport,
    StartDpWave,
    StartWave,
    WaveComplete,
    engine_of,
    rank_name,
)

Wave = TypeVar("Wave", StartWave, WaveComplete, StartDpWave)

MAX_NUMBER = 2**62
"""Maximum epoch, wave, step or pause number. No group reaches this number, and larger numbers still fit into the
message.
"""
_NOWHERE: Mapping[str, str] = {}


def checked(field: str, number: int) -> int:
    """Return ``number``. Raises InvalidArgument if ``number`` exceeds ``MAX_NUMBER``."""
    if number > MAX_NUMBER:
        raise InvalidArgument(f"{field} is {number}; it must be at most {MAX_NUMBER}", field=field)
    return number


def pauses_from_proto(message: pb.Pauses) -> Pauses:
    """Return the pause state of a message. An unknown mode becomes the strongest mode. The mode is ignored if the group
    is not paused. Like all functions that read group numbers, this function raises InvalidArgument for a number above
    MAX_NUMBER.
    """
    pauses = from_message(message, Pauses)
    checked("pauses.number", pauses.number)
    return pauses if pauses.on else Pauses(pauses.number)


def member_to_proto(rank: str, meeting_address: str = "") -> pb.GroupMember:
    """Return the message for a rank."""
    engine_id, incarnation = engine_of(rank)
    return pb.GroupMember(engine_id=engine_id, incarnation=incarnation, meeting_address=meeting_address)


def member_from_proto(message: pb.GroupMember) -> str:
    """Return the name of a rank."""
    return rank_name(message.engine_id, message.incarnation)


def group_to_proto(group: RankGroup, meetings: Mapping[str, str] = _NOWHERE) -> pb.RankGroup:
    """Return the message for a group. ``meetings`` maps each rank to the address of its rendezvous store."""
    members = [member_to_proto(rank, meetings.get(rank, "")) for rank in group.members]
    return pb.RankGroup(epoch=group.epoch, members=members)


def group_from_proto(message: pb.RankGroup) -> RankGroup:
    """Return the group of a message, without the addresses of its ranks."""
    return RankGroup(
        checked("group.epoch", message.epoch), tuple(member_from_proto(member) for member in message.members)
    )


def meetings_from_proto(message: pb.RankGroup) -> dict[str, str]:
    """Return the address of each rank's rendezvous store, by rank."""
    return {member_from_proto(member): member.meeting_address for member in message.members}


def wave_from_proto(message: pb.GroupWave, kind: type[Wave], rank: str) -> Wave:
    """Return the wave event of a message that ``rank`` has sent or will receive."""
    wave = checked("wave", message.wave)
    return from_message(message, kind, engine=rank, wave=wave, pauses=pauses_from_proto(message.pauses))


def report_to_proto(report: RankReport) -> pb.RankReport:
    """Return the message for a rank's report."""
    group, place = group_to_proto(report.group), report.place
    return to_message(report, pb.RankReport, group=group, wave=place.wave, step=place.step)


def report_from_proto(message: pb.RankReport, rank: str) -> RankReport:
    """Return the report of ``rank``."""
    group, pauses = group_from_proto(message.group), pauses_from_proto(message.pauses)
    place = Place(group.epoch, checked("wave", message.wave), message.step, pauses.number)
    checked("prepared", message.prepared)
    return from_message(message, RankReport, engine=rank, group=group, place=place, pauses=pauses)


def pool_group_to_proto(group: PoolGroup) -> pb.GroupView:
    """Return the message that describes a group in a cluster view."""
    view, members = group.view, group.view.group.members
    routed = [members.index(rank) for rank in view.routed]
    message = to_message(view, pb.GroupView, group=group_to_proto(view.group), routed_ranks=routed)
    fill(message, group)
    return message


def pool_group_from_proto(message: pb.GroupView) -> PoolGroup:
    """Return the group that ``message``, a part of a cluster view, describes. An index in ``routed_ranks`` is ignored
    if no member of the group has this index.
    """
    group = group_from_proto(message.group)
    routed = tuple(group.members[rank] for rank in message.routed_ranks if rank < len(group.members))
    pauses = pauses_from_proto(message.pauses)
    return from_message(
        message, PoolGroup, view=from_message(message, GroupView, group=group, pauses=pauses, routed=routed)
    )
