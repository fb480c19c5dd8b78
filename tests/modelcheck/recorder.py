"""State machines that record each event before their caller acts on its effects."""

import contextlib
import functools
import inspect
import os
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from tests.modelcheck.trace import MACHINES, SUFFIX, Begin, Line, Machine, events_of


class Recorder(contextlib.ExitStack):
    """Writes one file per machine into a folder, until the recorder is closed. Classes from ``maker`` replace the
    machine classes in a service.

    Each machine gets a subclass, which handles an event like the machine and then records the event. All events are
    recorded. Each line is a single write to the file, so recorded events survive SIGKILL.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._made = 0

    def maker(self, name: str, machine: type[Machine] | None = None) -> Callable[..., Machine]:
        """Return a factory of recorded machines of this name. ``machine`` sets another class, for example one with a
        defect.
        """
        machine = machine or MACHINES[name]

        def make(*args: Any, **kwargs: Any) -> Machine:
            self._made += 1
            path = self._folder / f"{name}-{os.getpid()}-{self._made}{SUFFIX}"
            record = _Record(self.enter_context(path.open("xb", buffering=0)))
            events = {event: _recorded(method, record) for event, method in events_of(machine).items()}
            made = msgspec.defstruct(f"Recorded{name}", [], bases=(machine,), namespace=events, frozen=True)
            state = made(*args, **kwargs)
            record.write(Begin(name, time.monotonic_ns(), _raw(state)))
            return state

        return make


class _Record:
    """Writer of one machine's trace."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.written = 0

    def write(self, line: Begin | Line) -> None:
        encoded = msgspec.json.encode(line) + b"\n"
        if self._file.write(encoded) != len(encoded):
            raise OSError(f"{self._file.name}: no space for a line")
        self.written += 1


def _recorded(event: Callable[..., Any], record: _Record) -> Callable[..., Any]:
    signature = inspect.signature(event)

    @functools.wraps(event)
    def happens(self: Machine, *args: Any, **kwargs: Any) -> Any:
        after, sent = event(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = {key: _raw(value) for key, value in list(bound.arguments.items())[1:]}
        told = [(type(message).__name__, _raw(message)) for message in sent]
        record.write(Line(record.written, time.monotonic_ns(), event.__name__, arguments, told, _raw(after)))
        return after, sent

    return happens


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
