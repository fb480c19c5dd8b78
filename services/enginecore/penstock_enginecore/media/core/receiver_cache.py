"""Cache of media tensors that frontends have sent, so that a frontend sends each tensor only once per session."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from penstock_common.errors import FailedPrecondition, ResourceExhausted
from penstock_common.types.media import MultiModalFeature, TensorData

NOT_CACHED = "MEDIA_NOT_CACHED"
"""Error reason: the request omits a tensor that the session has not cached. The frontend then sends the request again
with the tensor.
"""
CACHE_FULL = "MEDIA_CACHE_FULL"
"""Error reason: caching the request's tensors would exceed the quota of the session. This happens if the frontend's
record of the cache differs from the engine's record.
"""

Tensors = dict[str, TensorData]


class ReceivedFeature(msgspec.Struct, frozen=True):
    """A media item in a received request. ``keep`` says whether the engine must cache the item's data for the
    session.
    """

    feature: MultiModalFeature
    keep: bool


class _Item:
    """Tensors of one media item, and the number of sessions that cache the item."""

    __slots__ = ("data", "num_sessions")

    def __init__(self, data: Tensors) -> None:
        self.data = data
        self.num_sessions = 0


class MediaInputs(NamedTuple):
    """Access to the media inputs that are cached for frontends: functions that return their size in bytes, and that
    drop them. Thread-safe.
    """

    num_bytes: Callable[[], int] = lambda: 0
    clear: Callable[[], None] = lambda: None


class ReceiverCache:
    """Caches the media tensors of all sessions. Each item is stored once, even if several sessions cache it. The cache
    never evicts items, because each session's frontend decides which items to keep and to drop.

    Requests refer to their tensors, so a dropped tensor stays in memory until the requests that need the tensor have
    ended. Only one thread may use the object, except for ``num_bytes``.
    """

    def __init__(self, quota: int) -> None:
        """Create an empty cache. Each session may cache ``quota`` bytes. The full size of an item counts for each
        session that caches the item.
        """
        self.quota = quota
        self._items: dict[str, _Item] = {}
        self._sessions: weakref.WeakSet[SessionFeatures] = weakref.WeakSet()
        self._bytes = _LivingBytes()

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of media tensors in host memory, including tensors that only unfinished requests use.
        Thread-safe.
        """
        return self._bytes.total

    def __len__(self) -> int:
        """Return the number of items that at least one session caches."""
        return len(self._items)

    def session(self) -> "SessionFeatures":
        """Return the cache of a new session."""
        session = SessionFeatures(self)
        self._sessions.add(session)
        return session

    def clear(self) -> None:
        """Drop the cached items of all sessions."""
        for session in self._sessions:
            session.clear()

    def shared(self, identifier: str, data: Tensors) -> Tensors:
        """Return the cached data of the item ``identifier``, or ``data`` if the item is not cached. Items with equal
        identifiers have equal content.
        """
        item = self._items.get(identifier)
        if item is not None:
            return item.data
        self._bytes.watch(data.values())
        return data

    def hold(self, identifier: str, data: Tensors) -> None:
        """Record that one more session caches the item."""
        item = self._items.setdefault(identifier, _Item(data))
        item.num_sessions += 1

    def release(self, identifier: str) -> None:
        """Record that one session no longer caches the item. If no session caches the item, drop it."""
        item = self._items[identifier]
        item.num_sessions -= 1
        if not item.num_sessions:
            del self._items[identifier]

    def kept(self, identifier: str) -> Tensors:
        """Return the cached data of an item. The item must be in the cache."""
        return self._items[identifier].data


class SessionFeatures:
    """The items that one session has cached."""

    def __init__(self, cache: ReceiverCache) -> None:
        self._cache = cache
        self._sizes: dict[str, int] = {}
        """Size in bytes of each item that the session has cached, by identifier."""
        self.num_bytes = 0

    @property
    def identifiers(self) -> frozenset[str]:
        """Identifiers of the items that the session has cached."""
        return frozenset(self._sizes)

    def take(self, received: Sequence[ReceivedFeature]) -> list[MultiModalFeature]:
        """Return a request's media items with their data, in order. Cache the items whose ``keep`` is true.

        An item without data may refer to an earlier item of the same request. If an error is raised, no item is cached.

        Raises:
            FailedPrecondition: An item has no data and is not cached (reason MEDIA_NOT_CACHED).
            ResourceExhausted: The session would exceed its quota (reason MEDIA_CACHE_FULL).
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
                        f"{field} has no data, and the session has not cached {identifier}; send the feature with its data",
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
                f"with mm_features, the session would cache {total} bytes; the limit is receiver_cache_bytes, "
                f"{self._cache.quota}",
                field="mm_features",
                reason=CACHE_FULL,
            )
        for identifier in new:
            self._cache.hold(identifier, found[identifier])
        self._sizes |= new
        self.num_bytes = total

    def drop(self, identifiers: Iterable[str]) -> None:
        """Drop cached items of the session. Unknown identifiers are ignored."""
        for identifier in identifiers:
            if (size := self._sizes.pop(identifier, None)) is not None:
                self.num_bytes -= size
                self._cache.release(identifier)

    def clear(self) -> None:
        """Drop all cached items of the session."""
        self.drop(list(self._sizes))


class _LivingBytes:
    """Counts the bytes of tensors that are still in memory because an object refers to them. Tensors may be freed on
    any thread.
    """

    def __init__(self) -> None:
        self._lock = (
            threading.RLock()
        )  # The lock is reentrant, because garbage collection may free a tensor while the lock is held.
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
