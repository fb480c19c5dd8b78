"""Sending of request tensors to one engine, and the mirror of the engine's media cache.

Tensors are omitted, or go inline, in chunks or in shared memory.
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

# What an engine keeps of this frontend's media, as the frontend has told it to. Does no I/O.


class Sent(NamedTuple):
    """How a feature goes into a message: with its data or without, and whether the engine is to keep that."""

    feature: MultiModalFeature
    with_data: bool
    keep: bool


def first_of_each(features: Iterable[MultiModalFeature]) -> list[MultiModalFeature]:
    """The first of each identifier: it stands for the others of the same message."""
    found: dict[str, MultiModalFeature] = {}
    for feature in features:
        found.setdefault(feature.identifier, feature)
    return list(found.values())


class MediaMirror:
    """The items that a session's engine keeps, those used last at the end, within the bytes that the engine allows.

    The engine obeys and evicts nothing, so both ends agree at every message if what is done here is told in the same order:
    ``take_drops`` goes out before anything that is done here afterwards. Each stream has a mirror of its own, which begins empty,
    as the engine's end does.

    What the engine has forgotten by itself it says (``cleared``), and what it could not take its refusals say (``refused``).
    Messages that were under way then may have had it keep something after all: so both are answered with drops.
    """

    def __init__(self, quota: int) -> None:
        """``quota``: bytes that the engine keeps for this session; 0: none."""
        self._quota = quota
        self._kept: OrderedDict[str, int] = OrderedDict()
        """Bytes by identifier, the ones used least recently first."""
        self._drops: dict[str, None] = {}
        self.num_bytes = 0
        self.num_queries = 0
        """Items that were sent, or left out."""
        self.num_hits = 0
        """Items that were left out."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, identifier: str) -> bool:
        """Whether the engine has it, once it has read what was told so far."""
        return identifier in self._kept

    @property
    def identifiers(self) -> frozenset[str]:
        """What the engine has, once it has read what was told so far."""
        return frozenset(self._kept)

    def missing(self, features: Iterable[MultiModalFeature]) -> list[MultiModalFeature]:
        """Those that are to go with their data, the first of each identifier."""
        return first_of_each(feature for feature in features if feature.identifier not in self._kept)

    def send(self, features: Sequence[MultiModalFeature], *, plain: bool = False) -> list[Sent]:
        """How the features of a request go into the message that goes next. ``plain``: whatever is kept, all go with their data,
        and nothing is to be kept of them.
        """
        sent: list[Sent] = []
        here = {feature.identifier for feature in features}
        told: set[str] = set()
        for feature in features:
            identifier = feature.identifier
            if identifier in told:  # what stands for one stands for the others of the same message
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
        """Drop what was used least recently, ``but`` these, until so many bytes fit. Returns whether they do; nothing is dropped
        where they cannot.
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
        """The engine has forgotten everything."""
        self._drop(list(self._kept))

    def refused(self, identifiers: Iterable[str]) -> None:
        """The engine has refused a request with these, or has not had them: it may have some or none."""
        identifiers = list(identifiers)
        self._drop(identifiers)
        self._drops |= dict.fromkeys(identifiers)

    @property
    def has_drops(self) -> bool:
        """Whether something is to be dropped."""
        return bool(self._drops)

    def take_drops(self, at_most: int) -> list[str]:
        """What the engine is to drop, so many at a time: to be sent before the next message is made."""
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


class TensorSender:
    """Of one session. What it decides holds for the message that goes next: ``take_drops`` before it.

    Requests that an engine refuses because it has not what they leave out, or cannot read where they lie, are sent again, which
    nobody else hears of. Vectors that several requests have go once, in chunks; all others go as media do.
    """

    def __init__(self, transport: MediaTransport, ready: EngineReady, limits: Limits, probe: Probe | None) -> None:
        """``probe``: what the engine was given to read."""
        self.mirror = MediaMirror(ready.receiver_cache_bytes)
        self._counts = transport.counts
        self._segments = transport.session(ready, probe)
        self._limits = limits
        self._queued: dict[str, int] = {}
        """By request that is to be sent, the identity of its vectors, which it holds."""
        self._num_queued: Counter[int] = Counter()
        self._sent: dict[str, tuple[EngineCoreRequest, int]] = {}
        """Requests that may have to be sent again, which have not ended, and how often they were."""

    # Sending.

    def queued(self, request: EngineCoreRequest) -> None:
        """A request is to be sent."""
        if request.prompt_embeds is not None:
            self._queued[request.request_id] = key = id(request.prompt_embeds.data)
            self._num_queued[key] += 1

    def not_queued(self, request_ids: Iterable[str]) -> None:
        """These are sent now, or will not be."""
        for request_id in request_ids:
            if (key := self._queued.pop(request_id, None)) is not None:
                self._num_queued[key] -= 1
                if not self._num_queued[key]:
                    del self._num_queued[key]

    def in_chunks(
        self, request: EngineCoreRequest, num_resends: int, is_under_way: Callable[[Buffer], bool]
    ) -> list[Buffer]:
        """The tensors of a request that have to go ahead in chunks, as things are now; none where they are too many: the request
        is refused when it is its turn. ``is_under_way``: whether a tensor goes in chunks already.
        """
        large = self._large(request, num_resends)
        if not large or _num_bytes(large) > self._limits.max_tensor_bytes:
            return []
        return [] if self._may_share(request, large, is_under_way) else large

    def places(self, request: EngineCoreRequest, refs: Sequence[TensorRef], again: int) -> dict[int, Place]:
        """Where the tensors of a request are that do not go inline, by identity: its message goes next. ``refs``: of those that
        went ahead, what ``in_chunks`` says; ``again``: how often it was sent again. Raises InvalidArgument for what is too large,
        and NotWrittenError.
        """
        large = self._large(request, again)
        self._check(request, large)
        if refs:
            return {id(data): ref for data, ref in zip(large, refs, strict=True)}
        return self._write(large) if large and self._segments is not None else {}

    def forsake(self, places: Mapping[int, Place]) -> None:
        """The message that was to say so does not go."""
        for place in places.values():
            if isinstance(place, SegmentRef) and self._segments is not None:
                self._segments.remove(place)

    def fill(
        self, message: pb.EngineCoreRequest, request: EngineCoreRequest, places: Mapping[int, Place], again: int
    ) -> None:
        """Put a request's media into its message, which has its vectors and goes next."""
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

    def _large(self, request: EngineCoreRequest, again: int) -> list[Buffer]:
        """What does not go inline, each once, vectors before media: large tensors, and all that come when half a message is full
        of small ones.
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
        """Whether what is large may lie in shared memory."""
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
            what, field = f"the vectors of the prompt have {size} bytes", "prompt"
        else:
            what, field = f"the media of the request have {size} bytes once they are processed", "mm_features"
        raise InvalidArgument(f"{what}; engines take up to {limit}", field=field, reason="MESSAGE_TOO_LARGE")

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
            error = output.error
            if output.finish_reason is not FinishReason.ERROR or error is None:
                continue
            if error.field.startswith("mm_features"):  # the engine may have some of them, or none
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


def fill_feature(message: pb.MultiModalFeature, sent: Sent, places: Mapping[int, Place]) -> None:
    """Write an item of media into its message. ``places``: where tensors are that do not go inline, by identity."""
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
