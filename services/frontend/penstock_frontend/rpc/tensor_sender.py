"""Sending of the tensors of requests to one engine, and a copy of the state of the engine's media cache.

The frontend does not send a tensor that the engine has cached. Other tensors are sent inside the request's message, in
chunks before the message, or in shared memory.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.by_field import fill
from penstock_common.rpc.outputs import Place
from penstock_common.rpc.request import tensor_to_proto
from penstock_common.tensors.chunks import Buffer, Limits, TensorRef
from penstock_common.tensors.shared_memory import UNREADABLE, SegmentRef
from penstock_common.types.media import MultiModalFeature, TensorData
from penstock_common.types.outputs import EngineCoreOutputs, EngineReady, FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.rpc.media_transport import MediaTransport, Probe, Transport

# The classes below track which media an engine caches for this frontend. These classes do no I/O.


class Sent(NamedTuple):
    """Form of a media item in a message: whether the message has the data of the item, and whether the engine caches
    the data.
    """

    feature: MultiModalFeature
    with_data: bool
    keep: bool


def first_of_each(features: Iterable[MultiModalFeature]) -> list[MultiModalFeature]:
    """Return the first media item with each identifier. In a message, only this item has data."""
    found: dict[str, MultiModalFeature] = {}
    for feature in features:
        found.setdefault(feature.identifier, feature)
    return list(found.values())


class MediaMirror:
    """Copy of the state of an engine's media cache, for one session.

    The items are in order of their last use. Their total size is at most the engine's limit in bytes.

    The frontend decides which items the engine caches and evicts. This copy and the cache stay equal if the messages
    are sent in the order in which the methods of this class were called. Messages from ``take_drops`` must be sent
    before the results of later calls. Every stream has its own copy. At the start of the stream, both the copy and the
    engine's cache are empty.

    The engine reports when it has cleared its cache (``cleared``). A refused request names the items that the engine
    could not cache (``refused``). After such a report or refusal, messages on their way to the engine may make it cache
    such items again. The frontend therefore sends messages that drop these items.
    """

    def __init__(self, quota: int) -> None:
        """Create the copy. ``quota`` is the number of bytes that the engine caches for this session. 0 means that the
        engine caches nothing.
        """
        self._quota = quota
        self._kept: OrderedDict[str, int] = OrderedDict()
        """Size in bytes of each cached item, by identifier. The least recently used item comes first."""
        self._drops: dict[str, None] = {}
        self.num_bytes = 0
        self.num_queries = 0
        """Number of media items in requests, whether their data were sent or left out."""
        self.num_hits = 0
        """Number of media items whose data were left out."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, identifier: str) -> bool:
        """Return True if the engine will have the item in its cache after it has read all messages so far."""
        return identifier in self._kept

    @property
    def identifiers(self) -> frozenset[str]:
        """Identifiers of the items that the engine will have in its cache after it has read all messages so far."""
        return frozenset(self._kept)

    def missing(self, features: Iterable[MultiModalFeature]) -> list[MultiModalFeature]:
        """Return the media items whose data must be sent, one for each identifier."""
        return first_of_each(feature for feature in features if feature.identifier not in self._kept)

    def send(self, features: Sequence[MultiModalFeature], *, plain: bool = False) -> list[Sent]:
        """Return how the next message must contain the media items of a request.

        If ``plain`` is True, the message has the data of all items, and the engine does not cache them.
        """
        sent: list[Sent] = []
        here = {feature.identifier for feature in features}
        told: set[str] = set()
        for feature in features:
            identifier = feature.identifier
            if identifier in told:  # an earlier item in this message has the data for the same identifier
                sent.append(Sent(feature, with_data=False, keep=False))
                continue
            told.add(identifier)
            self.num_queries += 1
            if plain:
                sent.append(Sent(feature, with_data=True, keep=False))
            elif identifier in self._kept:
                self.num_hits += 1
                self._kept.move_to_end(identifier)
                sent.append(Sent(feature, with_data=False, keep=False))
            else:
                keep = self._make_room(feature.num_bytes, here)
                if keep:
                    self._kept[identifier] = feature.num_bytes
                    self.num_bytes += feature.num_bytes
                sent.append(Sent(feature, with_data=True, keep=keep))
        return sent

    def _make_room(self, size: int, but: set[str]) -> bool:
        """Drop the least recently used items, but none of the items ``but``, until ``size`` bytes are free in the
        cache.

        Return True if these bytes are free. If this many bytes cannot become free, drop nothing.
        """
        if size > self._quota:
            return False
        going, left = [], self.num_bytes
        for identifier, num_bytes in self._kept.items():
            if left + size <= self._quota:
                break
            if identifier not in but:
                going.append(identifier)
                left -= num_bytes
        if left + size > self._quota:
            return False
        self._drop(going)
        return True

    def cleared(self) -> None:
        """Drop all items from the copy, because the engine has cleared its cache."""
        self._drop(list(self._kept))

    def refused(self, identifiers: Iterable[str]) -> None:
        """Drop the media items of a request that the engine refused. The engine may have cached some of these items."""
        identifiers = list(identifiers)
        self._drop(identifiers)
        self._drops |= dict.fromkeys(identifiers)

    @property
    def has_drops(self) -> bool:
        """True if messages that drop items wait to be sent."""
        return bool(self._drops)

    def take_drops(self, at_most: int) -> list[str]:
        """Return at most ``at_most`` identifiers of items that the engine must drop.

        The caller must send these identifiers to the engine before it makes the next message.
        """
        drops = list(self._drops)[:at_most]
        for identifier in drops:
            del self._drops[identifier]
        return drops

    def _drop(self, identifiers: Iterable[str]) -> None:
        for identifier in identifiers:
            if (size := self._kept.pop(identifier, None)) is not None:
                self.num_bytes -= size
                self._drops[identifier] = None


NOT_CACHED = "MEDIA_NOT_CACHED"
CACHE_FULL = "MEDIA_CACHE_FULL"
_SENT_AGAIN = (NOT_CACHED, CACHE_FULL, UNREADABLE)
"""Error reasons of a refusal after which the frontend sends the request again, with its tensors in another form."""
MAX_RESENDS = 2
"""Maximum number of times that a request is sent to its engine again.

The last time, the message has all data, and the engine caches none of them. The request then needs no room in the
engine's cache.
"""
_DROPS_AT_ONCE = 256
_TENSOR_BYTES = 256
"""Maximum size in bytes that a tensor's message has in addition to the tensor's data."""


class NotWrittenError(Exception):
    """Raised if shared memory could not be written. The caller must add the request to the queue again."""


class TensorSender:
    """Decides how the tensors of the requests of one session are sent.

    The decisions are valid for the next message, which must be sent directly after the messages from ``take_drops``.

    An engine refuses a request if it lacks data that were left out, or if it cannot read shared memory. The request is
    then sent again. Callers do not notice this. Embeddings that several requests share are sent once, in chunks. All
    other embeddings are sent in the same way as media.
    """

    def __init__(self, transport: MediaTransport, ready: EngineReady, limits: Limits, probe: Probe | None) -> None:
        """Create the sender. ``probe`` is the shared memory segment that the engine was asked to read, or None."""
        self.mirror = MediaMirror(ready.receiver_cache_bytes)
        self._counts = transport.counts
        self._segments = transport.session(ready, probe)
        self._limits = limits
        self._queued: dict[str, int] = {}
        """Python identity of the embeddings of each queued request. An identity is valid while its request is queued."""
        self._num_queued: Counter[int] = Counter()
        self._sent: dict[str, tuple[EngineCoreRequest, int]] = {}
        """Sent requests that may have to be sent again, each with the number of times that it was sent again so far."""

    # The methods below are used when requests are sent.

    def queued(self, request: EngineCoreRequest) -> None:
        """Record that a request was added to the queue."""
        if request.prompt_embeds is not None:
            self._queued[request.request_id] = key = id(request.prompt_embeds.data)
            self._num_queued[key] += 1

    def not_queued(self, request_ids: Iterable[str]) -> None:
        """Record that requests have left the queue, because they are being sent or will not be sent."""
        for request_id in request_ids:
            if (key := self._queued.pop(request_id, None)) is not None:
                self._num_queued[key] -= 1
                if not self._num_queued[key]:
                    del self._num_queued[key]

    def in_chunks(
        self, request: EngineCoreRequest, num_resends: int, is_under_way: Callable[[Buffer], bool]
    ) -> list[Buffer]:
        """Return the tensors of a request that must be sent in chunks before the request's message.

        The list is empty if the total size of the tensors is too large. The request is then refused when its message is
        made. ``is_under_way`` returns True if a tensor is already being sent in chunks for another request.
        """
        large = self._large(request, num_resends)
        if not large or _num_bytes(large) > self._limits.max_tensor_bytes:
            return []
        return [] if self._may_share(request, large, is_under_way) else large

    def places(self, request: EngineCoreRequest, refs: Sequence[TensorRef], again: int) -> dict[int, Place]:
        """Return references to the tensors of a request that are not in its message, by the tensors' Python identity.

        The message of this request must be sent next.

        Args:
            request: the request whose message is made.
            refs: references to the tensors that were sent in chunks, in the order of ``in_chunks``.
            again: number of times that the request was sent again so far.

        Raises:
            InvalidArgument: a tensor is larger than the engine accepts.
            NotWrittenError: shared memory could not be written.
        """
        large = self._large(request, again)
        self._check(request, large)
        if refs:
            return {id(data): ref for data, ref in zip(large, refs, strict=True)}
        return self._write(large) if large and self._segments is not None else {}

    def forsake(self, places: Mapping[int, Place]) -> None:
        """Free the shared memory to which a message has references, because the message is not sent."""
        for place in places.values():
            if isinstance(place, SegmentRef) and self._segments is not None:
                self._segments.remove(place)

    def fill(
        self, message: pb.EngineCoreRequest, request: EngineCoreRequest, places: Mapping[int, Place], again: int
    ) -> None:
        """Add the media items of a request to its message, which must be sent next. The message already has the
        embeddings of the prompt.
        """
        queries, hits = self.mirror.num_queries, self.mirror.num_hits
        for sent in self.mirror.send(request.mm_features, plain=again >= MAX_RESENDS):
            self._add(message.mm_features.add(), sent, places)
        self._counts.num_queries += self.mirror.num_queries - queries
        self._counts.num_hits += self.mirror.num_hits - hits
        if (embeds := request.prompt_embeds) is not None:
            self._count(len(embeds.data), places.get(id(embeds.data)))
        if request.mm_features or any(isinstance(place, SegmentRef) for place in places.values()):
            self._sent[request.request_id] = request, again

    def not_sent(self, request: EngineCoreRequest) -> None:
        """Undo the effect of ``fill`` for a message that is not sent."""
        if self._sent.pop(request.request_id, None) is not None:
            self.mirror.refused(_identifiers(request))

    def take_drops(self) -> list[pb.SessionRequest]:
        """Return the messages that drop media items. The caller must send these messages before the message that
        ``fill`` filled last.
        """
        messages = []
        while drops := self.mirror.take_drops(_DROPS_AT_ONCE):
            messages.append(pb.SessionRequest(drop_media=pb.DropMedia(identifiers=drops)))
        return messages

    def _with_data(self, request: EngineCoreRequest, again: int) -> Sequence[MultiModalFeature]:
        if again >= MAX_RESENDS:
            return first_of_each(request.mm_features)
        return self.mirror.missing(request.mm_features)

    def _large(self, request: EngineCoreRequest, again: int) -> list[Buffer]:
        """Return the tensors of a request that are not sent inside its message.

        Each tensor occurs once, and embeddings come before media.

        These are the large tensors, and all tensors after the small tensors that have filled half of the message.
        """
        if not self._limits.max_tensor_bytes:
            return []
        large: dict[int, Buffer] = {}
        embeds = request.prompt_embeds
        if embeds is not None and len(embeds.data) > self._limits.inline_bytes:
            large[id(embeds.data)] = embeds.data
        left = self._limits.max_message_bytes // 2
        for tensor in _tensors(self._with_data(request, again)):
            left -= len(tensor.data) + _TENSOR_BYTES
            if tensor.data and (len(tensor.data) > self._limits.inline_bytes or left < 0):
                left += len(tensor.data)
                large[id(tensor.data)] = tensor.data
        return list(large.values())

    def _may_share(
        self, request: EngineCoreRequest, large: Sequence[Buffer], is_under_way: Callable[[Buffer], bool]
    ) -> bool:
        """Return True if the large tensors of a request may be sent in shared memory."""
        segments, embeds = self._segments, request.prompt_embeds
        if segments is None or not segments.has_room(_num_bytes(large)):
            return False
        if embeds is None or embeds.data is not large[0]:
            return True
        alone = self._num_queued[id(embeds.data)] <= 1 and not is_under_way(embeds.data)
        return segments.takes_vectors and alone

    def _check(self, request: EngineCoreRequest, large: Sequence[Buffer]) -> None:
        size, limit = _num_bytes(large), self._limits.max_tensor_bytes
        if size <= limit:
            return
        embeds = request.prompt_embeds
        if embeds is not None and embeds.data is large[0]:
            what, field = f"the embeddings of the prompt have {size} bytes", "prompt"
        else:
            what, field = f"the media of the request have {size} bytes once they are processed", "mm_features"
        raise InvalidArgument(f"{what}; engines accept up to {limit} bytes", field=field, reason="MESSAGE_TOO_LARGE")

    def _write(self, large: Sequence[Buffer]) -> dict[int, Place]:
        places: dict[int, Place] = {}
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

    def _add(self, message: pb.MultiModalFeature, sent: Sent, places: Mapping[int, Place]) -> None:
        fill_feature(message, sent, places)
        if sent.with_data:
            for tensor in sent.feature.data.values():
                self._count(len(tensor.data), places.get(id(tensor.data)))

    def _count(self, num_bytes: int, place: Place | None) -> None:
        transport: Transport = "inline"
        if place is not None:
            transport = "chunks" if isinstance(place, TensorRef) else "shared_memory"
        self._counts.num_bytes[transport] += num_bytes

    # The methods below are used when outputs arrive.

    def take(self, outputs: EngineCoreOutputs) -> list[tuple[EngineCoreRequest, int]]:
        """Process the outputs of an engine.

        If the engine refused requests that must be sent again, remove these refusals from the outputs. Return these
        requests, each with the number of times that it has then been sent again.
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
            error = output.error
            if output.finish_reason is not FinishReason.ERROR or error is None:
                continue
            if error.field.startswith("mm_features"):
                # the engine may have cached some of the media items of the request
                self.mirror.refused(_identifiers(request))
            elif not error.field.startswith("prompt_embeds"):
                continue
            if error.reason not in _SENT_AGAIN or num_resends >= MAX_RESENDS:
                continue
            if error.reason == UNREADABLE and self._segments is not None:
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
        """Clear the copy of the media cache's state, because the engine has cleared its media cache."""
        self.mirror.cleared()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended without an output, or that were aborted."""
        for request_id in request_ids:
            self._sent.pop(request_id, None)

    def drop_stale(self) -> None:
        """Remove shared memory segments that the engine has not read before their time limit."""
        if self._segments is not None:
            self._segments.remove_old()

    def close(self) -> None:
        """Free all shared memory and other state, because the session ends."""
        if self._segments is not None:
            self._segments.close()


def fill_feature(message: pb.MultiModalFeature, sent: Sent, places: Mapping[int, Place]) -> None:
    """Write a media item into its message. ``places`` has references to tensors that are not in the message, by the
    tensors' Python identity.
    """
    feature = sent.feature
    fill(message, feature, "data")
    message.keep = sent.keep
    if sent.with_data:
        for name, tensor in feature.data.items():
            message.data[name].CopyFrom(tensor_to_proto(tensor, places.get(id(tensor.data))))


def _identifiers(request: EngineCoreRequest) -> list[str]:
    return [feature.identifier for feature in request.mm_features]


def _tensors(features: Iterable[MultiModalFeature]) -> Iterable[TensorData]:
    for feature in features:
        yield from feature.data.values()


def _num_bytes(tensors: Iterable[Buffer]) -> int:
    return sum(map(len, tensors))
