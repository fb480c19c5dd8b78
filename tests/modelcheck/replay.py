"""Replay of real processes' traces through the state machines, with checks of the invariants."""

from dataclasses import dataclass
from pathlib import Path

from penstock_coordinator.group import GroupMachine
from penstock_enginecore.data_parallel.core.rank import Rank
from tests.modelcheck.history import BEATS, History, is_changing
from tests.modelcheck.trace import SUFFIX, Event, Machine, Trace, read
from tests.modelcheck.violation import Violation


@dataclass(frozen=True)
class Replayed:
    """Result of a replay.

    Attributes:
        steps: Number of steps of the group's first rank.
        rests: Number of times that the network was at rest.
    """

    machines: int
    events: int
    steps: int
    epochs: int
    rests: int

    def __str__(self) -> str:
        return (
            f"{self.events:,} events of {self.machines} machines: {self.epochs} epochs, {self.steps} steps; every machine did"
            f" what it does here, no invariant broke, and {self.rests} times all had come to rest"
        )


def replay(folder: Path) -> Replayed:
    """Replay the traces of one group's ranks and of its successive coordinators.

    Raises Violation if a machine reacted differently than in the replay, if a received message was never sent, or if an
    invariant is violated.
    """
    traces = traces_in(folder)
    for trace in traces:
        check_machine(trace)
    history = merged(traces)
    events = sum(len(trace.events) for trace in traces)
    return Replayed(len(traces), events, history.num_steps, len(history.groups) - 1, history.num_rests)


def traces_in(folder: Path) -> list[Trace]:
    """Return the traces in the folder. Raises Violation if there are none."""
    traces = [read(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    if not traces:
        raise Violation("there are no traces", str(folder))
    return traces


def at_rest(traces: list[Trace]) -> bool:
    """Return whether all ranks and the coordinator have repeated their state since the last change."""
    states = [trace.last for trace in traces]
    ranks = [state for state in states if isinstance(state, Rank)]
    changed = max(trace.changed for trace in traces)
    beats = ([e for e in trace.events if e.name == "repeat" and e.time > changed] for trace in traces)
    machine = next(state for state in states if isinstance(state, GroupMachine))
    return not is_changing(machine, ranks) and all(len(told) > BEATS for told in beats)


def check_machine(trace: Trace) -> None:
    """Check that the machine reacts to the recorded events as it did in the process."""
    state = trace.first
    if state != _new(state):
        raise Violation("a machine began in the middle", f"{trace.name}: {state}")
    for number, event in enumerate(trace.events, 1):
        if event.number != number:
            raise Violation("events are missing", f"{event.where} is event {event.number}, not {number}")
        try:
            after, sent = getattr(state, event.name)(**event.arguments)
        except Exception as e:
            raise Violation("a machine cannot have done this", f"{event.where}: {event.name} at {state}: {e!r}") from e
        if sent != event.sent:
            raise Violation("a machine does something else", f"{event.where}: {event.name}: {event.sent}, not {sent}")
        if after != event.after:
            raise Violation("a machine goes elsewhere", f"{event.where}: {event.name}: {event.after}, not {after}")
        state = after


def _new(state: Machine) -> Machine:
    if isinstance(state, Rank):
        return Rank(state.engine, interval=state.interval)
    return GroupMachine(state.size, state.min_size, state.waits, state.floor)


class _Process:
    """A trace, of which ``at`` events have been replayed."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.begun = False
        self.state = trace.first
        self.at = 0

    @property
    def next(self) -> Event:
        return self.trace.events[self.at]

    @property
    def time(self) -> int:
        """Time of the next event, or of the trace's start if it has not begun."""
        return self.next.time if self.begun else self.trace.time

    @property
    def where(self) -> str:
        """Location of the next event in the trace, for error messages."""
        return f"{self.next.where}: {self.next.name}" if self.begun else f"{self.trace.name}: its start"

    @property
    def over(self) -> bool:
        return self.begun and self.at == len(self.trace.events)

    def lacks(self, history: History) -> str:
        """Return the event that must happen before the next event of this trace; empty if none."""
        if self.begun:
            return history.lacks(self.state, self.next)
        waits = isinstance(self.state, GroupMachine) and history.machine is not None
        return "another coordinator is there" if waits else ""

    def go_on(self, history: History) -> None:
        if not self.begun:
            self.begun = True
            history.begin(self.state)
        else:
            event = self.next
            history.take(self.state, event)
            self.state, self.at = event.after, self.at + 1
        if self.over:
            history.end(self.state)


def merged(traces: list[Trace]) -> History:
    """Return all events in the order of the clock, except that every message is sent before it is received."""
    history = History([event for trace in traces for event in trace.events])
    processes = [_Process(trace) for trace in traces]
    while processes:
        processes.sort(key=lambda process: process.time)
        process = next((process for process in processes if not process.lacks(history)), None)
        if process is None:
            lacking = "; ".join(f"{process.where}: {process.lacks(history)}" for process in processes)
            raise Violation("something was received that was not sent", lacking)
        where = process.where
        try:
            process.go_on(history)
        except Violation as violation:
            raise Violation(violation.rule, f"{where}: {violation}") from violation
        processes = [process for process in processes if not process.over]
    return history
