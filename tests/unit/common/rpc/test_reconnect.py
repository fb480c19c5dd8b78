"""Sessions that are started again when they end, and the end of the loop that does so."""

import asyncio
import random
import socket

import pytest
from structlog.testing import capture_logs

from penstock_common.errors import Unavailable
from penstock_common.rpc.reconnect import Backoff, Reconnector, refuses
from tests.fakes.patience import PATIENCE

TIMEOUT = PATIENCE


async def test_sessions_are_started_again_whatever_they_end_with():
    ends = [None, Unavailable("away"), TimeoutError(), ValueError("a defect")]
    enough = asyncio.Event()

    async def session():
        if not ends:
            enough.set()
            return
        if (end := ends.pop()) is not None:
            raise end

    reconnector = Reconnector(session, peer="server", max_delay=0.01)
    running = asyncio.create_task(reconnector.run())
    async with asyncio.timeout(TIMEOUT):
        await enough.wait()
        await reconnector.close()
        await running


async def test_connected_is_true_from_established_to_the_end_of_the_session():
    seen, go = asyncio.Event(), asyncio.Event()

    async def session():
        assert not reconnector.connected
        reconnector.established()
        seen.set()
        await go.wait()

    reconnector = Reconnector(session, peer="server", max_delay=60.0)
    running = asyncio.create_task(reconnector.run())
    async with asyncio.timeout(TIMEOUT):
        await seen.wait()
        assert reconnector.connected
        await reconnector.close()
        await running
    assert not reconnector.connected


async def test_close_cancels_a_session_that_does_not_end():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def session():
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    reconnector = Reconnector(session, peer="server", max_delay=1.0)
    running = asyncio.create_task(reconnector.run())
    async with asyncio.timeout(TIMEOUT):
        await started.wait()
        await reconnector.close(grace=0.01)
        await running
    assert cancelled.is_set()


async def test_close_lets_a_session_end_within_the_grace():
    started, leave, said_goodbye = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def session():
        started.set()
        await leave.wait()
        said_goodbye.set()

    reconnector = Reconnector(session, peer="server", max_delay=1.0)
    running = asyncio.create_task(reconnector.run())
    async with asyncio.timeout(TIMEOUT):
        await started.wait()
        leave.set()
        await reconnector.close(grace=TIMEOUT)
        await running
    assert said_goodbye.is_set()


async def test_close_ends_a_long_pause_and_works_before_run():
    failed = asyncio.Event()

    async def session():
        failed.set()
        raise Unavailable("away")

    reconnector = Reconnector(session, peer="server", max_delay=1000.0)
    running = asyncio.create_task(reconnector.run())
    async with asyncio.timeout(TIMEOUT):
        await failed.wait()
        await reconnector.close()
        await running
        early = Reconnector(session, peer="server", max_delay=1000.0)
        await early.close()
        await early.run()


async def test_cancelling_run_cancels_the_session():
    started = asyncio.Event()

    async def session():
        started.set()
        await asyncio.Event().wait()

    reconnector = Reconnector(session, peer="server", max_delay=1.0)
    running = asyncio.create_task(reconnector.run())
    async with asyncio.timeout(TIMEOUT):
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await reconnector.close()


@pytest.mark.parametrize(
    ("logs_sessions", "lines"),
    [
        (True, ["connected to the server", "no connection to the server; retrying"]),
        (False, []),
    ],
)
async def test_the_end_of_a_session_is_logged_by_one_of_both(logs_sessions, lines):
    """Sessions that log their own begin and end would have every event in the log twice."""
    ends = [None, None]
    enough = asyncio.Event()

    async def session():
        if not ends:
            enough.set()
            raise Unavailable("away")
        ends.pop()
        reconnector.established()

    reconnector = Reconnector(session, peer="server", max_delay=0.01, logs_sessions=logs_sessions)
    with capture_logs() as logged:
        running = asyncio.create_task(reconnector.run())
        async with asyncio.timeout(TIMEOUT):
            await enough.wait()
            await reconnector.close()
            await running
    assert [line["event"] for line in logged] == 2 * lines


async def test_a_server_that_was_never_there_is_logged_once_whoever_logs_sessions():
    tries = []
    enough = asyncio.Event()

    async def session():
        tries.append(1)
        if len(tries) == 3:
            enough.set()
        raise Unavailable("away")

    reconnector = Reconnector(session, peer="server", max_delay=0.01, logs_sessions=False)
    with capture_logs() as logged:
        running = asyncio.create_task(reconnector.run())
        async with asyncio.timeout(TIMEOUT):
            await enough.wait()
            await reconnector.close()
            await running
    assert [line["event"] for line in logged] == ["no connection to the server; retrying"]


def test_delays_double_up_to_the_maximum_and_are_shortened_by_at_most_half():
    backoff = Backoff(initial=0.1, maximum=1.0, rng=random.Random(1))
    for full in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert full / 2 <= backoff.next() <= full


def test_reset_starts_from_the_beginning():
    backoff = Backoff(initial=0.1, maximum=1.0)
    for _ in range(5):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 0.1


def test_a_lowered_maximum_holds_at_once():
    backoff = Backoff(initial=0.1, maximum=10.0)
    for _ in range(10):
        backoff.next()
    backoff.maximum = 0.5
    assert backoff.next() <= 0.5


def test_clients_do_not_come_back_at_the_same_time():
    assert len({Backoff(initial=1.0, maximum=1.0).next() for _ in range(100)}) > 90


# Whether a process listens at an address.


async def test_a_port_refuses_connections_only_without_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not await refuses(address, within=10.0)
    assert await refuses(address, within=10.0)


async def test_who_accepts_nothing_refuses_nothing() -> None:
    """The full queue of connections drops packets, like a network without an answer."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(listening.getsockname())
        assert not await refuses(f"127.0.0.1:{listening.getsockname()[1]}", within=0.01)


@pytest.mark.parametrize("address", ["nowhere.invalid:1", "127.0.0.1:x", "127.0.0.1"])
async def test_an_address_that_cannot_be_reached_tells_nothing(address: str) -> None:
    assert not await refuses(address, within=0.01)
