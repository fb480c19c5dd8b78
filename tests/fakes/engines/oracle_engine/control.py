"""Control of a running oracle engine through a loopback port: one JSON object as request, one as answer."""

import asyncio
from typing import Any

import msgspec

from tests.fakes.engines.oracle_engine.engine import OracleEngine
from tests.fakes.patience import PATIENCE

TIMEOUT = PATIENCE


async def serve(engine: OracleEngine, port: int) -> asyncio.Server:
    """Answer control calls on a port.

    ``{"set": {...}}`` sets knobs. ``{"until": {"num_running": 3}}`` waits until a value of the state has at least this
    size; for a list, its length counts. ``{"call": "fail"}`` calls a method: ``fail``, ``break`` or ``close``. The
    answer is ``{"state": ...}`` or ``{"error": ...}``.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                try:
                    await _carry_out(engine, msgspec.json.decode(line))
                    reply: dict[str, Any] = {"state": engine.state()}
                except (msgspec.MsgspecError, KeyError, TimeoutError) as e:
                    reply = {"error": f"{type(e).__name__}: {e}", "state": engine.state()}
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        except ConnectionError:
            pass  # the test has disconnected
        finally:
            writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", port)


async def _carry_out(engine: OracleEngine, command: dict[str, Any]) -> None:
    if "set" in command:
        engine.set(**command["set"])
    if "call" in command:
        calls = {
            "fail": lambda: engine.fail("a test asked for it"),
            "break": engine.break_streams,
            "close": engine.close_streams,
        }
        calls[command["call"]]()
    if "until" in command:
        wanted = command["until"]
        await engine.until(lambda _: all(_size(engine.state()[name]) >= size for name, size in wanted.items()), TIMEOUT)


def _size(value: Any) -> int:
    return value if isinstance(value, int) else len(value)


class ControlError(Exception):
    """Error of a control call."""


async def call(port: int, **command: Any) -> dict[str, Any]:
    """Make one control call and return the engine's state after it. Raises ControlError, or OSError if the engine is
    gone.
    """
    async with asyncio.timeout(TIMEOUT + 5):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(msgspec.json.encode(command) + b"\n")
            line = await reader.readline()
        finally:
            writer.close()
    if not line:
        raise ConnectionResetError("the engine went away before it answered")
    reply = msgspec.json.decode(line)
    if "error" in reply:
        raise ControlError(f"{reply['error']}; the engine's state: {reply['state']}")
    state: dict[str, Any] = reply["state"]
    return state
