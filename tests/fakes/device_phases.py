"""Phases whose rows do nothing, for tests of the runner. tests/device/faults.py has rows with effects."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.device.faults import KINDS
from tests.device.phases import ALWAYS, Phase, Row, Settings, Stage

_HERE = "tests.fakes.device_phases"
PHASES = [
    Phase("second", f"{_HERE}:second", seconds=10, worth=1),
    Phase("first", f"{_HERE}:first", seconds=10, worth=2),
    Phase("apart", f"{_HERE}:apart", seconds=100, worth=1, isolated=True),
    Phase("host", f"{_HERE}:host", seconds=10, step=1, host=True),
]
BROKEN = Phase("broken", f"{_HERE}:not_there")
HANGING = Phase("hanging", f"{_HERE}:hanging")
NO_DEVICE = Phase("machine", f"{_HERE}:no_device", step=ALWAYS)


class Model:
    """State that the rows of a stage share."""

    def told(self) -> dict[str, Any]:
        """Return the computing function."""
        return {"computing": "fakes"}


@contextmanager
def _model() -> Iterator[Model]:
    yield Model()


def _row(name: str, limit: float = 60.0) -> Row:
    return Row(name, lambda built: {"value": 1.5, "pid": os.getpid(), "built": built is not None}, limit)


def first(settings: Settings) -> list[Stage]:
    """Return two stages that build something."""
    rows = [_row(f"row {i}") for i in range(4)]
    return [Stage("model", rows, _model), Stage("other", [_row("last")], _model)]


def second(settings: Settings) -> list[Stage]:
    """Return rows that share nothing."""
    return [Stage("rows", [_row("one"), _row("two")])]


def apart(settings: Settings) -> list[Stage]:
    """Return rows that run in separate processes."""
    return [Stage("rows", [_row(f"check {i}") for i in range(3)])]


def host(settings: Settings) -> list[Stage]:
    """Return a row that needs no device."""
    return [Stage("rows", [_row("compile")])]


def hanging(settings: Settings) -> list[Stage]:
    """Return a row that hangs, whose limit is short, between others."""
    return [Stage("rows", [_row("before"), Row("hangs", lambda _: KINDS["hang"]() or {}, 1.0), _row("behind")])]


def no_device(settings: Settings) -> list[Stage]:
    """Return the stages of a machine without a GPU."""
    return [Stage("machine", [Row("machine", lambda _: {"device": "none", "capability": None})])]
