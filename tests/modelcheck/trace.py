"""Traces of state machines in processes: one file per machine, one line per event."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from penstock_common.types.data_parallel import Reconfigure, StartDpWave
from penstock_coordinator.group import GroupMachine, ScaleRefused
from penstock_enginecore.data_parallel.core.rank import Effect, Rank
from tests.modelcheck.violation import Violation

Machine = Rank | GroupMachine
MACHINES: dict[str, type[Machine]] = {"Rank": Rank, "GroupMachine": GroupMachine}
SENT = {kind.__name__: kind for kind in (*get_args(Effect), StartDpWave, Reconfigure, ScaleRefused)}
SUFFIX = ".jsonl"


class Begin(msgspec.Struct, frozen=True):
    """First line of a trace. ``time`` is in nanoseconds of a monotonic clock; it orders only events that no message
    orders.
    """

    machine: str
    time: int
    state: msgspec.Raw


class Line(msgspec.Struct, frozen=True):
    """An event. ``number`` counts from 1. ``sent`` has the types and values of sent messages."""

    number: int
    time: int
    event: str
    arguments: dict[str, msgspec.Raw]
    sent: list[tuple[str, msgspec.Raw]]
    after: msgspec.Raw


class Event(NamedTuple):
    where: str
    """File and line of the event."""
    number: int
    time: int
    name: str
    arguments: dict[str, Any]
    sent: tuple[Any, ...]
    after: Machine

    @property
    def message(self) -> Any:
        """First argument of the event; None if it has no arguments."""
        return next(iter(self.arguments.values()), None)


class Trace(NamedTuple):
    name: str
    time: int
    first: Machine
    events: list[Event]

    @property
    def last(self) -> Machine:
        """Last state of the machine."""
        return self.events[-1].after if self.events else self.first

    @property
    def changed(self) -> int:
        """Time of the machine's last change."""
        states = [self.first, *(event.after for event in self.events)]
        times = [event.time for event, before in zip(self.events, states, strict=False) if event.after != before]
        return times[-1] if times else self.time


def events_of(machine: type) -> dict[str, Callable[..., tuple[Any, tuple[Any, ...]]]]:
    """Return the event methods of a machine by name. All public methods are events."""
    return {name: method for name, method in inspect.getmembers(machine, inspect.isfunction) if name[0] != "_"}


def read(path: Path) -> Trace:
    """Read the trace in a file. Raises Violation for an invalid line.

    An incomplete last line is ignored: the process was killed during the write, before it acted on the event.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    try:
        begin = msgspec.json.decode(whole[0], type=Begin)
        machine = MACHINES[begin.machine]
        first = msgspec.json.decode(begin.state, type=machine)
        return Trace(path.stem, begin.time, first, list(_events(path.stem, machine, whole[1:])))
    except (msgspec.MsgspecError, IndexError, KeyError) as e:
        raise Violation("a trace cannot be read", f"{path.name}: {type(e).__name__}: {e}") from e


def _events(name: str, machine: type[Machine], lines: list[bytes]) -> Iterator[Event]:
    hints = {event: get_type_hints(method) for event, method in events_of(machine).items()}
    for at, encoded in enumerate(lines, 2):
        line = msgspec.json.decode(encoded, type=Line)
        types = hints[line.event]
        arguments = {key: msgspec.json.decode(raw, type=types[key]) for key, raw in line.arguments.items()}
        sent = tuple(msgspec.json.decode(raw, type=SENT[kind]) for kind, raw in line.sent)
        after = msgspec.json.decode(line.after, type=machine)
        yield Event(f"{name}{SUFFIX}:{at}", line.number, line.time, line.event, arguments, sent, after)
