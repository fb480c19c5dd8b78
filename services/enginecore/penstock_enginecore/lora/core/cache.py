"""Cache of adapters in host memory, and the limit on the number of adapters that running requests use at the same
time.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock_common.errors import FailedPrecondition, NotFound, RequestFailed, ResourceExhausted

RETRY_AFTER = 1.0
"""Delay in seconds after which clients may retry, if the adapter cache is full."""


@dataclass(slots=True)
class _Held:
    num_bytes: int
    users: int = 0
    pinned: bool = False
    leaving: bool = False


class LoraCache:
    """Tracks the adapters in host memory by digest, up to ``capacity`` bytes.

    To free memory, the cache evicts the least recently used adapter that is neither in use nor pinned. If an adapter is
    removed while it is in use, it stays until the last request that uses it ends.

    Before memory is allocated for an adapter, the caller must reserve the adapter's size. The size of cached adapters
    plus the reserved size never exceeds ``capacity``. Methods that evict adapters return the digests of the evicted
    adapters. The caller must then tell the workers to free these adapters.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        """Size of all cached adapters in bytes."""
        self.num_reserved = 0
        """Number of bytes that are reserved for adapters that are being loaded."""
        self.num_evictions = 0
        """Number of adapters evicted since the engine started."""
        self._held: dict[bytes, _Held] = {}  # The least recently used adapter is first.

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    @property
    def full(self) -> bool:
        """Whether an additional adapter, of the mean size of cached adapters, would fit only after an eviction."""
        return bool(self._held) and self.num_bytes * (1 + 1 / len(self._held)) > self.capacity

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digests of the cached adapters, least recently used first."""
        return tuple(self._held)

    def is_pinned(self, digest: bytes) -> bool:
        """Return whether an adapter is pinned. Returns False if the adapter is not cached."""
        held = self._held.get(digest)
        return held is not None and held.pinned

    def is_used(self, digest: bytes) -> bool:
        """Return whether requests use an adapter. Returns False if the adapter is not cached."""
        held = self._held.get(digest)
        return held is not None and held.users > 0

    @property
    def _room(self) -> int:
        """Number of bytes that are neither used by cached adapters nor reserved."""
        return self.capacity - self.num_bytes - self.num_reserved

    def reserve(self, num_bytes: int) -> list[bytes]:
        """Reserve bytes for an adapter, until the adapter is added or ``cancel`` is called. Returns the digests of
        evicted adapters.

        Nothing changes if an error is raised.

        Raises:
            FailedPrecondition: The adapter is larger than the capacity of the cache.
            ResourceExhausted: Adapters that are in use, pinned or being loaded leave too few bytes.
        """
        evicted = self._make_room(num_bytes, self._room)
        self.num_reserved += num_bytes
        return evicted

    def has_room_for(self, num_bytes: int) -> bool:
        """Return whether ``reserve`` would succeed without evicting an adapter."""
        return num_bytes <= self._room

    def is_full_for(self, num_bytes: int) -> bool:
        """Return whether ``reserve`` would raise ResourceExhausted."""
        may_go = sum(held.num_bytes for held in self._held.values() if not (held.users or held.pinned))
        return self._room + may_go < num_bytes <= self.capacity

    def cancel(self, num_bytes: int) -> None:
        """Cancel the reservation of ``num_bytes`` bytes."""
        if num_bytes > self.num_reserved:
            raise ValueError(
                f"only {self.num_reserved} bytes are reserved, so a reservation of {num_bytes} bytes cannot be cancelled"
            )
        self.num_reserved -= num_bytes

    def add(self, digest: bytes, num_bytes: int, reserved: int = 0) -> list[bytes]:
        """Add an adapter and mark it as most recently used. Returns the digests of evicted adapters.

        If the adapter is already cached, a pending removal is cancelled. Raises the errors of ``reserve``. If an error
        is raised, nothing changes.

        Args:
            digest: Digest of the adapter.
            num_bytes: Size of the adapter in bytes.
            reserved: Number of bytes that were reserved for this adapter.
        """
        if (held := self._held.get(digest)) is not None:
            held.leaving = False
            self._touch(digest)
            self.cancel(reserved)
            return []
        evicted = self._make_room(num_bytes, self._room + reserved)
        self.cancel(reserved)
        self._held[digest] = _Held(num_bytes)
        self.num_bytes += num_bytes
        return evicted

    def _make_room(self, num_bytes: int, room: int) -> list[bytes]:
        """Evict adapters until ``num_bytes`` bytes are available. Returns the digests of the evicted adapters.

        Args:
            num_bytes: Number of bytes that must be available.
            room: Number of bytes that are available before evictions.
        """
        if num_bytes > self.capacity:
            raise FailedPrecondition(
                f"the adapter has {num_bytes} bytes, but lora.cpu_memory is only {self.capacity} bytes",
                field="lora",
                reason="LORA_TOO_LARGE",
            )
        evicted = []
        for other, entry in self._held.items():
            if room >= num_bytes:
                break
            if not (entry.users or entry.pinned):
                evicted.append(other)
                room += entry.num_bytes
        if room < num_bytes:
            raise ResourceExhausted(
                f"the adapter has {num_bytes} bytes, but only {room} bytes are available: "
                f"{len(self) - len(evicted)} adapters in lora.cpu_memory ({self.capacity} bytes) are in use or pinned",
                field="lora",
                reason="LORA_CACHE_FULL",
                retry_after=RETRY_AFTER,
            )
        for other in evicted:
            self._drop(other)
        self.num_evictions += len(evicted)
        return evicted

    def acquire(self, digest: bytes) -> None:
        """Add a user to a cached adapter. The caller must call ``release`` once for each call."""
        held = self._held[digest]
        held.users += 1
        held.leaving = False
        self._touch(digest)

    def release(self, digest: bytes) -> list[bytes]:
        """Remove a user from an adapter. If the adapter has a pending removal and no other users, the cache frees the
        adapter and returns its digest.
        """
        held = self._held[digest]
        if held.users == 0:
            raise ValueError(f"adapter {digest.hex()} is not in use")
        held.users -= 1
        return self._drop(digest) if held.leaving and not held.users else []

    def pin(self, digest: bytes, *, pinned: bool = True) -> None:
        """Pin an adapter so that it is never evicted, or unpin it. Raises NotFound if the adapter is not cached."""
        held = self._held.get(digest)
        if held is None:
            raise NotFound(f"no adapter with digest {digest.hex()} is loaded", field="digest", reason="LORA_NOT_LOADED")
        held.pinned = pinned
        held.leaving = held.leaving and not pinned

    def remove(self, digest: bytes) -> list[bytes]:
        """Remove an adapter when no request uses it any more. If no request uses it now, the cache frees the adapter
        and returns its digest. Does nothing if the adapter is not cached.
        """
        held = self._held.get(digest)
        if held is None:
            return []
        held.pinned = False
        held.leaving = held.users > 0
        return [] if held.leaving else self._drop(digest)

    def _touch(self, digest: bytes) -> None:
        self._held[digest] = self._held.pop(digest)

    def _drop(self, digest: bytes) -> list[bytes]:
        self.num_bytes -= self._held.pop(digest).num_bytes
        return [digest]


# Reservation of memory in the cache for adapters that are being loaded.


@dataclass(slots=True)
class Reservation:
    """The bytes that a load has reserved in the cache.

    Attributes:
        number: Sequence number of the last command that workers must execute before they use the reserved memory,
            because earlier commands free it.
        ended: Whether the load has ended and needs no more bytes.
    """

    num_bytes: int = 0
    number: int = 0
    ended: bool = False


class NotWantedError(Exception):
    """Raised when a load would have to evict an adapter, but no request waits for the load any more."""


class Want(NamedTuple):
    """Request of a load for memory in the adapter cache.

    Attributes:
        made: Future that completes when the bytes are reserved, or fails if they cannot be reserved.
        is_wanted: Function that returns whether a request or call still waits for the adapter.
    """

    reservation: Reservation
    num_bytes: int
    made: "Future[None]"
    is_wanted: Callable[[], bool]


class LoraRoom:
    """Reserves memory in the adapter cache for loads, in the order of the loads' requests. If too little memory is
    available, a load waits until the earlier loads have ended, because an earlier load may fail and free its
    reservation.

    Args:
        unload: Function that tells workers to free adapters, and returns the sequence number of the last command to
            workers.
    """

    def __init__(self, cache: LoraCache, unload: Callable[[list[bytes]], int]) -> None:
        self._cache = cache
        self._unload = unload
        self._wants: deque[Want] = deque()

    def want(self, want: Want) -> None:
        """Queue a request for cache memory."""
        self._wants.append(want)
        self._serve()

    def end(self, reservation: Reservation) -> None:
        """Handle the end of a load, whether it succeeded or failed."""
        reservation.ended = True
        self._cache.cancel(reservation.num_bytes)
        reservation.num_bytes = 0
        self._serve()

    def _serve(self) -> None:
        while self._wants:
            reservation, num_bytes, made, is_wanted = self._wants[0]
            if reservation.ended:
                made.cancel()  # The workers may have ended in the meantime.
            elif not is_wanted() and not self._cache.has_room_for(num_bytes):
                made.set_exception(NotWantedError("no request waits for the adapter any more"))
            elif self._cache.num_reserved and self._cache.is_full_for(num_bytes):
                return
            else:
                try:
                    reservation.number = self._unload(self._cache.reserve(num_bytes))
                except RequestFailed as e:
                    made.set_exception(e)
                else:
                    reservation.num_bytes += num_bytes
                    made.set_result(None)
            self._wants.popleft()


# Slots of the adapters that running requests use at the same time, as a state machine. Its inputs are requests that
# start, wait or leave. Its outputs are requests that may start.


@dataclass(slots=True)
class _Slot:
    """The slot of one adapter.

    Attributes:
        running: Running requests with this adapter.
        granted: Requests that waited for the slot and may start now, but have not started yet. The slot is reserved for
            these requests.
        closing: Whether the slot admits no more requests, so that it becomes free for another adapter.
    """

    name: str
    running: set[str] = field(default_factory=set)
    granted: set[str] = field(default_factory=set)
    closing: bool = False

    @property
    def empty(self) -> bool:
        return not (self.running or self.granted)


@dataclass(slots=True)
class _Line:
    """Requests that wait for the slot of one adapter, oldest first, with the time in seconds at which each wait began."""

    name: str
    since: dict[str, float] = field(default_factory=dict)

    @property
    def oldest(self) -> float:
        return next(iter(self.since.values()))


class LoraSlots:
    """Limits the running requests to ``max_loras`` different adapters. Requests with other adapters wait, and do not
    block requests after them in the queue.

    A free slot is assigned to the adapter whose request has waited longest. An adapter is overdue if it has waited for
    ``max_wait`` seconds. If no slot is free, one slot is closed for each overdue adapter. A closed slot admits no more
    requests. The slots that have been occupied longest are closed first. Once a closed slot is empty, it is assigned to
    a waiting adapter. If the number of waiting adapters is at most the number of slots, an adapter waits at most
    ``max_wait`` plus the duration of the longest running request.

    Requests are identified by key, adapters by digest. ``name`` is the label of an adapter in metrics. ``now`` is in
    monotonic seconds.
    """

    def __init__(self, max_loras: int, max_wait: float) -> None:
        self._max_loras = max_loras
        self._max_wait = max_wait
        self._slots: dict[bytes, _Slot] = {}  # The adapter that has been active for the longest time is first.
        self._lines: dict[bytes, _Line] = {}
        self._digests: dict[str, bytes] = {}

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digests of the adapters that have a slot, longest active first. Thread-safe."""
        return tuple(self._slots)

    @property
    def active(self) -> list[str]:
        """Names of the adapters that have a slot."""
        return [slot.name for slot in list(self._slots.values())]

    @property
    def waiting(self) -> list[str]:
        """Names of the adapters that wait for a slot."""
        return [line.name for line in list(self._lines.values())]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return sum(len(line.since) for line in list(self._lines.values()))

    def admits(self, digest: bytes) -> bool:
        """Return whether a request with this adapter may start now."""
        slot = self._slots.get(digest)
        if slot is not None:
            return not slot.closing
        return len(self._slots) < self._max_loras and not self._lines

    def start(self, key: str, digest: bytes, name: str) -> None:
        """Record that a request starts. Raises ValueError if ``admits`` is False for the request's adapter, or if the
        request is already running.
        """
        if not self.admits(digest):
            raise ValueError(f"request {key!r} starts with adapter {digest.hex()}, but the adapter has no slot")
        slot = self._slots.setdefault(digest, _Slot(name))
        if key in slot.running:
            raise ValueError(f"request {key!r} is already running")
        slot.granted.discard(key)
        slot.running.add(key)
        slot.name = name
        self._digests[key] = digest

    def wait(self, key: str, digest: bytes, name: str, now: float) -> None:
        """Record that a request waits for a slot."""
        line = self._lines.setdefault(digest, _Line(name))
        line.since[key] = now
        self._digests[key] = digest

    def leave(self, key: str) -> None:
        """Record that a request has ended or was preempted. Does nothing if the request is unknown."""
        digest = self._digests.pop(key, None)
        if digest is None:
            return
        if (line := self._lines.get(digest)) is not None and line.since.pop(key, None) is not None and not line.since:
            del self._lines[digest]
        if (slot := self._slots.get(digest)) is not None:
            slot.running.discard(key)
            slot.granted.discard(key)
            if slot.empty:
                del self._slots[digest]

    def reset(self) -> list[str]:
        """Empty all slots and queues. Returns the requests that were waiting."""
        waited = [key for line in self._lines.values() for key in line.since]
        self._slots.clear()
        self._lines.clear()
        self._digests.clear()
        return waited

    def settle(self, now: float) -> list[str]:
        """Assign free slots to waiting adapters, and close slots for overdue adapters. Returns the requests that may
        start now.

        A returned request may start until the slot of its adapter is closed.
        """
        if not self._lines:
            for slot in self._slots.values():
                slot.closing = False
            return []
        released = self._serve()
        self._close_for_overdue(now, fresh={self._digests[key] for key in released})
        return released + self._serve()

    def _serve(self) -> list[str]:
        """Assign slots to waiting adapters, longest wait first, until no slot is free."""
        released: list[str] = []
        for digest, slot in self._slots.items():
            if digest in self._lines and not slot.closing:  # The slot of this adapter admits requests again.
                released += self._grant(slot, self._lines.pop(digest))
        while self._lines and (len(self._slots) < self._max_loras or not self._lines.keys().isdisjoint(self._slots)):
            digest = min(self._lines, key=lambda waiting: self._lines[waiting].oldest)
            if digest not in self._slots and len(self._slots) >= self._max_loras:
                break
            line = self._lines.pop(digest)
            released += self._grant(self._slots.setdefault(digest, _Slot(line.name)), line)
        return released

    def _grant(self, slot: _Slot, line: _Line) -> list[str]:
        slot.closing = False
        slot.granted.update(line.since)
        return list(line.since)

    def _close_for_overdue(self, now: float, fresh: set[bytes]) -> None:
        """Close one slot for each overdue adapter, and reopen slots that need not be closed any more.

        Args:
            now: Monotonic time, in seconds.
            fresh: Adapters that just got a slot, so that their requests could not start yet.
        """
        overdue = sum(line.oldest + self._max_wait <= now for line in self._lines.values())
        closing = [slot for slot in self._slots.values() if slot.closing]
        for slot in closing[overdue:]:  # Fewer adapters are overdue than before, so fewer slots must be closed.
            slot.closing = False
        if len(closing) >= overdue:
            return
        others = [(digest, slot) for digest, slot in self._slots.items() if not slot.closing and digest not in fresh]
        for digest, slot in others[: overdue - len(closing)]:
            slot.closing = True
            for key in slot.granted:  # These requests did not start while the slot admitted them, so they wait again.
                del self._digests[key]
            slot.granted.clear()
            if slot.empty:
                del self._slots[digest]
