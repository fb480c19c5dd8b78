"""Foreign connections to internal ports, and the streams that they must not disturb."""

import asyncio
import os
import resource
import socket
from typing import Any

import pytest

from penstock.inference.v1 import messages_pb2 as pb
from tests.fakes.network.sockets import listening
from tests.fakes.patience import PATIENCE
from tests.fuzz.internal_ports import foreign
from tests.fuzz.internal_ports.answering import speaks, still_answers
from tests.fuzz.internal_ports.foreign import Foreign, allow_files, said
from tests.fuzz.internal_ports.steady import Steady
from tests.fuzz.internal_ports.systems import KINDS, Port, internal


def test_what_is_said_depends_on_the_kind_and_the_number_alone() -> None:
    assert said("silent", 3) == b""
    assert said("random bytes", 3) == said("random bytes", 3) != said("random bytes", 4)
    assert len({said("huge lengths", number) for number in range(50)}) == len(foreign._HUGE)


def test_more_connections_than_the_system_allows_are_refused_at_once() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_files(10)
    if hard != resource.RLIM_INFINITY:
        with pytest.raises(ValueError, match="ulimit -Hn"):
            allow_files(hard)


async def test_foreign_connections_are_open_at_once_and_those_that_were_ended_are_counted() -> None:
    came: list[bytes] = []
    all_there, over = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(100)
        came.append(data)
        if len(came) == 12:
            all_there.set()
        if len(data) == 4:
            await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    assert (host, port) in listening([os.getpid()])
    connections = Foreign(host, port)
    await connections.open("huge lengths", 12, PATIENCE)
    await all_there.wait()
    assert sorted(came) == sorted(said("huge lengths", number)[:100] for number in range(12))
    wanted = sum(len(each) != 4 for each in came)
    while connections.num_ended() != wanted:
        await asyncio.sleep(0.01)
    assert connections.refused == 0
    connections.close()
    over.set()
    server.close()


async def test_a_port_that_speaks_no_protocol_answers_while_it_takes_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = Port("a", *listener.getsockname())
        assert await still_answers(port, "TCP")
    assert not await still_answers(port, "TCP")


async def test_a_port_that_speaks_http_is_known() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readline()).startswith(b"GET"):
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = Port("a", *server.sockets[0].getsockname())
    assert await speaks(port) == "HTTP"
    server.close()


def test_the_ports_of_frontends_are_not_internal() -> None:
    ports = [Port("frontend-0", "h", 1), Port("engine-0", "h", 2), Port("node of engine-0", "h", 3)]
    assert internal(ports) == ports[1:]


class _Call:
    def __init__(self, pieces: list[Any]) -> None:
        self._pieces = pieces

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self._pieces.pop(0) if self._pieces else None


class _System:
    """Answers the first round rightly, and one stream of the others with another token."""

    def __init__(self) -> None:
        self.stub = self
        self.calls = 0

    def Generate(self, request: pb.GenerateRequest, *, timeout: float) -> _Call:
        self.calls += 1
        first = request.token_ids.ids[0] + (self.calls == 5)
        return _Call([pb.GenerateResponse(token_ids=[first]), pb.GenerateResponse(token_ids=[2])])


async def test_another_answer_than_undisturbed_is_counted() -> None:
    steady = Steady(_System(), KINDS["group"], count=2, tokens=2)  # type: ignore[arg-type]
    await steady.learn()
    async with steady:
        await steady.answered(10)
    assert steady.problems == {"another answer than undisturbed": 1}
    assert steady.right >= 9
    assert steady.longest_gap(0.0) > 0
    steady.forget()
    assert steady.longest_gap(0.0) == 0
