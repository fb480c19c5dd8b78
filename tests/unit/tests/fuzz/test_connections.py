"""Hostile connections: generated from seed and number only, played step by step, and judged by the allowed answers."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.fakes.patience import PATIENCE
from tests.fuzz.connections.answers import Answer, Unreadable, answers_in, judge
from tests.fuzz.connections.client import Connection, Heard
from tests.fuzz.connections.limits import UNTIMED, Limits
from tests.fuzz.connections.script import (
    Script,
    Send,
    Step,
    UntilClosed,
    UntilHeard,
)
from tests.fuzz.connections.system import Amounts
from tests.fuzz.http2 import DATA, HEADERS, frames_in, header, raw_frame
from tests.fuzz.system import Held

PING = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\npong"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[tuple[str, int]]:
    """Run a server that calls ``serve`` with each connection, and then closes the connection."""
    served: set[asyncio.Task[None]] = set()

    async def ending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    running = await asyncio.start_server(ending, "127.0.0.1", 0)
    try:
        yield running.sockets[0].getsockname()[:2]
    finally:
        running.close()
        await asyncio.gather(*served)


def over_http(*steps: Step, **fields: object) -> Script:
    return Script("k", "http", steps, **fields)  # type: ignore[arg-type]


def ended(received: bytes, **fields: object) -> str:
    """Return the defect of these answers."""
    return judge(over_http(**fields), Heard(received, closed=True, late=False), {"ping": b"pong"}).problem


def test_answers_are_told_apart() -> None:
    chunked = b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    continued = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answers_in(PING + continued + chunked + PING[:-1]) == [
        Answer(200, b"pong", whole=True),
        Answer(404, b"abcde", whole=True),
        Answer(200, b"pon", whole=False),
    ]
    assert answers_in(b"") == answers_in(b"HTTP/1") == answers_in(PING[:20]) == []
    with pytest.raises(Unreadable, match="no answer"):
        answers_in(PING + b"garbage\r\n\r\n")


@pytest.mark.parametrize(
    ("received", "fields", "problem"),
    [
        (PING, {"known": "ping", "least": 1}, ""),
        (PING * 2, {}, "2 answers to 1 requests"),
        (PING, {"most": 3, "least": 3}, "1 answers to 3 requests"),
        (PING.replace(b"pong", b"ping"), {"known": "ping"}, "another answer: b'ping' where it is b'pong'"),
        (PING.replace(b"200", b"500"), {}, "it was answered 500: b'pong'"),
        (PING, {"allowed": frozenset({400})}, "it was answered 200: b'pong'"),
        (PING.replace(b"200", b"501"), {"allowed": frozenset({400, 501})}, ""),
        (b"nonsense\r\n\r\n", {}, "no answer but b'nonsense\\r\\n\\r\\n'"),
    ],
)
def test_answers_are_judged(received: bytes, fields: dict[str, object], problem: str) -> None:
    assert ended(received, **fields) == problem


def test_data_beyond_the_window_is_found() -> None:
    script = Script("k", "frontend", [], window=10)
    received = raw_frame(HEADERS, 4, 1, header(b"a", b"b")) + raw_frame(DATA, 0, 1, b"x" * 11)
    assert [frame.kind for frame in frames_in(received + b"\0\0\1")] == [HEADERS, DATA]
    assert judge(script, Heard(received, closed=False, late=False), {}).problem.startswith("11 bytes of data came")


def test_a_call_that_must_be_answered_is_told_with_what_it_ended_with() -> None:
    script = Script("k", "frontend", [], least=1)
    received = header(b"grpc-status", b"1") + header(b"grpc-message", b"CANCELLED") + b"\0\0\4\3"
    problem = judge(script, Heard(received, closed=False, late=False), {}).problem
    assert problem == "0 answers to 1 calls; the call ended with status 1 CANCELLED"


@pytest.mark.parametrize("step", [UntilClosed(), UntilHeard(re.compile(b"pong"))])
async def test_a_server_that_does_nothing_is_late(step: Step) -> None:
    over = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()

    script = over_http(Send(b"x"), step)
    async with server(serve) as address:
        found = await Connection(script, 0.2).play(address)
        over.set()
    assert judge(script, found, {}).slow


async def test_nobody_listens() -> None:
    async with server(lambda *_: asyncio.sleep(0)) as address:
        pass
    found = await Connection(over_http(), PATIENCE).play(address)
    assert judge(over_http(), found, {}).problem.startswith("no connection")


def test_waits_beyond_the_limits_are_told() -> None:
    waits = {"health": 1.5, "greedy": 2.0, "http": 0.9}
    assert [*Limits().exceeded(waits)] == [
        "greedy stood still for 2.00 s; the limit is 1 s",
        "/health was answered after 1.50 s; the limit is 1 s",
    ]
    assert not [*UNTIMED.exceeded(waits)]


def test_what_is_kept_beyond_the_limits_is_told() -> None:
    before = {"a": Amounts(Held(100, 5, 10, 7), frozenset({"x - y"}))}
    assert not [*Limits().kept(before, {"a": Amounts(Held(196, 9, 14, 11), frozenset({"p - q"}))})]
    kept = [*Limits().kept(before, {"a": Amounts(Held(197, 10, 15, 12), frozenset({"x - y", "p - q"}))})]
    assert [line.split(";")[0] for line in kept] == [
        "a holds 197 MiB of memory",
        "a holds 10 threads",
        "a holds 15 file descriptors",
        "a holds 2 connections",
        "a holds 12 asyncio tasks",
    ]
    assert kept[3].endswith("['p - q']")
