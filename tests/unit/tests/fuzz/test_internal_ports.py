"""Foreign connections to internal ports, and the streams that they must not disturb."""

import asyncio
import socket
from typing import Any

from penstock.inference.v1 import messages_pb2 as pb
from tests.fuzz.internal_ports.answering import still_answers
from tests.fuzz.internal_ports.steady import Steady
from tests.fuzz.internal_ports.systems import KINDS, Port


async def test_a_port_that_speaks_no_protocol_answers_while_it_takes_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = Port("a", *listener.getsockname())
        assert await still_answers(port, "TCP")
    assert not await still_answers(port, "TCP")


class _Call:
    def __init__(self, pieces: list[Any]) -> None:
        self._pieces = pieces

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self._pieces.pop(0) if self._pieces else None


class _System:
    """A system that answers the first round correctly. In later rounds, one stream has a wrong token."""

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
