"""What goes up on a session with an engine. Without I/O."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_common.observability.incidents import incident
from penstock_common.rpc.outputs import Place, chunk_to_proto
from penstock_common.rpc.revision import COLUMNS_SINCE, OLDEST_REVISION
from penstock_common.tensors.outgoing import Chunk, Outgoing, TensorRef, no_tensors
from penstock_common.tensors.sizes import Buffer, Limits
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs, EngineReady, FinishReason, RequestError
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.rpc import session_messages
from penstock_frontend.rpc.media_mirror import MediaMirror
from penstock_frontend.rpc.media_transport import MediaTransport, Probe
from penstock_frontend.rpc.tensor_sender import NotWrittenError, TensorSender


class _NotSentError(Exception):
    """There is no message after all."""


class OutgoingRequests:
    """The messages of one stream, made when it is their turn. Large tensors go ahead in chunks, once for all requests that share
    them, or lie in shared memory. No message is larger than the engine takes: a request that is too large ends as if the
    engine had refused it.
    """

    def __init__(
        self, media: MediaTransport, *, on_refused: Callable[[EngineCoreOutputs], None], max_message_bytes: int
    ) -> None:
        """``on_refused``: told the end of each request that is not sent."""
        self._transport = media
        self._on_refused = on_refused
        self._limits = Limits(max_message_bytes, 0)
        self._revision = OLDEST_REVISION
        self._outgoing: Outgoing[pb.SessionRequest] = Outgoing(_chunk)
        self._tensors: TensorSender | None = None

    def greeted(self, ready: EngineReady, limits: Limits, revision: int, probe: Probe | None = None) -> None:
        """The engine has said who it is. ``limits``: what both ends take, ``revision``: of the contract, on this stream;
        ``probe``: of shared memory, that it was given.
        """
        self._limits, self._revision = limits, revision
        self._outgoing.limit(limits)
        self._tensors = TensorSender(self._transport, ready, limits, probe)

    @property
    def mirror(self) -> MediaMirror | None:
        """What the engine keeps of media; None before it has said who it is."""
        return None if self._tensors is None else self._tensors.mirror

    def put(self, message: pb.SessionRequest) -> None:
        """Queue a message."""
        self._outgoing.put(lambda _: message)

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._add(request, 0)

    def abort(self, request_ids: Sequence[str], reason: str) -> None:
        """End requests: those that still wait for their tensors here, others on the engine."""
        unsent = self._outgoing.discard(request_ids)
        if self._tensors is not None:
            self._tensors.not_queued(unsent)
            self._tensors.forget(request_ids)
        if sent := [request_id for request_id in request_ids if request_id not in unsent]:
            self.put(pb.SessionRequest(abort=pb.Abort(request_ids=sent, reason=reason)))

    def take(self, outputs: EngineCoreOutputs) -> None:
        """Look at what the engine says, and take out of it what only concerns the sending: those requests go again."""
        if self._tensors is not None:
            for request, again in self._tensors.take(outputs):
                self._add(request, again)

    def media_cleared(self) -> None:
        """The engine has forgotten what it had kept of media."""
        if self._tensors is not None:
            self._tensors.cleared()

    def __bool__(self) -> bool:
        """Whether there is something to send."""
        return bool(self._outgoing) or (self.mirror is not None and self.mirror.has_drops)

    def next(self) -> list[pb.SessionRequest]:
        """The next messages, in order, none of which may be left out; empty where there is none after all."""
        drops = self._drops()
        if not self._outgoing:
            return drops
        try:
            message = self._outgoing.next()
        except _NotSentError:
            return drops
        # What makes room for the message goes before it.
        return drops if message is None else [*drops, *self._drops(), message]

    def drop_stale(self) -> None:
        """Remove what nobody reads."""
        if self._tensors is not None:
            self._tensors.drop_stale()

    def close(self) -> None:
        if self._tensors is not None:
            self._tensors.close()

    def _drops(self) -> list[pb.SessionRequest]:
        return [] if self._tensors is None else self._tensors.take_drops()

    def _add(self, request: EngineCoreRequest, again: int) -> None:
        """``again``: how often the request was sent before to this engine, as the same attempt."""
        plain = _is_plain(request)
        if self._tensors is not None and not plain:
            self._tensors.queued(request)
        tensors = no_tensors if plain else partial(self._in_chunks, request, again)
        self._outgoing.put(partial(self._make, request, again), tensors, key=request.request_id)

    def _in_chunks(self, request: EngineCoreRequest, again: int) -> Sequence[Buffer]:
        if self._tensors is None:
            return ()
        return self._tensors.in_chunks(request, again, self._outgoing.is_under_way)

    def _make(self, request: EngineCoreRequest, again: int, refs: Sequence[TensorRef]) -> pb.SessionRequest:
        """The message of a request, when it is its turn. Raises _NotSentError for one that cannot be sent: it has ended then, or
        is queued again.
        """
        tensors = None if _is_plain(request) else self._tensors
        places: dict[int, Place] = {}
        try:
            if tensors is not None:
                tensors.not_queued([request.request_id])
                places = tensors.places(request, refs, again)
            place, every_position = None, not self._limits.max_tensor_bytes
            if (embeds := request.prompt_embeds) is not None and (place := places.get(id(embeds.data))) is None:
                _check_vectors(embeds, self._limits, every_position=every_position)
            message = session_messages.add_request(request, place, every_position=every_position)
            if self._revision < COLUMNS_SINCE:
                message.add.ClearField("request_number")
            if request.context.deadline is not None:
                message.add.time_left = request.context.deadline - time.time()  # the engine's clock may be another
            if tensors is not None:
                tensors.fill(message.add, request, places, again)
            if (size := message.ByteSize()) > self._limits.max_message_bytes:
                raise InvalidArgument(
                    f"the request has {size} bytes; engines take messages of up to {self._limits.max_message_bytes}",
                    reason="MESSAGE_TOO_LARGE",
                )
        except NotWrittenError:
            self._add(request, again)
        except RequestFailed as e:
            self._refuse(request, e)
        except Exception as e:
            self._refuse(request, incident(e, request=request.context.external_request_id, doing="sending the request"))
        else:
            return message
        if tensors is not None:
            tensors.forsake(places)
        raise _NotSentError

    def _refuse(self, request: EngineCoreRequest, error: RequestFailed) -> None:
        if self._tensors is not None:
            self._tensors.not_sent(request)
        output = EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            offset=len(request.prior_output_token_ids),
            finish_reason=FinishReason.ERROR,
            error=RequestError.from_exception(error),
        )
        self._on_refused(EngineCoreOutputs(outputs=[output]))


def _is_plain(request: EngineCoreRequest) -> bool:
    """Whether it has no tensors."""
    return request.prompt_embeds is None and not request.mm_features


def _chunk(chunk: Chunk) -> pb.SessionRequest:
    return pb.SessionRequest(tensor_chunk=chunk_to_proto(chunk))


def _check_vectors(embeds: PromptEmbeds, limits: Limits, *, every_position: bool) -> None:
    """Raise InvalidArgument for vectors that are too large for a message where no chunks are taken."""
    size = embeds.num_tokens * embeds.row_bytes if every_position else len(embeds.data)
    limit = limits.max_message_bytes
    if size > limit:
        raise InvalidArgument(
            f"the vectors of the prompt have {size} bytes; engines take up to {limit}",
            field="prompt",
            reason="MESSAGE_TOO_LARGE",
        )
