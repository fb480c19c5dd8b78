"""Sessions of frontends with this engine. The sessions pass messages from the busy loop to the I/O thread."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from penstock.common.v1 import data_parallel_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import ResourceExhausted
from penstock_common.observability.logging import get_logger, incident
from penstock_common.rpc.by_field import to_message
from penstock_common.rpc.handshake import ANNOUNCED_SINCE, COLUMNS_SINCE
from penstock_common.rpc.outputs import chunk_to_proto
from penstock_common.tensors.chunks import (
    DEFAULT_MAX_MESSAGE_BYTES,
    MAX_TENSOR_BYTES,
    MAX_UNANNOUNCED_BYTES,
    Buffer,
    Chunk,
    IncomingTensors,
    Limits,
    Outgoing,
    TensorPool,
    TensorRef,
)
from penstock_common.tensors.shared_memory import SegmentReader
from penstock_common.types.data_parallel import StartWave
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs
from penstock_enginecore.config import SessionsConfig
from penstock_enginecore.media.core.receiver_cache import ReceiverCache
from penstock_enginecore.rpc import convert
from penstock_enginecore.rpc.frames import FrameBatch, encoded, split, too_large, unsendable
from penstock_enginecore.rpc.request_tensors import FeatureReader, PromptReader
from penstock_enginecore.rpc.traces import EngineTraces

_WRAPPING_BYTES = 16
"""Maximum number of bytes by which a message is larger than its frame."""


class FrontendSession:
    """Session of one frontend: the queued messages to the frontend, and the readers of the tensors in its requests.
    Only the I/O thread may use the object.

    The queue has no size limit. The queue contains only outputs of the frontend's requests that are not sent yet, and
    the number of requests is limited. No message exceeds the frontend's size limit (see ``rpc/frames.py``). Large
    vectors of pooling outputs are sent in chunks before the message with the output.
    """

    def __init__(
        self, client_id: str, limits: Limits, revision: int, incarnation: str = "", pool: TensorPool | None = None
    ) -> None:
        """Create a session.

        Args:
            client_id: The session's id.
            limits: Message size limits of the frontend.
            revision: Protocol revision of the stream.
            incarnation: The frontend's incarnation.
            pool: Limit on the chunked tensors of all sessions together. The code that closes the session must also
                close ``prompts.tensors``.
        """
        self._batches = revision >= COLUMNS_SINCE
        self._batch = FrameBatch()
        self.client_id = client_id
        self.incarnation = incarnation
        self.max_tensor_bytes = MAX_TENSOR_BYTES if revision >= ANNOUNCED_SINCE else MAX_UNANNOUNCED_BYTES
        """Maximum total size in bytes of the chunked tensors that the session stores."""
        if pool is not None:
            self.max_tensor_bytes = min(self.max_tensor_bytes, pool.max_bytes)
        announced = revision >= ANNOUNCED_SINCE
        self.prompts = PromptReader(IncomingTensors(self.max_tensor_bytes, announced=announced, pool=pool))
        self.features: FeatureReader | None = None
        """Reader of media in requests, or None if the engine accepts no media."""
        self._limits = limits
        self._outgoing: Outgoing[pb.SessionResponse] = Outgoing(_chunk)
        self._outgoing.limit(limits)
        self._ended: set[str] = set()
        """Ids of requests that ended for the frontend because an output could not be sent, but that have not ended in
        the engine yet.
        """
        self._arrived = asyncio.Event()
        self._closed = False

    def put(self, message: pb.SessionResponse) -> None:
        """Queue a message to the frontend."""
        self._batch = FrameBatch()  # Start a new batch, because later frames must be sent after this message.
        self._outgoing.put(lambda _: message)
        self._arrived.set()

    def put_outputs(self, outputs: EngineCoreOutputs, frame: pb.EngineCoreOutputs | None = None) -> list[str]:
        """Queue the outputs of a step. ``frame`` is the frame with these outputs, if they were already encoded.

        Return the ids of requests that end now, because one of their outputs is too large or cannot be encoded.
        """
        if self._ended:
            outputs = _without(outputs, self._ended)
        unfinished = {output.request_id for output in outputs.outputs if output.finish_reason is None}
        refused = self._put_large(outputs) if any(map(_is_pooled, outputs.outputs)) else []
        if frame is None:
            outputs, frame, broken = encoded(outputs)
            refused += broken
        if (size := frame.ByteSize()) + _WRAPPING_BYTES <= self._limits.max_message_bytes:
            self._put_frame(frame, size)
        else:
            frames = split(outputs, self._limits.max_message_bytes)
            for part in frames.frames:
                piece = convert.outputs_to_proto(part)
                self._put_frame(piece, piece.ByteSize())
            refused += frames.refused
        self._ended |= unfinished.intersection(refused)
        return refused

    def _put_frame(self, frame: pb.EngineCoreOutputs, size: int) -> None:
        """Queue a frame. If the message with the previous frame has not been sent and has space, the frame is added to
        that message.
        """
        if not self._batches or not self._batch.takes(size, self._limits.max_message_bytes - _WRAPPING_BYTES):
            self._batch = FrameBatch()
        if not self._batch:
            self._outgoing.put(self._batch.make)
            self._arrived.set()
        self._batch.add(frame, size)

    def _put_large(self, outputs: EngineCoreOutputs) -> list[str]:
        """Remove outputs with large vectors from a step's outputs, and queue the vectors in chunks. Return the ids of
        requests that end because their vectors are too large.
        """
        most, refused = self._limits.max_tensor_bytes, []
        others: list[EngineCoreOutput] = []
        for output in outputs.outputs:
            size = len(output.pooling_output.data) if output.pooling_output is not None else 0
            if output.pooling_output is None or not most or size <= self._limits.inline_bytes:
                others.append(output)
            elif size > most:
                others.append(too_large(output, size, most))
                refused.append(output.request_id)
            else:
                make = partial(_pooled, output, outputs.engine_index)
                tensors = (output.pooling_output.data,)
                self._outgoing.put(make, partial(_given, tensors))
                self._arrived.set()
                # The frontend must not learn that the request has finished before its vectors are sent.
                outputs.finished_requests = [i for i in outputs.finished_requests if i != output.request_id]
        outputs.outputs = others
        return refused

    def close(self) -> None:
        """Close the session after the queued messages are sent."""
        self._closed = True
        self._arrived.set()

    async def next(self) -> pb.SessionResponse | None:
        """Wait for the next message and return it, or return None once the session is closed and the queue is empty."""
        while True:
            while not self._outgoing:
                if self._closed:
                    return None
                self._arrived.clear()
                await self._arrived.wait()
            if (message := self._outgoing.next()) is not None:
                return message


def _is_pooled(output: EngineCoreOutput) -> bool:
    return output.pooling_output is not None


def _given(tensors: Sequence[Buffer]) -> Sequence[Buffer]:
    return tensors


def _pooled(output: EngineCoreOutput, engine_index: int, refs: Sequence[TensorRef]) -> pb.SessionResponse:
    try:
        frame = convert.pooled_to_proto(output, refs[0])
    except Exception as e:
        frame = convert.pooled_to_proto(unsendable(output, e), None)
    frame.engine_index = engine_index
    return pb.SessionResponse(outputs=frame)


def _chunk(chunk: Chunk) -> pb.SessionResponse:
    return pb.SessionResponse(tensor_chunk=chunk_to_proto(chunk))


def _without(outputs: EngineCoreOutputs, ended: set[str]) -> EngineCoreOutputs:
    """Return the outputs without outputs of requests in ``ended``, which have already ended for the frontend. If such a
    request's last output is in ``outputs``, the request is removed from ``ended``.
    """
    left = [output for output in outputs.outputs if output.request_id not in ended]
    over = {output.request_id for output in outputs.outputs if output.finish_reason is not None} & ended
    finished = [request_id for request_id in outputs.finished_requests if request_id not in over]
    ended -= over
    return msgspec.structs.replace(outputs, outputs=left, finished_requests=finished)


log = get_logger()


class Sessions:
    """All open sessions. Implements the busy loop's ``OutputSink``.

    Only the I/O thread may call ``open`` and ``close``. Any thread may call the methods of ``OutputSink``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_draining: Callable[[float], None],
        traces: EngineTraces | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        limits: SessionsConfig = SessionsConfig(),  # noqa: B008 - it is immutable
    ) -> None:
        """Create an empty set of sessions.

        Args:
            loop: The I/O loop.
            on_draining: Function that is called once on the I/O thread when the engine drains, with the remaining
                seconds.
            traces: Object that records requests and outputs for tracing, or None.
            max_message_bytes: Maximum size in bytes of a message that the server sends.
            limits: Limits on sessions and their tensors.
        """
        self.traces = traces
        self.on_refused: Callable[[str, list[str]], None] = lambda *_: None
        """Callback for requests that ended because an output could not be sent. It is called on the I/O thread with the
        client id and the request ids.
        """
        self.engine_index = 0
        """The engine's index in its cluster, which every frame contains. The value is 0 until a coordinator assigns the
        index.
        """
        self.received = ReceiverCache(0)
        """Cache of the media items that frontends have sent in all sessions."""
        self.tensors = TensorPool(limits.max_tensor_bytes)
        """Limit on the chunked tensors of all sessions."""
        self._max_sessions = limits.max_sessions
        self._max_message_bytes = max_message_bytes
        self._loop = loop
        self._on_draining = on_draining
        self._sessions: dict[str, FrontendSession] = {}
        self._numbers = itertools.count()
        self._drained_at: float | None = None
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = False
        self.dead: str | None = None

    def open(self, hello: pb.Hello, revision: int) -> FrontendSession:
        """Open a session with a new client id. A frontend that reconnects gets a new client id.

        Raises ResourceExhausted with reason TOO_MANY_SESSIONS if the limit is reached.
        """
        if len(self._sessions) >= self._max_sessions:
            raise ResourceExhausted(
                f"{len(self._sessions)} sessions are open; the limit is sessions.max_sessions, {self._max_sessions}",
                reason="TOO_MANY_SESSIONS",
                retry_after=1.0,
            )
        limits = Limits.of(self._max_message_bytes, hello.max_message_bytes, hello.max_tensor_bytes)
        client_id = f"{hello.frontend_id}#{next(self._numbers)}"
        session = FrontendSession(client_id, limits, revision, hello.incarnation, self.tensors)
        self._sessions[session.client_id] = session
        return session

    def welcome(self, session: FrontendSession, ready: pb.Ready, probe: str = "") -> None:
        """Queue the message ``ready``, and then ``draining`` if the engine is draining. The media limits in ``ready``
        apply to the session.

        ``probe`` is the name of a shared-memory segment of the frontend, or empty if the frontend has no such segment.
        If this engine can read the segment, the engine and the frontend are on the same host.
        """
        ready.max_tensor_bytes = min(ready.max_tensor_bytes, session.max_tensor_bytes)
        segments = SegmentReader(session.incarnation) if ready.shared_memory_id else None
        if segments is not None and probe:
            ready.shared_memory_nonce = segments.prove(probe)
            if not ready.shared_memory_nonce:
                ready.shared_memory_id, segments = "", None
        session.prompts.segments = segments
        if ready.media:
            self.received.quota = ready.receiver_cache_bytes
            session.features = FeatureReader(session.prompts.tensors, self.received.session(), segments)
        session.put(pb.SessionResponse(ready=ready))
        if self._drained_at is not None:
            self._put_draining(session, max(self._drained_at - time.monotonic(), 0.0))

    def close(self, session: FrontendSession) -> None:
        """Remove a session."""
        self._sessions.pop(session.client_id, None)
        session.prompts.tensors.close()
        if session.features is not None:
            session.features.kept.clear()
        if self.traces is not None:
            self.traces.client_gone(session.client_id)

    def close_all(self) -> None:
        """Close every session after its queued messages are sent."""
        for session in self._sessions.values():
            session.close()

    def drop_stale(self) -> None:
        """Drop partly received tensors of which no more chunks have arrived for too long."""
        for session in self._sessions.values():
            session.prompts.tensors.drop_stale()

    def __len__(self) -> int:
        return len(self._sessions)

    def emit(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        """Send a step's outputs to one frontend. If the frontend is disconnected, the outputs are dropped."""
        self._post(partial(self._deliver, client_id, outputs))

    def broadcast(self, outputs: EngineCoreOutputs, to: Collection[str] | None = None) -> None:
        """Send outputs to every connected frontend. If ``to`` is given, send outputs only to the frontends whose ids
        are in ``to``.
        """
        self._post(partial(self._deliver_to_all, outputs, to))

    def start_wave(self, message: StartWave) -> None:
        """Ask every frontend to tell the other ranks of the data-parallel group that this rank waits for them. The
        ranks then start to run steps together (a wave).
        """
        self._post(
            partial(self._put_to_all, pb.SessionResponse(start_wave=to_message(message, data_parallel_pb2.GroupWave)))
        )

    def draining(self, timeout: float) -> None:
        """Tell all current and future frontends that the engine is draining."""
        self._post(partial(self._announce_draining, timeout))

    def engine_dead(self, reason: str) -> None:
        """Tell every frontend that the engine is dead, and close the sessions."""
        self._post(partial(self._announce_dead, reason))

    def clear_media(self) -> None:
        """Drop the sessions' cached media, and notify their frontends."""
        self._post(self._clear_media)

    def _post(self, work: Callable[[], None]) -> None:
        """Queue ``work``, which the I/O thread runs after earlier work. The thread is woken only once for all queued
        work.
        """
        self._posted.append(work)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._do_posted)

    def _do_posted(self) -> None:
        self._woken = False  # Work that is queued after this line must wake the thread again.
        for _ in range(len(self._posted)):
            try:
                self._posted.popleft()()
            except Exception as e:
                incident(e, request="", doing="delivering the engine's messages to frontends")

    def _deliver(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        outputs.engine_index = self.engine_index
        if self.traces is not None:
            self.traces.take(client_id, outputs)
        session = self._sessions.get(client_id)
        if session is not None and (refused := session.put_outputs(outputs)):
            self.on_refused(client_id, refused)

    def _deliver_to_all(self, outputs: EngineCoreOutputs, to: Collection[str] | None) -> None:
        outputs.engine_index = self.engine_index
        outputs, frame, _ = encoded(outputs)
        for client_id, session in self._sessions.items():
            if to is None or client_id in to:
                session.put_outputs(outputs, frame)

    def _put_to_all(self, message: pb.SessionResponse) -> None:
        for session in self._sessions.values():
            session.put(message)

    def _clear_media(self) -> None:
        self.received.clear()
        for session in self._sessions.values():
            if session.features is not None:
                session.put(pb.SessionResponse(media_cleared=pb.MediaCleared()))

    def _announce_draining(self, time_left: float) -> None:
        log.info("engine is draining and refuses new requests", sessions=len(self._sessions))
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
