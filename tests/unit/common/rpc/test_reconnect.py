import asyncio

import pytest
from structlog.testing import capture_logs

from penstock_common.errors import Unavailable
from penstock_common.rpc.reconnect import Reconnector
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
        (True, ["connected to the server", "no connection to the server; trying again"]),
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
    assert [line["event"] for line in logged] == ["no connection to the server; trying again"]
