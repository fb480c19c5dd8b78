"""HTTP endpoints: they read the body, apply limits and the deadline, send errors, and cancel the call when the client
disconnects.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from penstock_common.bounded_queue import TenantRoom
from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument, RequestFailed, ResourceExhausted, quoted
from penstock_common.types.request import RequestContext
from penstock_frontend.api.call_context import context_of_call, tenant_of_call
from penstock_frontend.api.http.request_body import Bodies, Body, ClientGone
from penstock_frontend.api.http.streaming import EventStream, send_json
from penstock_frontend.api.openai import errors
from penstock_frontend.api.openai.unknown_fields import client_of
from penstock_frontend.calls.admission import InFlight
from penstock_frontend.config import FairnessConfig, HttpConfig

REQUEST_ID = "x-request-id"
_SHORT_REQUEST_ID = "request-id"
"""Name of the header from which Anthropic's clients read the request id."""
TIMEOUT = "x-request-timeout"
PLAIN_TEXT = "text/plain; charset=utf-8"
_MAX_TIMEOUT = 86_400.0
"""Maximum timeout of a call that a client may set, in seconds."""


def id_headers(headers: Headers) -> dict[str, str]:
    """Return the headers of an answer that contain the call's id. If the client sent no id, the id is random."""
    request_id = headers.get(REQUEST_ID) or uuid.uuid4().hex
    return {REQUEST_ID: request_id, _SHORT_REQUEST_ID: request_id}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a call other than its body.

    Attributes:
        request_id: id of the call, which is the client's id or a random id.
        given_id: the client's id from the header. Empty if the client sent no id.
        context: the context for the requests of the call, read from the headers.
        path: the parameters in the path of the URL.
        query: the parameters in the query of the URL.
    """

    request_id: str
    given_id: str
    context: RequestContext
    path: Mapping[str, str]
    query: Mapping[str, str]

    def name(self, prefix: str, body_id: str | None = None) -> str:
        """Return the id of an answer. It begins with ``prefix``, which stands for the kind of the answer. The rest is
        the id from the header or the body, or a random id.
        """
        return f"{prefix}-{self.given_id or body_id or self.request_id}"


class PlainText(msgspec.Struct, frozen=True):
    """An HTTP answer that is text instead of JSON."""

    text: str


Answer: TypeAlias = msgspec.Struct | list[Any] | EventStream
"""Answer of a handler. Structs and lists are sent as JSON."""
Handler: TypeAlias = Callable[[Call, Body], Awaitable[Answer]]
"""Function that decodes the body of a call, closes the body once the call is admitted, and returns the answer."""
ErrorShape: TypeAlias = Callable[[Exception, str], errors.ErrorAnswer]
"""Function that formats an error for a protocol. The arguments of the function are the error and the id of the call."""


class Gate:
    """Limits the number of HTTP calls that are in progress. A call counts from the time at which its body was read.

    ``HttpConfig`` has the limits. When a limit is reached, calls of tenants that use more than their fair share are
    refused (see ``TenantRoom``).
    """

    def __init__(
        self,
        config: HttpConfig,
        fairness: Reread[FairnessConfig],
        on_refused: Callable[[ResourceExhausted, str, str], None],
    ) -> None:
        """Create the gate for one HTTP listener.

        For each HTTP call that a limit refuses, ``on_refused`` is called with the error, the call's tenant and the
        call's id.
        """
        self.on_refused = on_refused
        self._max_requests = config.max_requests
        self._fairness = fairness
        self._in_flight = InFlight()
        self._room = TenantRoom()

    @contextlib.contextmanager
    def open(self, tenant: str) -> Iterator[None]:
        """Count a call of a tenant while the call is served. Raises ResourceExhausted if a limit is reached."""
        weight = self._fairness.now.weight_of(tenant)
        if not self._room.takes_count(tenant, weight, 1, self._max_requests):
            raise ResourceExhausted(
                f"{self._in_flight.count} HTTP requests are being served; http.max_requests is {self._max_requests}",
                retry_after=self._in_flight.retry_after(1),
            )
        self._room.enter(tenant, weight)
        self._in_flight.enter()
        try:
            yield
        finally:
            self._in_flight.leave()
            self._room.leave(tenant)


class Endpoint:
    """ASGI application for one handler.

    The handler runs in a task of its own. When the client disconnects, this task is cancelled, and the requests of the
    call are aborted on the engines.
    """

    def __init__(self, gate: Gate, bodies: Bodies, handler: Handler, shape: ErrorShape = errors.answer) -> None:
        self._gate = gate
        self._shape = shape
        self._bodies = bodies
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP call."""
        headers = Headers(scope=scope)
        echo = id_headers(headers)
        request_id = echo[REQUEST_ID]
        try:
            with self._bodies.open(client_of(scope), headers.get("content-type", "")) as body:
                await body.read(receive, _announced(headers), headers.get("content-encoding", ""))
                with self._gate.open(tenant_of_call(headers)):
                    await _unless_gone(self._answer(headers, scope, request_id, body, send, echo), receive)
        except ClientGone:
            return
        except (ResourceExhausted, errors.HttpError) as e:
            if isinstance(e, ResourceExhausted):
                self._gate.on_refused(e, tenant_of_call(headers), headers.get(REQUEST_ID) or "")
            await send_error(send, e, echo, self._shape)

    async def _answer(
        self, headers: Headers, scope: Scope, request_id: str, body: Body, send: Send, echo: Mapping[str, str]
    ) -> None:
        warnings = self._bodies.warnings.begin(client_of(scope))
        try:
            answer = await self._handler(_call(headers, request_id, scope), body)
            whole = b"" if isinstance(answer, EventStream) else msgspec.json.encode(answer)
        except Exception as e:
            echo = {**echo, **warnings.headers}
            await send_error(send, errors.renamed(e, {}) if isinstance(e, RequestFailed) else e, echo, self._shape)
            return
        echo = {**echo, **warnings.headers}
        if isinstance(answer, EventStream):
            await answer.write(scope, send, echo)
        elif isinstance(answer, PlainText):
            await send_json(send, 200, answer.text.encode(), {**echo, "content-type": PLAIN_TEXT})
        else:
            await send_json(send, 200, whole, echo)


async def send_error(
    send: Send, error: Exception, headers: Mapping[str, str], shape: ErrorShape = errors.answer
) -> None:
    """Send an error as the answer to a call. ``headers`` contains the id of the call."""
    answer = shape(error, headers.get(REQUEST_ID, ""))
    await send_json(send, answer.status, answer.body, {**answer.headers, **headers})


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run ``work`` until its end. If the client disconnects before, cancel ``work``."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _call(headers: Headers, request_id: str, scope: Scope) -> Call:
    return Call(
        request_id=request_id,
        given_id=headers.get(REQUEST_ID, ""),
        context=context_of_call(headers, deadline=_deadline(headers.get(TIMEOUT))),
        path=scope.get("path_params", {}),
        query=QueryParams(scope.get("query_string", b"")),
    )


def _announced(headers: Headers) -> int | None:
    """Return the length of the body that the client announced, or None. The listener has checked that the header is a
    number.
    """
    length = headers.get("content-length")
    return None if length is None else int(length)


def _deadline(text: str | None) -> float | None:
    """Return the deadline that the text of a timeout header sets, in seconds since the Unix epoch, or None. Raises
    InvalidArgument if the text is not valid.
    """
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds <= _MAX_TIMEOUT:
        raise InvalidArgument(
            f"header {TIMEOUT} is {quoted(text)}; it must be a number of seconds above 0 and at most {_MAX_TIMEOUT:g}",
            field=TIMEOUT,
        )
    return time.time() + seconds
