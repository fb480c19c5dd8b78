"""Unchanged traces replay. Every change of a trace is detected, and so is a defect of a machine."""

import shutil
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock_common.types.data_parallel import PauseMode, Reconfigure, StartDpWave
from penstock_coordinator.group import GroupMachine
from penstock_enginecore.data_parallel.core.rank import Exchange, Forward, Prepare, Rank
from tests.modelcheck import mutations
from tests.modelcheck.history import BEATS
from tests.modelcheck.messages import NAMES
from tests.modelcheck.recorder import Recorder
from tests.modelcheck.replay import at_rest, check_machine, merged, replay, traces_in
from tests.modelcheck.trace import read
from tests.modelcheck.violation import Violation

STEPS = 2
SAID_BY_ALL = "start_wave"
"""Message that a coordinator gets from every rank. Networks may lose or reorder it, so a check sees only its number."""
RANK_EVENTS = {StartDpWave: "start_dp_wave", Reconfigure: "reconfigure"}


class Network:
    """Recorded ranks and their coordinator in one thread. Messages come in the order in which they are sent."""

    def __init__(self, recorder: Recorder, rank: type[Rank] = Rank, group: type[GroupMachine] = GroupMachine) -> None:
        self._new_rank = recorder.maker("Rank", rank)
        self.machine: Any = recorder.maker("GroupMachine", group)(2, floor=7)
        self.ranks: dict[str, Any] = {}
        self._left: dict[str, int] = {}
        self._entered: dict[str, Exchange] = {}
        self._next: deque[Any] = deque()

    def rank_comes(self, name: str) -> None:
        self.ranks[name], self._left[name] = self._new_rank(name), 0
        self.coordinator("report", self.ranks[name].report)

    def coordinator(self, event: str, *args: Any, **kwargs: Any) -> None:
        self.machine, sent = getattr(self.machine, event)(*args, **kwargs)
        for message in sent:
            self._next.append(partial(self.rank, message.engine, RANK_EVENTS[type(message)], message))

    def rank(self, name: str, event: str, *args: Any, **kwargs: Any) -> None:
        self.ranks[name], effects = getattr(self.ranks[name], event)(*args, **kwargs)
        for effect in effects:
            match effect:
                case Exchange(group):
                    self._entered[name] = effect
                    if all(m in self._entered and self._entered[m].group == group for m in group.members):
                        rows = [self._entered.pop(member).row for member in group.members]
                        self._next.extend(partial(self.rank, member, "gathered", rows) for member in group.members)
                case Forward():
                    self._left[name] = max(self._left[name] - 1, 0)
                    self._next.append(partial(self.rank, name, "stepped", unfinished=self._left[name] > 0))
                case Prepare(group):
                    self._next.append(partial(self.rank, name, "prepared", group.epoch))
                case _ if type(effect) in NAMES:
                    self._next.append(partial(self.coordinator, NAMES[type(effect)], effect))

    def add(self, name: str) -> None:
        self._left[name] = STEPS
        view = self.machine.view
        self.rank(name, "add", view.group.epoch, view.wave)

    def run(self, events: int = 200) -> None:
        """Run events until none is left, or until the limit shows that they never end."""
        while self._next and events:
            self._next.popleft()()
            events -= 1

    def beat(self) -> None:
        for _ in range(BEATS + 1):
            for name in self.ranks:
                self.rank(name, "repeat")
            self.coordinator("repeat")
            self.run()


def record(folder: Path, **defects: Any) -> Path:
    """Record a group of two ranks that grows to three, with waves, a pause that waits, and a pause that keeps requests."""
    folder.mkdir()
    with Recorder(folder) as recorder:
        live(Network(recorder, **defects))
    return folder


def live(network: Network) -> None:
    network.coordinator("founded", 2, min_size=1, waits=False)
    for name in "ab":
        network.rank_comes(name)
    network.coordinator("recovered")
    network.run()
    for mode in (PauseMode.WAIT, PauseMode.KEEP):
        network.add("a")
        network.rank("b", "pause", network.ranks["b"].pauses.pause(mode))
        network.run()
        network.beat()
        network.add("b")
        network.rank("a", "resume", network.ranks["a"].pauses.resume())
        network.run()
        network.beat()
    network.rank_comes("c")
    network.coordinator("scale", 3)
    network.add("a")
    network.run()
    network.add("c")
    network.run()
    network.beat()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("traces") / "whole")


class Lines:
    """The lines of a trace, to be changed and written back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.whole = read(path)
        self._written = path.read_bytes()
        self.lines = [msgspec.json.decode(line) for line in self._written.splitlines()]

    def write(self, lines: list[Any], *, numbered: bool = True) -> None:
        """Write the lines. With ``numbered`` they are numbered again, so that the numbers do not show the change."""
        if numbered:
            lines = [lines[0], *({**line, "number": number} for number, line in enumerate(lines[1:], 1))]
        self.path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def restore(self) -> None:
        self.path.write_bytes(self._written)

    def counts(self, at: int) -> bool:
        """Return whether the machine cannot reach its next state without this line."""
        before, line = self.lines[at - 1], self.lines[at]
        return bool(line["after"] != before.get("after", before.get("state"))) and line["event"] != SAID_BY_ALL


@pytest.fixture
def traces(recorded: Path, tmp_path: Path) -> list[Lines]:
    """Return the traces, copied to a folder of the test."""
    folder = shutil.copytree(recorded, tmp_path / "traces")
    return [Lines(path) for path in sorted(folder.iterdir())]


def found(changed: Lines, traces: list[Lines]) -> bool:
    """Return whether the check finds the change in a trace."""
    try:
        trace = read(changed.path)
        check_machine(trace)
        merged([trace if other is changed else other.whole for other in traces])
    except Violation:
        return True
    return False


def test_what_machines_did_replays(recorded: Path) -> None:
    replayed = replay(recorded)
    assert replayed.machines == 4
    assert replayed.epochs == 2
    assert replayed.steps > 3 * STEPS
    assert replayed.rests == 5
    assert at_rest(traces_in(recorded))


def test_a_rank_rests_while_its_first_group_waits_for_another_one_that_starts_late(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        network = Network(recorder)
        network.coordinator("founded", 2, min_size=1, waits=False)
        network.coordinator("recovered")
        for name in "ab":
            network.rank_comes(name)
            network.run()
            network.beat()
    replayed = replay(tmp_path)
    assert (replayed.epochs, replayed.rests) == (1, 2)


def test_a_group_that_has_work_is_not_at_rest(traces: list[Lines]) -> None:
    rank = traces[1]
    rank.write(rank.lines[: -BEATS - 1])
    assert not at_rest(traces_in(rank.path.parent))


def test_every_dropped_event_is_found(traces: list[Lines]) -> None:
    for trace in traces:
        for at in range(1, len(trace.lines) - 1):
            trace.write(trace.lines[:at] + trace.lines[at + 1 :], numbered=False)
            assert found(trace, traces), trace.lines[at]
            if trace.counts(at):
                trace.write(trace.lines[:at] + trace.lines[at + 1 :])
                assert found(trace, traces), trace.lines[at]
        trace.restore()


def test_every_swapped_event_is_found(traces: list[Lines]) -> None:
    for trace in traces:
        for at in range(1, len(trace.lines) - 1):
            swapped = [*trace.lines[:at], trace.lines[at + 1], trace.lines[at], *trace.lines[at + 2 :]]
            trace.write(swapped, numbered=False)
            assert found(trace, traces), trace.lines[at]
            if trace.counts(at) or trace.counts(at + 1):
                trace.write(swapped)
                assert found(trace, traces), trace.lines[at : at + 2]
        trace.restore()


def altered(value: Any) -> Iterator[Any]:
    """Yield copies of the value with one number or boolean changed.

    The target size is skipped: machines pass it on without using it.
    """
    match value:
        case bool():
            yield not value
        case int():
            yield value + 1
        case list():
            for at, part in enumerate(value):
                yield from ([*value[:at], other, *value[at + 1 :]] for other in altered(part))
        case dict():
            for key, part in value.items():
                if key != "target_size":
                    yield from ({**value, key: other} for other in altered(part))


@pytest.mark.parametrize("part", ["arguments", "sent", "after"])
def test_every_altered_event_is_found(traces: list[Lines], part: str) -> None:
    tried = 0
    for trace in traces:
        for at, line in enumerate(trace.lines[1:], 1):
            for other in altered(line[part]):
                trace.write([*trace.lines[:at], {**line, part: other}, *trace.lines[at + 1 :]])
                assert found(trace, traces), (line, other)
                tried += 1
        trace.restore()
    assert tried > 100


def test_a_trace_that_is_not_there_is_found(traces: list[Lines]) -> None:
    for trace in traces:
        trace.path.unlink()
        with pytest.raises(Violation):
            replay(trace.path.parent)
        trace.restore()


def test_a_line_that_was_being_written_counts_for_nothing(traces: list[Lines]) -> None:
    trace = traces[-1]
    trace.path.write_bytes(trace.path.read_bytes() + b'{"number":')
    assert not found(trace, traces)


def test_time_orders_nothing_that_messages_order(traces: list[Lines]) -> None:
    for trace in traces[:2]:
        trace.write([{**line, "time": 0} for line in trace.lines])
    replay(traces[0].path.parent)


@pytest.mark.parametrize(
    ("defects", "rule"),
    [
        ({"rank": mutations.ExchangesWhenIdle}, "1"),
        ({"rank": mutations.StartsOnlyOlderWaves}, "2"),
        ({"rank": mutations.CountsNoWaves}, "4"),
        ({"rank": mutations.WaitsForItsOwnBroadcast}, "5"),
        ({"rank": mutations.ObeysOldPauses}, "6"),
        ({"rank": mutations.StepsInAPause}, "7"),
        ({"rank": mutations.SwitchesUnasked}, "14"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_defect_of_a_machine_is_found_twice(tmp_path: Path, defects: dict[str, Any], rule: str) -> None:
    traces = traces_in(record(tmp_path / "defect", **defects))
    with pytest.raises(Violation, match="a machine"):
        for trace in traces:
            check_machine(trace)
    with pytest.raises(Violation) as broken:
        merged(traces)
    assert broken.value.rule.split()[0] == rule
