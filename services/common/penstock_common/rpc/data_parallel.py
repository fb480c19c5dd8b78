"""Words of data-parallel groups to the domain and back: both ends of each wire in one place."""

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
"""Of an epoch, a wave, a step or a turn: far from what any group comes to, and from where the next number fits no message."""
_NOWHERE: Mapping[str, str] = {}


def checked(field: str, number: int) -> int:
    """A number of a group's. Raises InvalidArgument beyond ``MAX_NUMBER``."""
    if number > MAX_NUMBER:
        raise InvalidArgument(f"{field} is {number}; it must be at most {MAX_NUMBER}", field=field)
    return number


def pauses_from_proto(message: pb.Pauses) -> Pauses:
    """The turns. A mode that this version does not know counts as the strongest; one of no pause means nothing. Raises
    InvalidArgument, as all that read numbers of a group do.
    """
    pauses = from_message(message, Pauses)
    checked("pauses.number", pauses.number)
    return pauses if pauses.on else Pauses(pauses.number)


def member_to_proto(rank: str, meeting_address: str = "") -> pb.GroupMember:
    """The message for a rank."""
    engine_id, incarnation = engine_of(rank)
    return pb.GroupMember(engine_id=engine_id, incarnation=incarnation, meeting_address=meeting_address)


def member_from_proto(message: pb.GroupMember) -> str:
    """The name of a rank."""
    return rank_name(message.engine_id, message.incarnation)


def group_to_proto(group: RankGroup, meetings: Mapping[str, str] = _NOWHERE) -> pb.RankGroup:
    """The message for a group. ``meetings``: by rank, the address of its store."""
    members = [member_to_proto(rank, meetings.get(rank, "")) for rank in group.members]
    return pb.RankGroup(epoch=group.epoch, members=members)


def group_from_proto(message: pb.RankGroup) -> RankGroup:
    """The group, less its addresses."""
    return RankGroup(
        checked("group.epoch", message.epoch), tuple(member_from_proto(member) for member in message.members)
    )


def meetings_from_proto(message: pb.RankGroup) -> dict[str, str]:
    """By rank, the address of its store."""
    return {member_from_proto(member): member.meeting_address for member in message.members}


def wave_from_proto(message: pb.GroupWave, kind: type[Wave], rank: str) -> Wave:
    """What is said of a wave by ``rank``, or to it."""
    wave = checked("wave", message.wave)
    return from_message(message, kind, engine=rank, wave=wave, pauses=pauses_from_proto(message.pauses))


def report_to_proto(report: RankReport) -> pb.RankReport:
    """The message for a report."""
    group, place = group_to_proto(report.group), report.place
    return to_message(report, pb.RankReport, group=group, wave=place.wave, step=place.step)


def report_from_proto(message: pb.RankReport, rank: str) -> RankReport:
    """Where ``rank`` is."""
    group, pauses = group_from_proto(message.group), pauses_from_proto(message.pauses)
    place = Place(group.epoch, checked("wave", message.wave), message.step, pauses.number)
    checked("prepared", message.prepared)
    return from_message(message, RankReport, engine=rank, group=group, place=place, pauses=pauses)


def pool_group_to_proto(group: PoolGroup) -> pb.GroupView:
    """The message for a group of a view."""
    view, members = group.view, group.view.group.members
    routed = [members.index(rank) for rank in view.routed]
    message = to_message(view, pb.GroupView, group=group_to_proto(view.group), routed_ranks=routed)
    fill(message, group)
    return message


def pool_group_from_proto(message: pb.GroupView) -> PoolGroup:
    """A group of a view. Ranks that it does not have are routed to as little."""
    group = group_from_proto(message.group)
    routed = tuple(group.members[rank] for rank in message.routed_ranks if rank < len(group.members))
    pauses = pauses_from_proto(message.pauses)
    return from_message(
        message, PoolGroup, view=from_message(message, GroupView, group=group, pauses=pauses, routed=routed)
    )
