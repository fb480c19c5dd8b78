"""History of a network of real processes: which events can come next, and the invariants at each step."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock_common.types.data_parallel import (
    FirstRequest,
    Pauses,
    PeerLost,
    PrepareFailed,
    RankGroup,
    RankReport,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
)
from penstock_coordinator.group import GroupMachine
from penstock_enginecore.data_parallel.core.rank import Exchange, Forward, Phase, Rank
from tests.modelcheck.invariants import (
    check_again,
    check_collective,
    check_epochs,
    check_expelled,
    check_forward,
    check_rank,
    check_rest,
    check_running,
    check_size,
    check_switch,
    check_told,
    check_twice,
)
from tests.modelcheck.protocol import Protocol
from tests.modelcheck.trace import Event, Machine

ANYBODY = ("start_dp_wave", "pause", "resume", "reconfigure")
"""Events of a rank that may be delivered twice."""
FROM_OUTSIDE = ("add", "first_request", "left_with", "pause", "resume", "scale")
"""Events that come from outside the network."""
BEATS = 2
"""Number of times that all processes must repeat their state without any effect before the network is at rest."""
_NO_PAUSE = Pauses()
_COORDINATOR = ""
Told = StartWave | WaveComplete | PeerLost | PrepareFailed | RankReport | StartDpWave | Reconfigure


class History:
    """Events of ranks and coordinator, in an order in which every message is sent before it is received.

    Frontends leave no traces. The check assumes that they may send any message that they could have derived from
    messages to them. When a rank registers, it may report any of its earlier states.
    """

    def __init__(self, events: list[Event]) -> None:
        """Args:
        events: All events that will be taken, in any order.
        """
        self.living: dict[str, Rank] = {}
        self.machine: GroupMachine | None = None
        self.num_rests = 0
        self.num_steps = 0
        self.groups = {RankGroup()}
        """Every group that the coordinator has named."""
        self._protocol = Protocol()
        self._to_come = Counter(_plain(event.message) for event in events if isinstance(event.message, Told))
        self._sent: Counter[Told] = Counter()
        self._received: Counter[Told] = Counter()
        self._reports: set[RankReport] = set()
        self._broken: set[tuple[str, int]] = set()
        self._waves = {(0, 0)}
        self._pauses = {_NO_PAUSE}
        self._named: set[tuple[Any, ...]] = set()
        self._collectives: dict[int, dict[str, list[Exchange | Forward]]] = defaultdict(lambda: defaultdict(list))
        self._beats: Counter[str] = Counter()

    # Start and end of processes.

    def begin(self, machine: Machine) -> None:
        """Record the start of a process."""
        self._rested(from_outside=True)
        if isinstance(machine, Rank):
            self.living[machine.engine] = machine
            self._reports.add(machine.report)
        else:
            self.machine = machine

    def end(self, machine: Machine) -> None:
        """Record the end of a process."""
        self._rested(from_outside=True)
        if isinstance(machine, Rank):
            del self.living[machine.engine]
        else:
            self.machine = None

    # Events.

    def lacks(self, before: Machine, event: Event) -> str:
        """Return the missing event that must happen before this one; empty if this event can be next."""
        message = event.message
        match message:
            case RankReport() if _registers(before, message):
                return "" if message in self._reports else "the rank has not been there"
            case StartWave() | WaveComplete() | PeerLost() | RankReport():
                return "" if self._under_way(message) else "nobody has sent it, or not as often"
            case PrepareFailed():  # a rank whose collective failed reports that it cannot prepare the next group
                failed = self._under_way(message) or (message.engine, message.epoch) in self._broken
                return "" if failed else "nobody has sent it"
            case StartDpWave() if not self._under_way(message):
                return self._lacks_wave(message.epoch, message.wave, message.pauses)
            case Reconfigure():  # After a new target size, the coordinator sends its current state again.
                told = self._sent[_plain(message)] or (not message.base and _named(message) in self._named)
                return "" if told else "nobody has sent it"
            case FirstRequest():
                return self._lacks_wave(message.epoch, message.wave)
        if event.name == "add":
            return self._lacks_wave(event.arguments["epoch"], event.arguments["wave"])
        if event.name == "gathered" and isinstance(before, Rank):
            return self._lacks_rows(before, message)
        return ""

    def _under_way(self, message: Told) -> bool:
        return self._sent[_plain(message)] > self._received[_plain(message)]

    def _lacks_wave(self, epoch: int, wave: int, pauses: Pauses = _NO_PAUSE) -> str:
        known = (epoch, wave) in self._waves and pauses in self._pauses
        return "" if known else "no frontend can have heard of that wave, and the coordinator has not sent it"

    def _lacks_rows(self, rank: Rank, rows: list[Any]) -> str:
        entered = self._collectives[rank.group.epoch]
        at = len(entered[rank.engine]) - 1
        if len(rows) != len(rank.group.members):
            return f"{len(rows)} rows are not those of {rank.group}"
        for member, row in zip(rank.group.members, rows, strict=True):
            theirs = entered[member][at : at + 1]
            if not theirs:
                return f"{member} has not entered the exchange"
            if not isinstance(theirs[0], Exchange) or theirs[0].row != row:
                return f"{member} is in {theirs[0]}"
        return ""

    def take(self, before: Machine, event: Event) -> None:
        """Take the event as the next one. Raises Violation if an invariant is violated."""
        from_outside = event.name in FROM_OUTSIDE or self._is_of_new_request(event.message)
        if from_outside or event.after != before:
            self._rested(from_outside=from_outside)
        elif event.name == "repeat":
            self._beats[event.after.engine if isinstance(event.after, Rank) else _COORDINATOR] += 1
        if isinstance(event.message, Told) and not _registers(before, event.message):
            self._received[_plain(event.message)] += 1
            self._to_come[_plain(event.message)] -= 1
        if isinstance(before, Rank) and isinstance(event.after, Rank):
            self._take_of_rank(before, event.after, event)
        elif isinstance(before, GroupMachine) and isinstance(event.after, GroupMachine):
            self._take_of_coordinator(before, event.after, event)
        self._sent.update(_plain(message) for message in event.sent if isinstance(message, Told))

    def _take_of_rank(self, before: Rank, after: Rank, event: Event) -> None:
        self.living[after.engine] = after
        self._reports.add(after.report)
        if after.phase is Phase.BROKEN:
            self._broken.add((after.engine, after.group.epoch))
        check_rank(before, after)
        check_switch(before, after, told=event.name in ("gathered", "reconfigure"))
        if event.name in ANYBODY:
            check_twice(self._protocol, before, after, event.name, event.message)
        for effect in event.sent:
            match effect:
                case StartWave():
                    self._hear(effect.epoch, effect.wave, effect.pauses)
                case Exchange(group):
                    self._enter(group.epoch, after.engine, effect)
                case Forward():
                    self.num_steps += after.group.members[0] == after.engine
                    others = [rank for name, rank in self.living.items() if name != after.engine]
                    check_forward(others, effect)
                    self._enter(effect.epoch, after.engine, effect)
        self._name(after.group, after.standby)

    def _enter(self, epoch: int, engine: str, collective: Exchange | Forward) -> None:
        entered = self._collectives[epoch]
        entered[engine].append(collective)
        at = len(entered[engine]) - 1
        check_collective([theirs[at] for theirs in entered.values() if len(theirs) > at], opening=at == 0)

    def _take_of_coordinator(self, before: GroupMachine, after: GroupMachine, event: Event) -> None:
        self.machine = after
        living = list(self.living.values())
        check_running(self._protocol, after.waves, living)
        check_expelled(before, after, living, event.name, event.message)
        check_size(before, after)
        check_again(after, event.name, **event.arguments)
        check_told(self._protocol, before, after, event.message, event.sent)
        self._name(after.group, after.standby, *(m.group for m in event.sent if isinstance(m, Reconfigure)))
        view = after.view
        self._hear(view.group.epoch, view.wave, view.pauses)
        self._named.add((view.group, view.wave, view.pauses))

    def _hear(self, epoch: int, wave: int, pauses: Pauses) -> None:
        """Record that frontends may know this epoch, wave and pauses."""
        self._waves.add((epoch, wave))
        self._pauses.add(pauses)

    def _name(self, *groups: RankGroup) -> None:
        if not self.groups.issuperset(groups):
            self.groups.update(groups)
            check_epochs(self.groups)

    # States at rest.

    def _is_of_new_request(self, message: Any) -> bool:
        """Return whether the message may be a frontend's report of a request that another rank has not received yet."""
        if not isinstance(message, StartDpWave) or self._under_way(message):
            return False
        return all(rank.phase in (Phase.IDLE, Phase.OUTSIDE) for rank in self.living.values())

    def _rested(self, *, from_outside: bool) -> None:
        """Record whether the network was at rest before a change. It was at rest if the change came from outside."""
        names = [_COORDINATOR, *self.living]
        if from_outside and all(self._beats[name] >= BEATS for name in names) and not self._pending():
            check_rest(self.machine, self.living, [r for r in self.living.values() if r.unfinished or r.held])
            self.num_rests += 1
        self._beats.clear()

    def _pending(self) -> bool:
        """Return whether an event is pending: a message in flight, the end of a collective, the detection of a death,
        or the restart of a coordinator. Reports do not count, because a lost report is repeated.
        """
        ranks = list(self.living.values())
        if self.machine is None or is_changing(self.machine, ranks) or any(self._computes(rank) for rank in ranks):
            return True
        told = (
            message for message, count in self._to_come.items() if count > 0 and not isinstance(message, RankReport)
        )
        return any(self._under_way(message) for message in told)

    def _computes(self, rank: Rank) -> bool:
        if rank.phase is not Phase.EXCHANGE:
            return rank.phase is Phase.FORWARD
        entered = self._collectives[rank.group.epoch]
        at = len(entered[rank.engine])
        return all(len(entered[member]) >= at for member in rank.group.members)


def is_changing(machine: GroupMachine, living: Sequence[Rank]) -> bool:
    """Return whether the coordinator must still learn which ranks live, or a rank must build its next group."""
    unknown = machine.recovering or machine.known != {rank.engine for rank in living}
    return unknown or any(rank.standby.epoch and not rank.ready for rank in living)


def _registers(before: Machine, message: Told) -> bool:
    """Return whether the message is a rank's registration, which its machine does not send."""
    return (
        isinstance(message, RankReport)
        and isinstance(before, GroupMachine)
        and message.engine not in before.known - before.broken
    )


def _plain(message: Any) -> Any:
    """Return the message without the target size, which no machine knows."""
    return msgspec.structs.replace(message, target_size=0) if isinstance(message, Reconfigure) else message


def _named(message: Reconfigure) -> tuple[Any, ...]:
    return message.group, message.wave, message.pauses
