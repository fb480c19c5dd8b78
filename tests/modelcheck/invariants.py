"""Invariants of every state of a network, and of states at rest. Messages begin with the invariant's number."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock_common.types.data_parallel import (
    FirstRequest,
    PauseMode,
    Pauses,
    PrepareFailed,
    RankGroup,
    RankReport,
    StartDpWave,
    StartWave,
)
from penstock_coordinator.group import GroupMachine, Waves
from penstock_enginecore.data_parallel.core.rank import Exchange, Forward, Phase, Rank, ResumeRefused
from tests.modelcheck.protocol import Protocol
from tests.modelcheck.violation import Violation


def broken(protocol: Protocol, rule: str, detail: str) -> None:
    if rule.split()[0] not in protocol.unchecked:
        raise Violation(rule, detail)


# Invariants of a rank.


def check_rank(old: Rank, new: Rank) -> None:
    """Check the invariants of a rank between two of its states."""
    there, here = new.place, old.place
    if there.wave < here.wave or (there.epoch, there.wave, there.step) < (here.epoch, here.wave, here.step):
        raise Violation("4 a wave decreased", f"{here} -> {there}")
    if new.pauses < old.pauses:
        raise Violation("6 a turn of pause and resume was taken back", f"{old.pauses} -> {new.pauses}")


def check_switch(old: Rank, new: Rank, *, told: bool) -> None:
    """Check that a rank in service changes its epoch only after an exchange or if the coordinator ``told`` it to."""
    if new.group != old.group and old.phase is not Phase.OUTSIDE and not told:
        raise Violation("14 a rank switches alone", str(old))


def check_twice(protocol: Protocol, old: Rank, new: Rank, name: str, message: Any) -> None:
    """Check that a message that may be sent twice changes nothing when it is received again."""
    again, more = getattr(new, name)(message)
    if again != new or any(type(effect) is not ResumeRefused for effect in more):
        broken(protocol, "6 a duplicate changes something", f"{message} at {new}: {more}")
    pending = old.pauses.on and not old.paused
    if name == "resume" and pending and new != old:
        broken(protocol, "9 a resume was taken before the pause was complete", f"{message} at {old}")


# Invariants between ranks.


def check_collective(entered: Sequence[Exchange | Forward], *, opening: bool) -> None:
    """Check that all ranks in a collective of an epoch are in the same collective. ``opening``: whether it is the
    epoch's first.
    """
    if len({type(collective) for collective in entered}) > 1:
        raise Violation("1 ranks are in different collectives", str(entered))
    places = {_place_of(collective, opening=opening) for collective in entered}
    if len(places) > 1:
        raise Violation("4 ranks in one collective are in different places", str(entered))


def _place_of(collective: Exchange | Forward, *, opening: bool) -> tuple[Any, ...]:
    if isinstance(collective, Exchange):
        row = collective.row
        return row.epoch, row.step, None if opening else row.wave
    return collective.epoch, collective.wave, collective.step, collective.pauses


def check_forward(living: Iterable[Rank], step: Forward) -> None:
    """Check the forward passes of a step.

    Args:
        living: The other living ranks, of any epoch.
    """
    others = [rank for rank in living if rank.group.epoch == step.epoch]
    told = [rank.pauses for rank in others if rank.paused and rank.pauses > step.pauses]
    paused = [rank for rank in others if rank.paused and rank.pauses == step.pauses]
    waits = step.pauses.mode is PauseMode.WAIT
    if step.pauses.on and not waits:
        raise Violation("7 a step during a pause", str(step))
    if told or (paused and (not waits or len(paused) == len(others) > 0)):
        raise Violation("7 a step after a pause was complete", f"{step} {told}")


# Invariants of the coordinator.


def check_running(protocol: Protocol, waves: Waves, living: Sequence[Rank]) -> None:
    """Check the coordinator's record of the running wave.

    Args:
        living: All living ranks.
    """
    here = waves.group.epoch, waves.wave
    if not waves.running or not {rank.engine for rank in living}.issuperset(waves.group.members):
        return
    if not any(
        (rank.group.epoch, rank.wave) > here or ((rank.group.epoch, rank.wave) == here and rank.phase is not Phase.IDLE)
        for rank in living
    ):
        broken(protocol, "5 the coordinator says running of a wave that nobody is in", str(waves))


def check_expelled(old: GroupMachine, new: GroupMachine, living: Sequence[Rank], name: str, message: Any) -> None:
    """Check that living ranks stay in the group when the coordinator changes it, unless a rank reported that it cannot.

    ``name`` is the event's name.
    """
    if new.group == old.standby:
        left = [r for r in living if r.engine in old.group.members and r.group != new.group and not r.ready]
        if left:
            raise Violation("14 a change is taken as done that is not", str(left))
    if new.highest == old.highest or new.group.epoch != new.highest or new.group == old.standby:
        return
    if type(message) is PrepareFailed or (type(message) is RankReport and message.group == new.group):
        return
    if old.recovering and name != "recovered":
        raise Violation("16 a coordinator decides before all had time to report", str(new.group))
    lost = {r.engine for r in living if r.group == old.group} & set(old.group.members) - set(new.group.members)
    if lost:
        raise Violation("15 a rank that lives is expelled", f"{lost} by {new.group}")


def check_size(old: GroupMachine, new: GroupMachine) -> None:
    """Check that a new group has at least ``min_size`` members."""
    if new.highest > old.highest and new.group.epoch == new.highest and len(new.group.members) < new.min_size:
        raise Violation("15 a group is named that is too small", str(new))


def check_epochs(groups: Iterable[RankGroup]) -> None:
    """Check that every epoch belongs to one group."""
    known = set(groups)
    if len({group.epoch for group in known}) < len(known):
        raise Violation("16 an epoch was given out twice", str(known))


# Invariants of the coordinator and of frontends.


def check_again(after: Any, name: str, *arguments: Any, **more: Any) -> None:
    """Check that an event that may be delivered twice has no effect the second time."""
    if name in ("peer_lost", "scale", "repeat", "recovered"):
        return
    again, _ = getattr(after, name)(*arguments, **more)
    if again != after:
        raise Violation("6 a duplicate changes something", f"{name} {arguments or more} at {after}")


def check_told(protocol: Protocol, before: Any, after: Any, message: Any, sent: Any) -> None:
    told = {start.engine for start in sent if isinstance(start, StartDpWave)}
    excluded = set(after.view.group.members) - told if told else set()
    if isinstance(message, FirstRequest) and excluded:
        broken(protocol, "3 a rank is excluded that reported no start", f"{excluded} after {message}")
    if isinstance(message, StartWave) and excluded - {message.engine}:
        raise Violation("3 a rank is excluded that reported no start", f"{excluded} after {message}")
    recovering = getattr(after, "recovering", False)
    if not recovering and (after.view.group.epoch, after.view.wave) < (before.view.group.epoch, before.view.wave):
        raise Violation("11 what is known of a wave goes back", f"{before} -> {after}")


# Invariants of states at rest.


def check_rest(machine: GroupMachine | None, living: Mapping[str, Rank], live: object) -> Pauses | None:
    """Check that all work is done in a state at rest, and return the active pause, if any.

    Args:
        machine: The coordinator's machine, or None without a coordinator.
        living: Living ranks by name.
        live: Unfinished requests, if any.
    """
    # The group waits for more ranks.
    if machine and len(living) < (machine.min_size if machine.group.epoch else machine.size):
        return None
    groups = [machine.group] if machine else [rank.group for rank in living.values()]
    names = max(groups, key=lambda group: group.epoch).members
    if any(name not in living for name in names):
        raise Violation("15 the group waits for a rank that is dead", str(machine))
    ranks = [living[name] for name in names]
    waiting = [rank for rank in ranks if rank.phase is not Phase.IDLE]
    if waiting and (machine or live):
        raise Violation("2 a rank waits for ever", str(waiting))
    if any(rank.phase is not Phase.OUTSIDE for name, rank in living.items() if name not in names):
        raise Violation("20 a rank outside of the group thinks that it is in it", str(living))
    _check_agreed(machine, ranks, waiting)
    if ranks[0].pauses.on and not waiting:
        if not all(rank.paused for rank in ranks):
            raise Violation("8 a pause is never complete", str(ranks))
        return ranks[0].pauses
    if live:
        raise Violation("2 a request is never run", f"{live} of {living}")
    return None


def _check_agreed(machine: GroupMachine | None, ranks: Sequence[Rank], waiting: Sequence[Rank]) -> None:
    if not waiting:
        if len({rank.pauses for rank in ranks}) > 1:
            raise Violation("7 a pause or resume has not reached all", str(ranks))
        if len({rank.wave for rank in ranks}) > 1:
            raise Violation("4 idle ranks are in different waves", str(ranks))
    if machine is None:
        return
    if machine.waves.running:
        raise Violation("5 the coordinator says running for ever", str(machine))
    if {(r.group, r.wave) for r in ranks} != {(machine.group, machine.waves.wave)}:
        raise Violation("4 coordinator and ranks are in different waves", f"{machine} {ranks}")
    if not machine.finished or machine.standby.epoch or machine.recovering:
        raise Violation("14 a change is never over", str(machine))
