"""How the media of requests go to one engine: left out, inline, in chunks or in shared memory."""

from collections.abc import Iterable, Sequence

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.media import tensor_to_proto
from penstock_common.tensors.outgoing import TensorRef
from penstock_common.tensors.shared_memory import UNREADABLE, SegmentRef
from penstock_common.tensors.sizes import Buffer, Limits
from penstock_common.types.media import MultiModalFeature, TensorData
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs, EngineReady, FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.rpc.media_mirror import MediaMirror, Sent, first_of_each
from penstock_frontend.rpc.media_transport import MediaTransport

NOT_CACHED = "MEDIA_NOT_CACHED"
CACHE_FULL = "MEDIA_CACHE_FULL"
_SENT_AGAIN = (NOT_CACHED, CACHE_FULL, UNREADABLE)
"""Reasons for which an engine refuses a request that has only to be sent otherwise."""
MAX_RESENDS = 2
"""Times that a request is sent again to its engine. The last time with all data and nothing to be kept, which needs no memory of
the engine's.
"""
_DROPS_AT_ONCE = 256
_TENSOR_BYTES = 256
"""Of a tensor's message beside its elements, at most."""


class NotWrittenError(Exception):
    """Shared memory could not be written after all: the message is to be queued again."""


class MediaSender:
    """Of one session. What it decides holds for the message that goes next: ``take_drops`` before it.

    Requests that an engine refuses because it has not what they leave out are sent again, which nobody else hears of.
    """

    def __init__(self, transport: MediaTransport, ready: EngineReady, limits: Limits) -> None:
        self.mirror = MediaMirror(ready.receiver_cache_bytes)
        self._counts = transport.counts
        self._segments = transport.session(ready)
        self._limits = limits
        self._sent: dict[str, tuple[EngineCoreRequest, int]] = {}
        """Requests with media that have been sent and have not ended, and how often they were sent again."""

    # Sending.

    def in_chunks(self, request: EngineCoreRequest, num_resends: int) -> list[Buffer]:
        """The tensors of a request's media that have to go ahead in chunks, as things are now."""
        large = self._large(self._with_data(request, num_resends))
        if self._segments is not None and self._segments.has_room(_num_bytes(large)):
            return []
        return large

    def fill(
        self, message: pb.EngineCoreRequest, request: EngineCoreRequest, refs: Sequence[TensorRef], again: int
    ) -> None:
        """Put a request's media into its message, which goes next. ``refs``: of those that went ahead, what ``in_chunks`` says;
        ``again``: how often it was sent again. Raises InvalidArgument for what is too large, and NotWrittenError.
        """
        with_data = self._with_data(request, again)
        large = self._large(with_data)
        self._check(large)
        places: dict[int, TensorRef | SegmentRef] = {}
        if refs:
            places = {id(data): ref for data, ref in zip(large, refs, strict=True)}
        elif large and self._segments is not None:
            places = self._write(large)
        queries, hits = self.mirror.num_queries, self.mirror.num_hits
        for sent in self.mirror.send(request.mm_features, plain=again >= MAX_RESENDS):
            self._add(message.mm_features.add(), sent, places)
        self._counts.num_queries += self.mirror.num_queries - queries
        self._counts.num_hits += self.mirror.num_hits - hits
        self._sent[request.request_id] = request, again

    def not_sent(self, request: EngineCoreRequest) -> None:
        """The message that was filled does not go after all."""
        if self._sent.pop(request.request_id, None) is not None:
            self.mirror.refused(_identifiers(request))

    def take_drops(self) -> list[pb.SessionRequest]:
        """Messages that go before the one that was filled last."""
        messages = []
        while drops := self.mirror.take_drops(_DROPS_AT_ONCE):
            messages.append(pb.SessionRequest(drop_media=pb.DropMedia(identifiers=drops)))
        return messages

    def _with_data(self, request: EngineCoreRequest, again: int) -> Sequence[MultiModalFeature]:
        if again >= MAX_RESENDS:
            return first_of_each(request.mm_features)
        return self.mirror.missing(request.mm_features)

    def _large(self, features: Iterable[MultiModalFeature]) -> list[Buffer]:
        """What does not go inline, each once: large tensors, and all that come when half a message is full of small ones."""
        if not self._limits.max_tensor_bytes:
            return []
        left = self._limits.max_message_bytes // 2
        large: dict[int, Buffer] = {}
        for tensor in _tensors(features):
            left -= len(tensor.data) + _TENSOR_BYTES
            if tensor.data and (len(tensor.data) > self._limits.inline_bytes or left < 0):
                left += len(tensor.data)
                large[id(tensor.data)] = tensor.data
        return list(large.values())

    def _check(self, large: Sequence[Buffer]) -> None:
        size, limit = _num_bytes(large), self._limits.max_tensor_bytes
        if size > limit:
            raise InvalidArgument(
                f"the media of the request have {size} bytes once they are processed; engines take up to {limit}",
                field="mm_features",
                reason="MESSAGE_TOO_LARGE",
            )

    def _write(self, large: Sequence[Buffer]) -> dict[int, TensorRef | SegmentRef]:
        places: dict[int, TensorRef | SegmentRef] = {}
        segments = self._segments
        if segments is None:
            return places
        written: list[SegmentRef] = []
        for data in large:
            if (ref := segments.write(data)) is None:
                for each in written:
                    segments.remove(each)
                raise NotWrittenError
            written.append(ref)
            places[id(data)] = ref
        return places

    def _add(self, message: pb.MultiModalFeature, sent: Sent, places: dict[int, TensorRef | SegmentRef]) -> None:
        feature = sent.feature
        message.modality = feature.modality
        message.identifier = feature.identifier
        message.offset, message.length = feature.offset, feature.length
        for run in feature.embed_runs:
            message.embed_runs.add(start=run.start, count=run.count)
        message.keep = sent.keep
        if not sent.with_data:
            return
        for name, tensor in feature.data.items():
            place = places.get(id(tensor.data))
            message.data[name].CopyFrom(tensor_to_proto(tensor, place))
            match place:
                case None:
                    self._counts.num_bytes["inline"] += len(tensor.data)
                case TensorRef():
                    self._counts.num_bytes["chunks"] += len(tensor.data)
                case SegmentRef():
                    self._counts.num_bytes["shared_memory"] += len(tensor.data)

    # Hearing of it.

    def take(self, outputs: EngineCoreOutputs) -> list[tuple[EngineCoreRequest, int]]:
        """Look at what an engine says, and take out of it what nobody else is to hear. Returns the requests that are to be put
        again, and how often they will have been sent again then.
        """
        if not self._sent:
            return []
        if outputs.finished_requests:
            told = {output.request_id for output in outputs.outputs}
            self.forget(request_id for request_id in outputs.finished_requests if request_id not in told)
        again: list[tuple[EngineCoreRequest, int]] = []
        for output in outputs.outputs:
            if output.finish_reason is None or (found := self._sent.get(output.request_id)) is None:
                continue
            request, num_resends = found
            if output.attempt != request.attempt:
                continue
            del self._sent[output.request_id]
            if not _is_refusal(output):
                continue
            self.mirror.refused(_identifiers(request))
            if output.error is None or output.error.reason not in _SENT_AGAIN or num_resends >= MAX_RESENDS:
                continue
            if output.error.reason == UNREADABLE and self._segments is not None:
                self._segments.give_up()
            again.append((request, num_resends + 1))
        if again:
            self._counts.num_resent += len(again)
            ids = {request.request_id for request, _ in again}
            outputs.outputs = [output for output in outputs.outputs if output.request_id not in ids]
            outputs.finished_requests = [
                request_id for request_id in outputs.finished_requests if request_id not in ids
            ]
        return again

    def cleared(self) -> None:
        """The engine has forgotten what it had kept."""
        self.mirror.cleared()

    def forget(self, request_ids: Iterable[str]) -> None:
        """These have ended without an output, or were aborted."""
        for request_id in request_ids:
            self._sent.pop(request_id, None)

    def drop_stale(self) -> None:
        """Remove shared memory that nobody reads."""
        if self._segments is not None:
            self._segments.remove_old()

    def close(self) -> None:
        """The session is over."""
        if self._segments is not None:
            self._segments.close()


def _is_refusal(output: EngineCoreOutput) -> bool:
    """Whether the engine may not have taken a request's media."""
    error = output.error
    return output.finish_reason is FinishReason.ERROR and error is not None and error.field.startswith("mm_features")


def _identifiers(request: EngineCoreRequest) -> list[str]:
    return [feature.identifier for feature in request.mm_features]


def _tensors(features: Iterable[MultiModalFeature]) -> Iterable[TensorData]:
    for feature in features:
        yield from feature.data.values()


def _num_bytes(tensors: Iterable[Buffer]) -> int:
    return sum(map(len, tensors))
