"""The answer to one HTTP request, on its way to the connection."""

from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from penstock_frontend.api.http.pieces import PIECES, Pieces


class AnsweredConnection(Protocol):
    """The connection that an answer is sent on."""

    @property
    def is_old(self) -> bool:
        """Whether the connection ends with its next answer."""
        ...

    def leaves_rest(self, cycle: RequestResponseCycle) -> bool:
        """Whether more of the request's body is to come than is worth reading after the answer."""
        ...

    def discard_rest(self) -> None:
        """End the output, discard the input for a while, and close."""
        ...


class Answer:
    """Sends an answer with uvicorn's cycle, which knows neither connections that end early nor clients of HTTP/1.0.

    The answer has ``Connection: close`` when its connection is old, or when the rest of the request's body will not be read. An
    answer without a length to a client of HTTP/1.0 ends with its connection, since such clients do not know chunks.
    """

    def __init__(self, cycle: RequestResponseCycle, connection: AnsweredConnection) -> None:
        self._cycle = cycle
        self._connection = connection
        self._leaves_rest = False
        self._ends_by_closing = False

    def of(self, app: ASGIApp) -> ASGIApp:
        """The application, whose answer this one is."""

        async def answered(scope: Scope, receive: Receive, _: Send) -> None:
            if scope["http_version"] == "1.1":
                scope.setdefault("extensions", {})[PIECES] = Pieces(self._cycle)
            await app(scope, receive, self.send)

        return answered

    async def send(self, message: Message) -> None:
        """Send one ASGI message. Raises RuntimeError for one that is out of order."""
        cycle = self._cycle
        if message["type"] == "http.response.start" and not cycle.response_started:
            await self._start(message)
        elif self._ends_by_closing and message["type"] == "http.response.body":
            await self._write(message)
        elif self._leaves_rest and not message.get("more_body", False):
            cycle.keep_alive = True  # the cycle would close the connection, and the client might not read the answer
            await cycle.send(message)  # type: ignore[arg-type]  # of the same form
            self._connection.discard_rest()
        else:
            await cycle.send(message)  # type: ignore[arg-type]

    async def _start(self, message: Message) -> None:
        cycle = self._cycle
        headers: list[tuple[bytes, bytes]] = list(message.get("headers", []))
        self._leaves_rest = self._connection.leaves_rest(cycle)
        if (self._leaves_rest or self._connection.is_old) and CLOSE_HEADER not in headers:
            headers.append(CLOSE_HEADER)
        if cycle.scope["http_version"] == "1.0" and not any(name.lower() == b"content-length" for name, _ in headers):
            self._start_without_length(message["status"], [*cycle.default_headers, *headers])
        else:
            await cycle.send({**message, "headers": headers})  # type: ignore[arg-type]

    def _start_without_length(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._ends_by_closing = True
        cycle = self._cycle
        cycle.response_started = True
        if CLOSE_HEADER not in headers:
            headers.append(CLOSE_HEADER)
        if not cycle.disconnected:
            lines = [b"%b: %b\r\n" % header for header in headers]
            cycle.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n"]))

    async def _write(self, message: Message) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()
