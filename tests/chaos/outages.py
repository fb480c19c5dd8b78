"""Outages of services while requests run: the coordinator, a frontend, and each service in turn."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from tests.chaos.client import Client
from tests.chaos.doors import Doors
from tests.chaos.flow import Flow, catalogue
from tests.chaos.killing import address
from tests.chaos.outcome import Outcome
from tests.chaos.requests import Request, long_ones
from tests.chaos.summary import Summary
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster

Log = Callable[[str], object]
Known = Sequence[tuple[Request, Outcome]]
"""Requests with their outcomes without faults."""
RETRIES = 20
FREED_TIMEOUT = 60.0


class Step(msgspec.Struct, frozen=True):
    """Restart of a service.

    Attributes:
        stopped: Seconds from SIGTERM until the service has ended.
        serves: Seconds from SIGTERM until the service serves again.
    """

    service: str
    stopped: float
    serves: float
    requests: int


class FrontendKilled(msgspec.Struct, frozen=True):
    """Result of a killed frontend.

    Attributes:
        others: Summary of the surviving frontend's streams.
        broken: Number of the killed frontend's streams, by error code.
        freed: Seconds from the kill until no engine had requests of the killed frontend.
    """

    others: Summary
    broken: dict[str, int]
    freed: float


async def prepare(cluster: Cluster, *, streams: int, tokens: int) -> Known:
    """Return a catalogue of all long request shapes, of about ``tokens`` output tokens each.

    ``streams`` is the number of requests that are sent concurrently.
    """
    async with Client(*map(address, cluster.frontends)) as client:
        return await catalogue(client, long_ones(max(16, streams), tokens), streams=streams)


async def engines_killed(cluster: Cluster, known: Known, *, streams: int, kills: int, log: Log) -> Summary:
    """Kill and restart engines in turn. The next kill happens after the killed engine serves again."""
    async with Client(*map(address, cluster.frontends)) as client, Flow(client, known, streams=streams) as flow:
        for number in range(kills):
            await flow.next_requests(1)
            engine = cluster.engines[number % len(cluster.engines)]
            await engine.kill()
            log(f"engine-{number % len(cluster.engines)} killed, {flow.running} requests running")
            await engine.start()
            await engine.serving()
            await cluster.until_engines_are_seen(len(cluster.engines))
    return flow.summary


async def coordinator_away(
    cluster: Cluster, known: Known, *, streams: int, seconds: float, log: Log
) -> tuple[Summary, int]:
    """Kill the coordinator, and restart it ``seconds`` later.

    Returns the summary, and the number of requests that started without a coordinator.
    """
    async with Client(*map(address, cluster.frontends)) as client, Flow(client, known, streams=streams) as flow:
        await flow.next_requests(1)
        await cluster.coordinator.kill()
        log(f"coordinator killed, {flow.running} requests running")
        before = flow.sent
        await asyncio.sleep(seconds)
        during = flow.sent - before
        log(f"{during} requests begun meanwhile")
        await cluster.coordinator.start()
        await cluster.coordinator.serving()
        await cluster.until_engines_are_seen(len(cluster.engines))
        await flow.next_requests(streams)
    return flow.summary, during


async def frontend_killed(
    cluster: Cluster, known: Known, *, streams: int, log: Log, freeze: bool = False
) -> FrontendKilled:
    """Kill the first of two frontends, and restart it at the end. Each frontend has half of the streams.

    Args: freeze: Stop the frontend with SIGSTOP. Kill it only after the engines have dropped its requests. The
    engines see the same as after a power failure of the frontend's machine: connections stay open, and nothing
    answers.
    """
    victim, survivor = cluster.frontends
    half = streams // 2
    single = [
        (request, expected) for request, expected in known if len(expected.outputs) == 1
    ]  # one sequence per request, so the engines' request counts can be compared
    async with (
        Client(address(survivor)) as client,
        Client(address(victim)) as other,
        Flow(client, single, streams=half) as flow,
        Flow(other, single, streams=half) as doomed,
    ):
        await asyncio.gather(flow.next_requests(1), doomed.next_requests(1))
        log(f"{'freezing' if freeze else 'killing'} frontend-0, {doomed.running} requests running")
        doomed.end()
        killed = time.monotonic()
        if freeze:
            victim.send_signal(signal.SIGSTOP)
        else:
            await victim.kill()
        await _until_engines_have_at_most(cluster, lambda: flow.running)
        freed = time.monotonic() - killed
        log(f"its requests are gone after {freed:.2f} s")
        await flow.next_requests(half)
        if freeze:
            await victim.kill()
    await victim.start()
    await victim.serving()
    return FrontendKilled(others=flow.summary, broken=doomed.summary.errors, freed=freed)


async def _until_engines_have_at_most(cluster: Cluster, count: Callable[[], int]) -> None:
    async with asyncio.timeout(FREED_TIMEOUT):
        while True:
            stats = await cluster.stats()
            if sum(s.num_running_reqs + s.num_waiting_reqs for s in stats) <= count():
                return
            await asyncio.sleep(0.01)


async def rolling_restart(cluster: Cluster, known: Known, *, streams: int, log: Log) -> tuple[Summary, list[Step]]:
    """Restart each service in turn with SIGTERM. The next restart begins after the restarted service serves again.

    Clients use all frontends. A stopping frontend accepts no new connections, as behind a Kubernetes Service, so
    clients send their requests to the next frontend. The frontends' ``max_connection_age`` must be short, so that
    clients reconnect soon.
    """
    steps = []
    async with (
        Doors(cluster.frontends) as doors,
        Client(*doors.addresses, retries=RETRIES) as client,
        Flow(client, known, streams=streams) as flow,
    ):
        for name, service in _named(cluster):
            await flow.next_requests(1)
            before = len(flow.pairs)
            async with doors.closed(service):
                stopped, serves = await _restart(cluster, service)
            steps.append(Step(name, stopped, serves, len(flow.pairs) - before))
            log(f"{name} stopped within {stopped:.1f} s, serves again after {serves:.1f} s")
        await flow.next_requests(streams)
    return flow.summary, steps


def _named(cluster: Cluster) -> list[tuple[str, Service]]:
    engines = [(f"engine-{number}", engine) for number, engine in enumerate(cluster.engines)]
    frontends = [(f"frontend-{number}", frontend) for number, frontend in enumerate(cluster.frontends)]
    return [("coordinator", cluster.coordinator), *engines, *frontends]


async def _restart(cluster: Cluster, service: Service) -> tuple[float, float]:
    began = time.monotonic()
    code = await service.stop()
    stopped = time.monotonic() - began
    if code != 0:
        raise RuntimeError(f"{service.module} ended with {code}:\n{service.log()}")
    await service.start()
    await service.serving()
    await cluster.until_engines_are_seen(len(cluster.engines))
    return stopped, time.monotonic() - began
