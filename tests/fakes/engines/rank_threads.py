"""Ranks of a data-parallel group as threads: engines over fake executors, collectives in memory, the coordinator's
state machine.

Each forward pass, even a dummy pass, is a collective. A rank that steps alone or in another step breaks the group.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from penstock_common.types.data_parallel import (
    FirstRequest,
    PeerLost,
    PrepareFailed,
    RankReport,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
    rank_name,
)
from penstock_coordinator.group import GroupMachine
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.data_parallel.core.driver import GroupDriver
from penstock_enginecore.data_parallel.core.group_channels import Links, Named
from tests.fakes.engines.engine_harness import CLIENT, Transcript, make_engine
from tests.fakes.engines.thread_group import ThreadGroup, thread_group
from tests.fakes.patience import PATIENCE


class ThreadLink:
    """Link over a rank of a ``thread_group``. All ranks of an epoch find the group by the epoch's number."""

    def __init__(self, groups: dict, lock: threading.Lock, group, rank: int) -> None:
        with lock:
            if group.epoch not in groups:
                groups[group.epoch] = thread_group(len(group.members))
        self.group: ThreadGroup = groups[group.epoch][rank]
        self.collectives = self.group
        self.aborted = False

    def connect(self) -> None:
        if self.aborted:
            raise CollectiveBroken("it was given up")

    def exchange(self, row: bytes) -> list[bytes]:
        if self.aborted:
            raise CollectiveBroken("it was given up")
        return self.group.exchange(row)

    def abort(self) -> None:
        self.aborted = True
        self.group.abort()

    def close(self) -> None:
        self.group.close()


class MachineRoom:
    """The coordinator's state machine. While ``away`` is set, it receives and sends no messages."""

    def __init__(self, size: int, min_size: int = 1) -> None:
        self.lock = threading.RLock()
        self.machine = GroupMachine(size, min_size).recovered()[0]
        self.ranks: dict[str, RankThread] = {}
        self.away = False
        self.changed = threading.Condition(self.lock)

    def hear(self, message) -> None:
        with self.lock:
            if self.away:
                return
            machine = self.machine
            match message:
                case StartWave():
                    after = machine.start_wave(message)
                case WaveComplete():
                    after = machine.wave_complete(message)
                case RankReport():
                    after = machine.report(message)
                case PeerLost():
                    after = machine.peer_lost(message)
                case PrepareFailed():
                    after = machine.prepare_failed(message)
                case FirstRequest():
                    after = machine.first_request(message)
            self.then(after)

    def then(self, step) -> None:
        with self.lock:
            self.machine, sent = step
            for message in sent:
                self.deliver(message)
            self.changed.notify_all()

    def deliver(self, message) -> None:
        rank = self.ranks.get(message.engine)
        if rank is None:
            return
        if isinstance(message, Reconfigure):
            rank.driver.named(Named(message, {}))
        elif isinstance(message, StartDpWave):
            rank.loop.group_changed(message)

    def wait(self, condition) -> None:
        with self.lock:
            assert self.changed.wait_for(condition, PATIENCE)


class RankThread:
    """One rank: an engine with its busy loop."""

    def __init__(self, name: str, room: MachineRoom, groups: dict, lock: threading.Lock, **config: Any) -> None:
        self.name = rank_name(name, "1")
        self.room = room
        self.engine = make_engine(**config)
        self.executor = self.engine.executor
        self.transcript = Transcript()
        self.changed = threading.Condition()
        self.answers = {}
        self.error: BaseException | None = None
        links = Links(
            lambda group, _: ThreadLink(groups, lock, group, group.members.index(self.name)),
            self.engine.queues.group_changed,
        )
        self.driver = GroupDriver(self.name, self.engine, links)
        self.driver.to_coordinator = self.tell_coordinator
        self.driver.to_frontends = self.tell_frontends
        self.loop = BusyLoop(self.engine, EngineControl(self.engine, self.driver), self, group=self.driver)
        self.executor.on_execute = lambda: (
            self.enter_forward() if self.executor.steps[-1].num_scheduled_tokens else None
        )
        self.executor.on_dummy = self.enter_forward
        self.on_forward = lambda: None
        self.thread = threading.Thread(target=self.run, name=name)

    def tell_coordinator(self, message) -> None:
        self.room.hear(message)

    def tell_frontends(self, message: StartWave) -> None:
        """Deliver a message to a frontend, which forwards it to the other members that it knows."""
        for name in self.room.machine.group.members:
            if name != self.name:
                self.room.deliver(StartDpWave(name, message.epoch, message.wave, message.pauses))

    def enter_forward(self) -> None:
        self.on_forward()
        report = self.driver.report
        try:
            link = self.driver.links.link(report.group.epoch)
        except KeyError:
            raise CollectiveBroken("this rank was killed") from None
        link.exchange(repr(("forward", report.place)).encode())

    def run(self) -> None:
        try:
            self.loop.run()
        except BaseException as e:
            self.error = e

    def add(self, request, client_id=CLIENT) -> None:
        self.loop.add(client_id, request)

    def call(self, number: int, method: str, arguments: bytes = b"") -> None:
        self.loop.call_utility(CLIENT, number, method, arguments)

    # Methods of the output sink.

    def emit(self, client_id, outputs) -> None:
        with self.changed:
            self.transcript.add(outputs)
            if outputs.utility_output is not None:
                self.answers[outputs.utility_output.call_id] = outputs.utility_output
            self.changed.notify_all()

    def broadcast(self, outputs, to=None) -> None:
        pass

    def draining(self, timeout) -> None:
        pass

    def engine_dead(self, reason) -> None:
        pass

    def wait(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)

    def wait_for_ends(self, *requests) -> None:
        self.wait(lambda: all(request.request_id in self.transcript.ends for request in requests))


class Ranks:
    """A running group. ``room`` is its coordinator; ``config`` has config sections of its engines."""

    def __init__(self, room: MachineRoom, **config: Any) -> None:
        self.room = room
        self._config = config
        self._groups: dict = {}
        self._lock = threading.Lock()
        self.all: list[RankThread] = []

    def start(self, name: str) -> RankThread:
        rank = RankThread(name, self.room, self._groups, self._lock, **self._config)
        with self.room.lock:
            self.room.ranks[rank.name] = rank
        self.all.append(rank)
        rank.thread.start()
        self.room.hear(rank.driver.report)
        return rank

    def kill(self, rank: RankThread) -> None:
        """Simulate the death of a rank's process: it sends no more messages, and its connections break."""
        with self.room.lock:
            del self.room.ranks[rank.name]
        rank.driver.to_coordinator = lambda _: None
        rank.driver.to_frontends = lambda _: None
        rank.driver.links.close()
        self.room.then(self.room.machine.stream_broken(rank.name))

    def wait_until_idle(self) -> None:
        def idle() -> bool:
            reports = [rank.driver.report for rank in self.room.ranks.values()]
            return not any(report.running for report in reports) and len({r.place.wave for r in reports}) == 1

        wait_until(idle)


def wait_until(condition) -> None:
    """Wait for a condition that no message reports."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextlib.contextmanager
def running_ranks(count: int, *, min_size: int = 1, **config: Any) -> Iterator[Ranks]:
    """Start ``count`` ranks and wait until they have formed a group. ``config``: config sections of their engines."""
    ranks = Ranks(MachineRoom(count, min_size), **config)
    try:
        for i in range(count):
            ranks.start(f"rank-{i}")
        ranks.room.wait(lambda: ranks.room.machine.finished)
        yield ranks
    finally:
        for rank in ranks.all:
            rank.loop.request_shutdown(0.0)
        for rank in ranks.all:
            rank.thread.join(PATIENCE)
            rank.driver.links.close()
            assert not rank.thread.is_alive()
            assert rank.error is None, rank.error
