"""The open sessions: where the busy loop's messages cross over to the I/O thread."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

import msgspec

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.incidents import incident
from penstock_common.logging import get_logger
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RequestError,
    UtilityOutput,
)
from penstock_enginecore.rpc import convert
from penstock_enginecore.rpc.traces import EngineTraces

log = get_logger()


class FrontendSession:
    """Messages on their way to one frontend, in order. Belongs to the I/O thread.

    The queue is not bounded: it holds what the frontend has not read of its own requests' output, and its requests are bounded.
    """

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.unsendable: set[str] = set()
        """Requests that have ended for the frontend because an output could not be encoded, and not yet for the engine."""
        self._messages: deque[pb.SessionResponse] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    def put(self, message: pb.SessionResponse) -> None:
        """Queue a message."""
        self._messages.append(message)
        self._arrived.set()

    def close(self) -> None:
        """No message follows those that are queued."""
        self._closed = True
        self._arrived.set()

    async def next(self) -> pb.SessionResponse | None:
        """The next message; None when the session is closed and empty."""
        while not self._messages:
            if self._closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()


class Sessions:
    """All open sessions, and the ``OutputSink`` of the busy loop.

    ``open`` and ``close`` belong to the I/O thread; the sink's methods may be called from any.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_draining: Callable[[float], None],
        traces: EngineTraces | None = None,
    ) -> None:
        """``on_draining`` is called once, on the I/O thread, with the seconds that are left. ``traces``: sees
        every request and output.
        """
        self.traces = traces
        self._loop = loop
        self._on_draining = on_draining
        self._sessions: dict[str, FrontendSession] = {}
        self._numbers = itertools.count()
        self._drained_at: float | None = None
        self.on_unsendable: Callable[[str, str], None] = lambda *_: None
        """Called on the I/O thread with client and request when an output could not be encoded: the request is of no use."""
        self.dead: str | None = None

    def open(self, frontend_id: str) -> FrontendSession:
        """A session under a name of its own: a frontend that reconnects is another client."""
        session = FrontendSession(f"{frontend_id}#{next(self._numbers)}")
        self._sessions[session.client_id] = session
        return session

    def welcome(self, session: FrontendSession, ready: pb.Ready) -> None:
        """Queue ``ready``, and ``draining`` behind it if that is the case."""
        session.put(pb.SessionResponse(ready=ready))
        if self._drained_at is not None:
            self._put_draining(session, max(self._drained_at - time.monotonic(), 0.0))

    def close(self, session: FrontendSession) -> None:
        """Forget a session."""
        self._sessions.pop(session.client_id, None)
        if self.traces is not None:
            self.traces.client_gone(session.client_id)

    def close_all(self) -> None:
        """Let every session end after what is queued."""
        for session in self._sessions.values():
            session.close()

    def __len__(self) -> int:
        return len(self._sessions)

    def emit(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        """Send a step's outputs to one frontend, or drop them if it has gone."""
        self._loop.call_soon_threadsafe(self._deliver, client_id, outputs)

    def broadcast(self, outputs: EngineCoreOutputs) -> None:
        """Send to every frontend that is there."""
        self._loop.call_soon_threadsafe(self._deliver_to_all, outputs)

    def draining(self, timeout: float) -> None:
        """Tell every frontend, and those still to come."""
        self._loop.call_soon_threadsafe(self._announce_draining, timeout)

    def engine_dead(self, reason: str) -> None:
        """Tell every frontend, then end the sessions."""
        self._loop.call_soon_threadsafe(self._announce_dead, reason)

    def _deliver(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        if self.traces is not None:
            self.traces.take(client_id, outputs)
        if (session := self._sessions.get(client_id)) is not None:
            if session.unsendable:
                outputs = _without(outputs, session.unsendable)
            session.put(pb.SessionResponse(outputs=self._encoded(session, outputs)))

    def _encoded(self, session: FrontendSession, outputs: EngineCoreOutputs) -> pb.EngineCoreOutputs:
        """The frame. What of it cannot be encoded ends its request alone, or is the answer of the one call."""
        try:
            return convert.outputs_to_proto(outputs)
        except Exception:
            encodable = [self._encodable(session, output) for output in outputs.outputs]
            answer = None if outputs.utility_output is None else _encodable_answer(outputs.utility_output)
            replaced = msgspec.structs.replace(outputs, outputs=encodable, utility_output=answer)
            return convert.outputs_to_proto(replaced)

    def _encodable(self, session: FrontendSession, output: EngineCoreOutput) -> EngineCoreOutput:
        """The output, or the end of its request when it cannot be encoded."""
        try:
            convert.output_to_proto(output)
        except Exception as e:
            if output.finish_reason is None:
                session.unsendable.add(output.request_id)
                self.on_unsendable(session.client_id, output.request_id)
            failed = incident(e, request=output.request_id, doing="encoding an output of the request")
            return EngineCoreOutput(
                request_id=output.request_id,
                attempt=output.attempt,
                offset=output.offset,
                finish_reason=FinishReason.ERROR,
                error=RequestError.from_exception(failed),
            )
        return output

    def _deliver_to_all(self, outputs: EngineCoreOutputs) -> None:
        message = pb.SessionResponse(outputs=convert.outputs_to_proto(outputs))
        for session in self._sessions.values():
            session.put(message)

    def _announce_draining(self, time_left: float) -> None:
        log.info("draining: new requests are refused", sessions=len(self._sessions))
        self._drained_at = time.monotonic() + time_left
        for session in self._sessions.values():
            self._put_draining(session, time_left)
        self._on_draining(time_left)

    def _put_draining(self, session: FrontendSession, time_left: float) -> None:
        session.put(pb.SessionResponse(draining=convert.draining_to_proto(time_left)))

    def _announce_dead(self, reason: str) -> None:
        self.dead = reason
        for session in self._sessions.values():
            session.put(pb.SessionResponse(engine_dead=pb.EngineDead(reason=reason)))
            session.close()


def _without(outputs: EngineCoreOutputs, ended: set[str]) -> EngineCoreOutputs:
    """The outputs less those of requests that ``ended`` for the frontend; one whose last output passes leaves the set."""
    left = [output for output in outputs.outputs if output.request_id not in ended]
    over = {output.request_id for output in outputs.outputs if output.finish_reason is not None} & ended
    finished = [request_id for request_id in outputs.finished_requests if request_id not in over]
    ended -= over
    return msgspec.structs.replace(outputs, outputs=left, finished_requests=finished)


def _encodable_answer(answer: UtilityOutput) -> UtilityOutput:
    """The answer to a call, or an error in its place when it cannot be encoded."""
    try:
        convert.utility_to_proto(answer)
    except Exception as e:
        failed = incident(e, request="", doing="encoding the answer of a utility call")
        return UtilityOutput(call_id=answer.call_id, error=RequestError.from_exception(failed))
    return answer
