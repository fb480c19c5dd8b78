"""An endpoint's answers: the headers contain warnings that the handler adds before the first event of a stream."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument
from penstock_frontend.api.http.endpoint import Answer, Call, Endpoint, Gate, PlainText
from penstock_frontend.api.http.request_body import Bodies, Body
from penstock_frontend.api.http.streaming import EventStream
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.config import FairnessConfig, HttpConfig
from penstock_frontend.tenants import TenantRefusals


class Chunk(msgspec.Struct):
    """An event of a stream."""

    number: int


async def whole(call: Call, body: Body) -> Answer:
    warn(WarningKind.TOOL_LEFT_OUT, "tools[0]", "is left out")
    return PlainText("x")


async def streamed(call: Call, body: Body) -> Answer:
    async def chunks() -> AsyncGenerator[msgspec.Struct, None]:
        warn(WarningKind.TOOL_LEFT_OUT, "tools[0]", "is left out")
        yield Chunk(1)
        warn(WarningKind.TOOL_LEFT_OUT, "tools[1]", "comes too late for the header")
        yield Chunk(2)

    return await EventStream.started(chunks())


async def failing(call: Call, body: Body) -> Answer:
    warn(WarningKind.TOOL_LEFT_OUT, "tools[0]", "is left out")
    raise InvalidArgument("tool_choice names no tool", field="tool_choice")


async def quiet(call: Call, body: Body) -> Answer:
    return PlainText("x")


async def headers_of(handler: Any) -> dict[str, str]:
    http = HttpConfig()
    endpoint = Endpoint(
        Gate(http, Reread(FairnessConfig()), TenantRefusals("m", CollectorRegistry())), Bodies(http), handler
    )
    given: list[Any] = [{"type": "http.request", "body": b"{}", "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if given:
            return given.pop()
        return await asyncio.Event().wait()  # the client stays connected

    async def send(message: Any) -> None:
        sent.append(message)

    await endpoint({"type": "http", "headers": [], "path_params": {}, "path": "/"}, receive, send)
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize("handler", [whole, streamed, failing])
async def test_warnings_are_a_header(handler: Any) -> None:
    assert (await headers_of(handler))["penstock-warning"] == "tool_left_out: tools[0] is left out"


async def test_an_answer_without_warnings_has_no_such_header() -> None:
    assert "penstock-warning" not in await headers_of(quiet)
