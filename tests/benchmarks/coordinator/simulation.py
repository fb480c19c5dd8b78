"""Simulation of the coordinator's state and encoders without sockets, on a simulated clock."""

import time

import msgspec

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_coordinator.cluster import Cluster
from penstock_coordinator.config import CoordinatorConfig
from penstock_coordinator.rpc import convert
from penstock_coordinator.rpc.servicer import ProtoEncoder
from penstock_coordinator.view_channel import Subscription
from tests.benchmarks.coordinator.fleet import MODEL, quantile, register, report

STEP = 0.01
"""Simulated seconds between two checks for due events."""
REPORT_INTERVAL = 0.1
"""Seconds between two reports of an engine, unless the coordinator tells it otherwise."""


class Simulated(msgspec.Struct, frozen=True):
    """Results of a simulation. Times are in seconds, sizes in bytes of payload."""

    core_share: float
    """Seconds of processor time per simulated second."""
    bytes_per_second: float
    """Bytes per second that the coordinator sends to one frontend."""
    reports_per_second: float
    views_per_second: float
    """Views per second that the coordinator sends to one frontend."""
    lag_p50: float
    """Seconds from a membership change to the end of its encoding for all frontends."""
    lag_p99: float

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return msgspec.structs.asdict(self)


class Simulation:
    """Simulation of engines that report and of frontends that get every view. Sometimes an engine joins or leaves."""

    def __init__(self, engines: int, frontends: int, *, pools: int = 1, deltas: bool = True) -> None:
        """Prepare a simulation.

        Args:
            pools: Number of pools. Engines and frontends are distributed over the pools.
            deltas: Whether frontends accept view deltas.
        """
        self.now = 0.0
        self._config = CoordinatorConfig(restart_grace=0.0, lease_seconds=600.0)
        self._cluster = Cluster(self._config, lambda: self.now, ProtoEncoder())
        self._num_engines, self._num_frontends = engines, frontends
        self._pools = [f"pool-{number}" for number in range(pools)]
        self._sessions = [self._join(number) for number in range(engines)]
        self._streams = [
            self._cluster.subscribe(
                Subscription(model=MODEL, pools=frozenset([self._pools[number % pools]])), deltas=deltas
            )
            for number in range(frontends)
        ]
        self.sent_bytes = self.sent_views = self.reports = 0

    def run(self, seconds: float) -> Simulated:
        """Simulate ``seconds`` seconds. The membership changes about four times per second."""
        self.now = 10.0
        self._cluster.tick()
        self._send()
        self.sent_bytes = self.sent_views = 0
        began, steps, lags, tick_at = self.now, round(seconds / STEP), [], self.now
        changed_at: float | None = None
        newcomer = 0
        spent = 0.0
        for step in range(1, steps + 1):
            self.now = began + step * STEP
            messages = self._messages(step)
            processor = time.process_time()
            if step % 23 == 0:
                changed_at = self.now if changed_at is None else changed_at
                newcomer = self._change(newcomer)
            for number, message in messages:
                self._take(number, message)
            if self.now >= tick_at:
                self._cluster.tick()
                self._cluster.view()
                tick_at = self.now + self._cluster.sleep
            elif self._cluster.look.is_set():
                tick_at = min(tick_at, self.now + self._cluster.sleep)
            sent = self._send()
            took = time.process_time() - processor
            spent += took
            if sent and changed_at is not None:
                lags.append(self.now - changed_at + took)
                changed_at = None
        return Simulated(
            core_share=spent / seconds,
            bytes_per_second=self.sent_bytes / self._num_frontends / seconds,
            reports_per_second=self.reports / seconds,
            views_per_second=self.sent_views / self._num_frontends / seconds,
            lag_p50=quantile(lags, 0.5),
            lag_p99=quantile(lags, 0.99),
        )

    def _join(self, number: int) -> int:
        session = self._cluster.new_session()
        registration = convert.registration(register(number, pool=self._pools[number % len(self._pools)]))
        self._cluster.apply(self._cluster.membership.register(session, registration, self.now))
        return session

    def _change(self, newcomer: int) -> int:
        """Remove the newest engine, or add one. Returns its session; 0 if there is none."""
        if not newcomer:
            return self._join(self._num_engines)
        self._cluster.apply(self._cluster.membership.leave(newcomer))
        return 0

    def _messages(self, step: int) -> list[tuple[int, bytes]]:
        """Return the serialized reports of the engines that are due at this step."""
        told = self._cluster.report_interval((MODEL, self._pools[0])).newest or 0.0
        every = round(max(REPORT_INTERVAL, told) / STEP)
        return [(n, report(n, step).SerializeToString()) for n in range(step % every, self._num_engines, every)]

    def _take(self, number: int, message: bytes) -> None:
        stats = convert.load(pb.EngineReport.FromString(message).outputs)
        self._cluster.apply(self._cluster.membership.report(self._sessions[number], stats, self.now))
        self.reports += 1

    def _send(self) -> bool:
        """Encode all unsent changes for every frontend. Returns whether there were any."""
        before = self.sent_views
        for stream in self._streams:
            for view in stream.take():
                self.sent_bytes += len(view.data)
                self.sent_views += 1
        return self.sent_views > before
