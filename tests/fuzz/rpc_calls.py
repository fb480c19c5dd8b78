"""Hostile calls over gRPC, and their results."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

import grpc
from google.protobuf import message_factory

from penstock_common.rpc.status import from_rpc_error
from tests.fuzz.blame import Blame
from tests.fuzz.rpcs import Rpc, messages

Metadata = Sequence[tuple[str, str | bytes]]
_HOSTILE_METADATA: tuple[tuple[str, str | bytes], ...] = (
    ("x-penstock-priority", "high"),
    ("x-penstock-priority", "9" * 5000),
    ("x-penstock-priority", "-2147483649"),
    ("x-penstock-data-parallel-rank", "-1"),
    ("x-penstock-data-parallel-rank", "1e3"),
    ("x-penstock-tenant", "t" * 4000),
    ("traceparent", "00-" + "0" * 32 + "-zz-99"),
    ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("tracestate", "=" * 2000),
    ("authorization", "Bearer " + "." * 3000),
    ("x-bin", b"\x00\xff"),
    ("grpc-status-details-bin", b"\xff" * 100),
    ("x-long", "l" * 20_000),
    ("x-huge", "h" * 80_000),
)
TIMEOUT = 30.0
"""Seconds within which small requests get an answer even on a busy machine. Late requests are repeated."""
_SERVERS_FAULT = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
)

_ANOTHER_TOOK_THE_NAME = ("register again", "has been replaced by")
"""Errors of the coordinator for a fake engine, when another one registers with the same name."""
_OF_THE_CLIENT = "Internal error from Core"
"""Message of gRPC's client when it cannot write to a call that the server has already ended."""


class Case(NamedTuple):
    """A call to make.

    Attributes:
        cancel: Seconds until the client disconnects.
        half: The client never closes its side of the stream.
        seed: Index of the RPC's valid message that it was made from.
        blame: Allowed answers, if known.
    """

    rpc: Rpc
    sent: list[bytes]
    metadata: Metadata = ()
    timeout: float = TIMEOUT
    cancel: float | None = None
    half: bool = False
    valid: bool = False
    seed: int = 0
    blame: Blame | None = None


class End(NamedTuple):
    """Result of a call.

    Attributes:
        code: Name of its status.
        problem: Why the status is wrong, or empty.
        slow: There was no answer in time. This is a problem only if there is also no answer without other load.
    """

    code: str
    problem: str = ""
    slow: bool = False


def make_case(rpc: Rpc, rng: Random) -> Case:
    """Return a hostile call of ``rpc``."""
    metadata: list[tuple[str, str | bytes]] = []
    if rng.random() < 0.1:
        metadata = [rng.choice(_HOSTILE_METADATA) for _ in range(rng.choice((1, 1, 2)))]
    elif rng.random() < 0.005:
        metadata = [(f"x-many-{i}", "v" * 20) for i in range(500)]
    endless = rpc.method in ("FrontendSession", "Watch", "SubscribeKvEvents")
    half = rpc.client_stream and rng.random() < 0.3
    cancel = None
    if endless or half:
        cancel = rng.choice((0.0, 0.005, 0.05, 0.3))
    elif rng.random() < 0.08:
        cancel = rng.choice((0.0, 0.001, 0.01, 0.05))
    timeout = rng.choice((0.001, 0.02, 0.5)) if rng.random() < 0.03 else TIMEOUT
    sent, seed = messages(rpc, rng)
    return Case(rpc, sent, metadata, timeout, cancel, half, seed=seed)


async def call(channel: grpc.aio.Channel, case: Case) -> End:
    """Make the call and read its answer to the end."""
    rpc = case.rpc
    kind = ("stream" if rpc.client_stream else "unary") + "_" + ("stream" if rpc.server_stream else "unary")
    started: Any = getattr(channel, kind)(rpc.path)
    given: Any = _stream(case) if rpc.client_stream else case.sent[0]
    try:
        running = started(given, metadata=tuple(case.metadata), timeout=case.timeout)
        async with asyncio.timeout(case.cancel):
            problem = await _read(running, rpc)
            code = await running.code()
    except TimeoutError:
        running.cancel()
        return End("(cancelled)")
    except asyncio.CancelledError:
        return End("(cancelled)")
    except grpc.aio.AioRpcError as e:
        code, problem = e.code(), ""
        if e.details() == _OF_THE_CLIENT:
            return End("(ended while sending)")
        if case.blame is not None:
            failed = from_rpc_error(e)
            problem = case.blame.of_status(code.name, failed.reason, failed.field, failed.message)
            late = code is grpc.StatusCode.DEADLINE_EXCEEDED and case.timeout > 5
            return End(f"{code.name} {failed.reason}", "" if late else problem, slow=late)
        if code in _SERVERS_FAULT and not any(word in (e.details() or "") for word in _ANOTHER_TOOK_THE_NAME):
            return End(code.name, f"{code.name}: {e.details()}")
        # The call may wait that long.
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and case.timeout > 5 and rpc.method != "FlushCache":
            return End(code.name, slow=True)
    except (UnicodeError, ValueError, grpc.aio.UsageError, TypeError) as e:
        return End("(unsendable)", "" if case.metadata else repr(e))
    if not problem and case.blame is not None:
        problem = case.blame.of_answer()
    if not problem and case.valid and code is not grpc.StatusCode.OK:
        problem = f"a valid request ended as {code.name}"
    return End(code.name, problem)


async def _read(running: Any, rpc: Rpc) -> str:
    """Return the problem with the answer, or an empty string."""
    problem = ""
    if not rpc.server_stream:
        message_factory.GetMessageClass(rpc.response).FromString(await running)
        return ""
    kind = message_factory.GetMessageClass(rpc.response)
    async for raw in running:
        for error in _errors(kind.FromString(raw)):
            if error.code in ("INTERNAL", "UNKNOWN", "DATA_LOSS"):
                problem = f"a request of the stream failed as {error.code}: {error.message}"
    return problem


def _errors(message: Any) -> Iterable[Any]:
    """Yield the errors of single requests inside an answer."""
    name = message.DESCRIPTOR.full_name
    if name == "penstock.inference.v1.GenerateSessionResponse" and message.HasField("error"):
        yield message.error.error
    elif name == "penstock.enginecore.v1.SessionResponse" and message.HasField("outputs"):
        yield from (output.error for output in message.outputs.outputs if output.HasField("error"))
        if message.outputs.utility_output.HasField("error"):
            yield message.outputs.utility_output.error


async def _stream(case: Case) -> AsyncIterator[bytes]:
    for message in case.sent:
        yield message
        await asyncio.sleep(0)
    if case.half:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(case.timeout)
