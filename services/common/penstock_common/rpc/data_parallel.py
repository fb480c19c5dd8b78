"""Words of data-parallel groups to the domain and back: both ends of each wire in one place."""

from collections.abc import Mapping

from penstock.common.v1 import control_pb2
from penstock.common.v1 import data_parallel_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.types.data_parallel import (
    GroupView,
    PauseMode,
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

MAX_NUMBER = 2**62
"""Of an epoch, a wave, a step or a turn: far from what any group comes to, and from where the next number fits no message."""
_NOWHERE: Mapping[str, str] = {}
_MODES = {mode.value: mode for mode in PauseMode}


def checked(field: str, number: int) -> int:
    """A number of a group's. Raises InvalidArgument beyond ``MAX_NUMBER``."""
    if number > MAX_NUMBER:
        raise InvalidArgument(f"{field} is {number}; it must be at most {MAX_NUMBER}", field=field)
    return number


def pauses_to_proto(pauses: Pauses) -> pb.Pauses:
    """The message for these turns."""
    return pb.Pauses(number=pauses.number, mode=control_pb2.PauseMode.ValueType(pauses.mode))


def pauses_from_proto(message: pb.Pauses) -> Pauses:
    """The turns. A mode that this version does not know counts as the strongest; one of no pause means nothing. Raises
    InvalidArgument, as all that read numbers of a group do.
    """
    pauses = Pauses(checked("pauses.number", message.number))
    if not pauses.on:
        return pauses
    return Pauses(message.number, _MODES.get(message.mode, PauseMode.ABORT))


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


def wave_to_proto(message: StartWave | WaveComplete | StartDpWave) -> pb.GroupWave:
    """The message for a wave's start or end."""
    return pb.GroupWave(epoch=message.epoch, wave=message.wave, pauses=pauses_to_proto(message.pauses))


def start_wave_from_proto(message: pb.GroupWave, rank: str) -> StartWave:
    """``rank`` is in the first exchange of a wave."""
    return StartWave(rank, message.epoch, checked("wave", message.wave), pauses_from_proto(message.pauses))


def wave_complete_from_proto(message: pb.GroupWave, rank: str) -> WaveComplete:
    """``rank`` says that a wave is over."""
    return WaveComplete(rank, message.epoch, checked("wave", message.wave), pauses_from_proto(message.pauses))


def start_dp_wave_from_proto(message: pb.GroupWave, rank: str) -> StartDpWave:
    """``rank`` is to be in a wave."""
    return StartDpWave(rank, message.epoch, checked("wave", message.wave), pauses_from_proto(message.pauses))


def report_to_proto(report: RankReport) -> pb.RankReport:
    """The message for a report."""
    return pb.RankReport(
        group=group_to_proto(report.group),
        wave=report.place.wave,
        step=report.place.step,
        pauses=pauses_to_proto(report.pauses),
        running=report.running,
        opening=report.opening,
        prepared=report.prepared,
    )


def report_from_proto(message: pb.RankReport, rank: str) -> RankReport:
    """Where ``rank`` is."""
    group, pauses = group_from_proto(message.group), pauses_from_proto(message.pauses)
    return RankReport(
        engine=rank,
        group=group,
        place=Place(group.epoch, checked("wave", message.wave), message.step, pauses.number),
        pauses=pauses,
        running=message.running,
        opening=message.opening,
        prepared=checked("prepared", message.prepared),
    )


def pool_group_to_proto(group: PoolGroup) -> pb.GroupView:
    """The message for a group of a view."""
    view = group.view
    members = view.group.members
    return pb.GroupView(
        model=group.model,
        pool=group.pool,
        group=group_to_proto(view.group),
        wave=view.wave,
        running=view.running,
        pauses=pauses_to_proto(view.pauses),
        routed_ranks=[members.index(rank) for rank in view.routed],
        target_size=group.target_size,
        suspended=group.suspended,
    )


def pool_group_from_proto(message: pb.GroupView) -> PoolGroup:
    """A group of a view. Ranks that it does not have are routed to as little."""
    group = group_from_proto(message.group)
    routed = tuple(group.members[rank] for rank in message.routed_ranks if rank < len(group.members))
    view = GroupView(group, message.wave, message.running, pauses_from_proto(message.pauses), routed)
    return PoolGroup(
        model=message.model,
        pool=message.pool,
        view=view,
        target_size=message.target_size,
        suspended=message.suspended,
    )
