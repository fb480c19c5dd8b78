"""Features of media that sessions have had the engine keep, so that their tensors are sent once."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from penstock_common.errors import FailedPrecondition, ResourceExhausted
from penstock_common.types.media import MultiModalFeature, TensorData

NOT_CACHED = "MEDIA_NOT_CACHED"
"""The reason for which a request is refused that leaves out what its session has not had kept: it is to be sent again with it."""
CACHE_FULL = "MEDIA_CACHE_FULL"
"""The reason for which a request is refused that would have more kept than its session may: its frontend and this end disagree.
"""

Tensors = dict[str, TensorData]


class ReceivedFeature(msgspec.Struct, frozen=True):
    """A feature as a message has it; ``keep``: its data is to be kept for the session."""

    feature: MultiModalFeature
    keep: bool


class _Item:
    """What is kept under one identifier, and for how many sessions."""

    __slots__ = ("data", "num_sessions")

    def __init__(self, data: Tensors) -> None:
        self.data = data
        self.num_sessions = 0


class MediaInputs(NamedTuple):
    """The inputs of media that are kept for frontends: how many bytes, and how an engine forgets them. Any thread."""

    num_bytes: Callable[[], int] = lambda: 0
    clear: Callable[[], None] = lambda: None


class ReceiverCache:
    """The bytes of all sessions, each item once. It evicts nothing: a session's frontend says what to keep and what to drop.

    Requests hold the tensors themselves: what is dropped lives on until those have ended that need it. Belongs to one thread, but
    for ``num_bytes``.
    """

    def __init__(self, quota: int) -> None:
        """``quota``: bytes that one session may have kept, each item counted as it was sent."""
        self.quota = quota
        self._items: dict[str, _Item] = {}
        self._sessions: weakref.WeakSet[SessionFeatures] = weakref.WeakSet()
        self._bytes = _LivingBytes()

    @property
    def num_bytes(self) -> int:
        """Of features in host memory, kept or of requests that have not ended. Any thread may ask."""
        return self._bytes.total

    def __len__(self) -> int:
        """Items that are kept for at least one session."""
        return len(self._items)

    def session(self) -> "SessionFeatures":
        """What a new session has kept: nothing yet."""
        session = SessionFeatures(self)
        self._sessions.add(session)
        return session

    def clear(self) -> None:
        """Forget what all sessions have kept: what they leave out from now on is not there."""
        for session in self._sessions:
            session.clear()

    def shared(self, identifier: str, data: Tensors) -> Tensors:
        """The same data as others hold it; the identifier stands for its content."""
        item = self._items.get(identifier)
        if item is not None:
            return item.data
        self._bytes.watch(data.values())
        return data

    def hold(self, identifier: str, data: Tensors) -> None:
        """One more session has it kept."""
        item = self._items.setdefault(identifier, _Item(data))
        item.num_sessions += 1

    def release(self, identifier: str) -> None:
        """One session less has it kept."""
        item = self._items[identifier]
        item.num_sessions -= 1
        if not item.num_sessions:
            del self._items[identifier]

    def kept(self, identifier: str) -> Tensors:
        """What is kept under an identifier."""
        return self._items[identifier].data


class SessionFeatures:
    """What one session has had kept."""

    def __init__(self, cache: ReceiverCache) -> None:
        self._cache = cache
        self._sizes: dict[str, int] = {}
        """By identifier, the bytes that were sent."""
        self.num_bytes = 0

    @property
    def identifiers(self) -> frozenset[str]:
        """What is kept."""
        return frozenset(self._sizes)

    def take(self, received: Sequence[ReceivedFeature]) -> list[MultiModalFeature]:
        """A request's features with their data, in order. Those that are to be kept are from now on, all of them or, where this
        raises, none. One without data may stand for one before it in the same request.

        Raises FailedPrecondition, reason MEDIA_NOT_CACHED, for one without data that is not there, and ResourceExhausted, reason
        MEDIA_CACHE_FULL, where the session would have more kept than it may.
        """
        whole: list[MultiModalFeature] = []
        found: dict[str, Tensors] = {}
        new: dict[str, int] = {}
        for place, (feature, keep) in enumerate((each.feature, each.keep) for each in received):
            identifier = feature.identifier
            if identifier not in found:
                if feature.data:
                    found[identifier] = self._cache.shared(identifier, feature.data)
                elif identifier in self._sizes:
                    found[identifier] = self._cache.kept(identifier)
                else:
                    field = f"mm_features[{place}]"
                    raise FailedPrecondition(
                        f"{field} has no data, and the session has none of {identifier}; send it with its data",
                        field=field,
                        reason=NOT_CACHED,
                    )
            if keep and feature.data and identifier not in self._sizes:
                new[identifier] = feature.num_bytes
            whole.append(msgspec.structs.replace(feature, data=found[identifier]))
        self._keep(new, found)
        return whole

    def _keep(self, new: dict[str, int], found: dict[str, Tensors]) -> None:
        total = self.num_bytes + sum(new.values())
        if total > self._cache.quota:
            raise ResourceExhausted(
                f"mm_features would have {total} bytes kept for the session; the limit is receiver_cache_bytes, "
                f"{self._cache.quota}",
                field="mm_features",
                reason=CACHE_FULL,
            )
        for identifier in new:
            self._cache.hold(identifier, found[identifier])
        self._sizes |= new
        self.num_bytes = total

    def drop(self, identifiers: Iterable[str]) -> None:
        """Keep these no longer; what is not kept is passed over."""
        for identifier in identifiers:
            if (size := self._sizes.pop(identifier, None)) is not None:
                self.num_bytes -= size
                self._cache.release(identifier)

    def clear(self) -> None:
        """Keep nothing."""
        self.drop(list(self._sizes))


class _LivingBytes:
    """Bytes of the tensors that somebody still holds. They may go on any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a tensor may go while the lock is held, where memory is collected
        self.total = 0

    def watch(self, tensors: Iterable[TensorData]) -> None:
        for tensor in tensors:
            size = len(tensor.data)
            with self._lock:
                self.total += size
            weakref.finalize(tensor, self._gone, size).atexit = False

    def _gone(self, size: int) -> None:
        with self._lock:
            self.total -= size
