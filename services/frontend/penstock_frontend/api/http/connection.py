"""A connection of the HTTP listener, which does not wait for ever for what its client has begun to send, and does not last for
ever.
"""

import asyncio
import math
import random
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from penstock_frontend.api.http.pieces import PIECES, Pieces
from penstock_frontend.api.openai.errors import HttpError, answer

_JITTER = 0.1
"""Part of ``max_age`` by which connections live longer or shorter, so that not all clients come back at once."""


class HttpConnection(H11Protocol):
    """uvicorn's, with deadlines for what no handler of a request waits for.

    Headers must be complete within ``header_timeout`` seconds from their first byte, and what is left of a body whose request
    has been answered within as many from the answer. Otherwise, and while no request is on its way, the connection is idle:
    uvicorn closes it after ``timeout_keep_alive``, also a new one. Bodies that are read have a deadline where they are read.

    It ends by ``Connection: close`` in an answer, the first after ``max_age`` seconds (infinite: never), or after
    ``end_with_next_answer``: closed while it is idle, it would fail the request that its client is just sending.
    """

    header_timeout = 10.0
    max_age = math.inf
    _deadline: asyncio.TimerHandle | None = None
    _ends_at = math.inf

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        served = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if self.loop.time() >= self._ends_at:
                self._end_with_this_answer()
            if scope["http_version"] == "1.1":  # clients of 1.0 know no pieces
                scope.setdefault("extensions", {})[PIECES] = Pieces(self.cycle)
            await served(scope, receive, send)

        self.app = app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._ends_at = self.loop.time() + self.max_age * random.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        self._watch()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered, or on its way."""
        cycle: RequestResponseCycle | None = self.cycle
        return bool((cycle is not None and not cycle.response_complete) or self.conn.trailing_data[0])

    def end_with_next_answer(self) -> None:
        """Let the connection end with the answer that has not begun yet, or with the next one."""
        self._ends_at = 0.0
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_started:
            self._end_with_this_answer()

    def _end_with_this_answer(self) -> None:
        if CLOSE_HEADER not in self.cycle.default_headers:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """A request was answered; the next one may have come already."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._disarm()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start or stop the clock, as the connection's state wants it."""
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        state, answered = self.conn.their_state, cycle is None or cycle.response_complete
        if self.transport.is_closing():
            self._disarm()
        elif answered and (state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0])):
            if self._deadline is None:
                self._deadline = self.loop.call_later(self.header_timeout, self._too_slow)
        else:
            self._disarm()
            if answered and state is h11.IDLE and self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            seconds = f"{self.header_timeout:g}"
            message = f"the headers were not complete after {seconds} s; http.header_timeout is {seconds}"
            body = answer(HttpError(408, message, "header_timeout")).body
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            events = (
                h11.Response(status_code=408, headers=list(headers.items()), reason=b"Request Timeout"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event))
        self._unset_keepalive_if_required()
        self.transport.close()


def connections(header_timeout: float, max_age: float) -> type[HttpConnection]:
    """The class of connections with that deadline and age, in seconds: what uvicorn makes one of for every client."""
    return type("HttpConnection", (HttpConnection,), {"header_timeout": header_timeout, "max_age": max_age})
