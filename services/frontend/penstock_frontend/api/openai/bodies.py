"""The bodies of HTTP calls, from their first byte until their calls are admitted."""

import asyncio
import codecs
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from prometheus_client import CollectorRegistry
from starlette.types import Receive

from penstock_common.errors import ResourceExhausted
from penstock_frontend.api.openai.body_encoding import Decompressor, decompressor_of
from penstock_frontend.api.openai.body_fields import decode
from penstock_frontend.api.openai.errors import HttpError
from penstock_frontend.api.openai.field_policy import FieldPolicy
from penstock_frontend.api.openai.json_size import check_json_size
from penstock_frontend.calls.admission import InFlight
from penstock_frontend.config import HttpConfig
from penstock_frontend.telemetry.call_warnings import WarningLog

_LARGE = 1024 * 1024
"""Bytes of a body from which on it takes a thread's time to make something of it."""

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818 - not an error of anybody's
    """The client hung up before its body was complete."""


class Bodies:
    """All bodies in memory, and those that are still being read. Limits are those of the HttpConfig.

    Where there are too many bytes the largest of the bodies that are being read gives way, where there are too many bodies
    the oldest: so clients that stall cannot keep others out.
    """

    def __init__(
        self, config: HttpConfig, registry: CollectorRegistry | None = None, warnings: WarningLog | None = None
    ) -> None:
        """``registry``: for the count of unknown fields; None counts nothing. ``warnings``: those of all protocols; None: their
        own.
        """
        self.config = config
        self.warnings = warnings or WarningLog(registry)
        self.policy = FieldPolicy(refuse=config.unknown_fields == "refuse", registry=registry)
        self.in_flight = InFlight()
        self._reading: dict[Body, None] = {}  # the oldest first

    def open(self, client: str) -> "Body":
        """The body of one more call, for a ``with`` block. ``client``: who calls, as ``client_of`` says."""
        return Body(self, client)

    def begin(self, body: "Body") -> None:
        """It is being read from now on."""
        limit = self.config.max_requests
        if len(self._reading) >= limit:
            oldest = next(iter(self._reading))
            oldest.give_way(f"{len(self._reading)} HTTP bodies are being read; http.max_requests is {limit}", 0)
        self._reading[body] = None

    def end(self, body: "Body") -> None:
        """It is not being read any more. Idempotent."""
        self._reading.pop(body, None)

    def make_room(self) -> None:
        """End the reading of bodies until the others are within the limit, or none is being read."""
        limit = self.config.max_body_bytes_in_flight
        while (total := self.in_flight.length) > limit and self._reading:
            largest = max(self._reading, key=lambda body: body.size)
            message = f"HTTP bodies of {total} bytes would be in memory; http.max_body_bytes_in_flight is {limit}"
            largest.give_way(message, total - limit)


class Body:
    """``with bodies.open(client) as body``: ``read`` it, ``decode`` it, ``close`` it as soon as its call is admitted.

    Until then its bytes count, those of what was made of it as well. Leaving the block closes it.
    """

    def __init__(self, bodies: Bodies, client: str) -> None:
        self.size = 0
        self._client = client
        self._bodies = bodies
        self._parts: list[bytes] = []
        self._read = False
        self._refusal: ResourceExhausted | None = None
        self._wait: asyncio.Timeout | None = None
        self._closed = False

    def __enter__(self) -> "Body":
        self._bodies.in_flight.enter()
        self._bodies.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """It does not count any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._bodies.end(self)
        self._parts.clear()
        self._bodies.in_flight.leave(self.size, served=self._read)

    async def read(self, receive: Receive, announced: int | None = None, encoding: str = "") -> None:
        """Read the whole body. ``announced``: its bytes, as its client says; ``encoding``: its ``Content-Encoding``.

        Raises HttpError 408 for one that is too slow, 413 for one that is too large, 415 and 400 for one that is compressed in an
        unknown way or damaged, ResourceExhausted for one that had to give way, ClientGone.
        """
        decompressor = decompressor_of(encoding)
        seconds = self._bodies.config.body_timeout
        if announced is not None:
            self._check_size(f"{announced}", announced)
        try:
            async with asyncio.timeout(seconds) as self._wait:
                await self._take(receive, decompressor)
        except TimeoutError:
            if self._refusal is not None:
                raise self._refusal from None
            raise HttpError(
                408,
                f"the body was not complete after {seconds:g} s, {self.size} bytes of it were there; http.body_timeout is "
                f"{seconds:g}",
                "body_timeout",
            ) from None
        finally:
            self._wait = None
            self._bodies.end(self)
        self._read = True

    async def decode(self, kind: type[T]) -> T:
        """The struct of the body, whose bytes are gone then. Raises InvalidArgument naming the field at fault."""
        data = b"".join(self._parts).removeprefix(codecs.BOM_UTF8)
        self._parts.clear()
        config = self._bodies.config
        await check_json_size(data, max_values=config.max_body_values, max_objects=config.max_body_objects)
        body = decode(data, kind)
        await self._bodies.policy.check(data, kind, self._client)
        return body

    async def converted(self, convert: Callable[[], T]) -> T:
        """What ``convert`` makes of the decoded body, off the event loop where that is large: it decodes frames of videos."""
        return await asyncio.to_thread(convert) if self.size > _LARGE else convert()

    def give_way(self, message: str, excess: int) -> None:
        """End the reading as ResourceExhausted with ``message``; ``excess``: bytes that there are too many."""
        self._refusal = ResourceExhausted(message, retry_after=self._bodies.in_flight.retry_after(1, excess))
        self._forget()
        self._bodies.end(self)
        if self._wait is not None:
            self._wait.reschedule(0)

    async def _take(self, receive: Receive, decompressor: Decompressor | None) -> None:
        limit, more = self._bodies.config.max_body_bytes, True
        while more:
            if self._refusal is not None:
                raise self._refusal
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            more = message.get("more_body", False)
            if decompressor is None:
                self._check_size(f"more than {limit}", self.size + len(part))
                self._keep(part)
                continue
            for piece in decompressor.pieces(part):
                self._check_size(f"more than {limit}", self.size + len(piece), decompressed=True)
                self._keep(piece)
                await asyncio.sleep(0)
                if self._refusal is not None:
                    raise self._refusal
        if decompressor is not None:
            decompressor.finish()
        if self._refusal is not None:
            raise self._refusal

    def _check_size(self, told: str, size: int, *, decompressed: bool = False) -> None:
        limit = self._bodies.config.max_body_bytes
        if size > limit:
            when = " when it is decompressed" * decompressed
            raise HttpError(
                413, f"the body has {told} bytes{when}; http.max_body_bytes is {limit}", "request_too_large"
            )

    def _keep(self, part: bytes) -> None:
        self._parts.append(part)
        self.size += len(part)
        self._bodies.in_flight.length += len(part)
        self._bodies.make_room()

    def _forget(self) -> None:
        self._bodies.in_flight.length -= self.size
        self.size = 0
        self._parts.clear()
