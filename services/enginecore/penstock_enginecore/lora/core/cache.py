"""Which adapters the engine holds in host memory, and which may run together."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock_common.errors import FailedPrecondition, NotFound, RequestFailed, ResourceExhausted

RETRY_AFTER = 1.0
"""Seconds that a client is told to wait for an adapter's memory."""


@dataclass(slots=True)
class _Held:
    num_bytes: int
    users: int = 0
    pinned: bool = False
    leaving: bool = False


class LoraCache:
    """Adapters by digest, up to ``capacity`` bytes. Those that make room are the least recently used, of those that nobody uses
    and that are not pinned. One that is removed while it is used stays until its last user has gone.

    Room is reserved for an adapter before there is memory of it; what is held and what is reserved never exceed ``capacity``.
    Methods that make adapters leave return their digests: the caller has the workers let go of them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        """Of the adapters that are held."""
        self.num_reserved = 0
        """Bytes for adapters that are on their way."""
        self.num_evictions = 0
        """Adapters that had to go for others, since the start."""
        self._held: dict[bytes, _Held] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    @property
    def full(self) -> bool:
        """Whether another adapter of the mean size would have to take the place of others."""
        return bool(self._held) and self.num_bytes * (1 + 1 / len(self._held)) > self.capacity

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Those that are held, the least recently used first."""
        return tuple(self._held)

    def is_pinned(self, digest: bytes) -> bool:
        """Whether an adapter stays until it is removed or unpinned; also False for one that is not held."""
        held = self._held.get(digest)
        return held is not None and held.pinned

    def is_used(self, digest: bytes) -> bool:
        """Whether an adapter has users; also False for one that is not held."""
        held = self._held.get(digest)
        return held is not None and held.users > 0

    @property
    def _room(self) -> int:
        """Bytes that are neither held nor reserved."""
        return self.capacity - self.num_bytes - self.num_reserved

    def reserve(self, num_bytes: int) -> list[bytes]:
        """Keep room for an adapter, until it is added or ``cancel`` is called. Returns those that had to go for it.

        Raises FailedPrecondition for one that is larger than all there is, ResourceExhausted while those in use, pinned and on
        their way leave too little; nothing has changed then.
        """
        evicted = self._make_room(num_bytes, self._room)
        self.num_reserved += num_bytes
        return evicted

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether ``reserve`` would let no other go."""
        return num_bytes <= self._room

    def is_full_for(self, num_bytes: int) -> bool:
        """Whether ``reserve`` would raise ResourceExhausted."""
        may_go = sum(held.num_bytes for held in self._held.values() if not (held.users or held.pinned))
        return self._room + may_go < num_bytes <= self.capacity

    def cancel(self, num_bytes: int) -> None:
        """Of what was reserved, so much is not needed."""
        if num_bytes > self.num_reserved:
            raise ValueError(f"{self.num_reserved} bytes are reserved, not {num_bytes}")
        self.num_reserved -= num_bytes

    def add(self, digest: bytes, num_bytes: int, reserved: int = 0) -> list[bytes]:
        """Hold an adapter from now on, as the most recently used; one that is held already counts as used now, and stays if it
        was to leave. ``reserved``: bytes that were, for it. Returns those that had to go for it. Raises as ``reserve``; nothing
        has changed then.
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
        """``room``: bytes that there are. Returns those that have gone for the rest."""
        if num_bytes > self.capacity:
            raise FailedPrecondition(
                f"the adapter has {num_bytes} bytes; lora.cpu_memory is {self.capacity}",
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
                f"the adapter has {num_bytes} bytes and there is room for {room}: the other "
                f"{len(self) - len(evicted)} of lora.cpu_memory, {self.capacity} bytes, are in use or pinned",
                field="lora",
                reason="LORA_CACHE_FULL",
                retry_after=RETRY_AFTER,
            )
        for other in evicted:
            self._drop(other)
        self.num_evictions += len(evicted)
        return evicted

    def acquire(self, digest: bytes) -> None:
        """Use an adapter that is held; ``release`` must follow."""
        held = self._held[digest]
        held.users += 1
        held.leaving = False
        self._touch(digest)

    def release(self, digest: bytes) -> list[bytes]:
        """End a use. Returns the adapter where it was removed meanwhile, and this was the last one."""
        held = self._held[digest]
        if held.users == 0:
            raise ValueError(f"adapter {digest.hex()} is not in use")
        held.users -= 1
        return self._drop(digest) if held.leaving and not held.users else []

    def pin(self, digest: bytes, *, pinned: bool = True) -> None:
        """Keep an adapter whatever else is loaded; not ``pinned``: no more. Raises NotFound for one that is not held."""
        held = self._held.get(digest)
        if held is None:
            raise NotFound(f"no adapter with digest {digest.hex()} is loaded", field="digest", reason="LORA_NOT_LOADED")
        held.pinned = pinned
        held.leaving = held.leaving and not pinned

    def remove(self, digest: bytes) -> list[bytes]:
        """Hold an adapter no longer than it is used. Returns it where it leaves at once; one that is not held is passed over."""
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


# Room for adapters that are on their way.


@dataclass(slots=True)
class Reservation:
    """What a load has in the cache. ``number``: of what workers were told last before they take it. ``ended``: it needs nothing
    any more.
    """

    num_bytes: int = 0
    number: int = 0
    ended: bool = False


class NotWantedError(Exception):
    """Nobody waits any more for an adapter, whose place would be that of another."""


class Want(NamedTuple):
    """A load that needs so many bytes. ``made``: ends when it has them, or cannot have them. ``is_wanted``: whether anybody waits
    for it.
    """

    reservation: Reservation
    num_bytes: int
    made: "Future[None]"
    is_wanted: Callable[[], bool]


class LoraRoom:
    """Makes room for those that want it, in their order: one that finds none waits for those on their way before it, of which
    some may fail. ``unload``: has workers let go of adapters, and gives the number of what they were told last.
    """

    def __init__(self, cache: LoraCache, unload: Callable[[list[bytes]], int]) -> None:
        self._cache = cache
        self._unload = unload
        self._wants: deque[Want] = deque()

    def want(self, want: Want) -> None:
        """Ask for room."""
        self._wants.append(want)
        self._serve()

    def end(self, reservation: Reservation) -> None:
        """A load has ended, however it did."""
        reservation.ended = True
        self._cache.cancel(reservation.num_bytes)
        reservation.num_bytes = 0
        self._serve()

    def _serve(self) -> None:
        while self._wants:
            reservation, num_bytes, made, is_wanted = self._wants[0]
            if reservation.ended:
                made.cancel()  # its workers have gone meanwhile
            elif not is_wanted() and not self._cache.has_room_for(num_bytes):
                made.set_exception(NotWantedError("nobody waits for the adapter any more"))
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


# Which adapters run together. A state machine: requests that start, wait and leave in, those whose wait is over out.


@dataclass(slots=True)
class _Slot:
    """``running``: requests with the adapter that run. ``granted``: those that waited for the slot and have not started yet; it
    is kept for them. ``closing``: nobody starts any more.
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
    """Requests that wait for one adapter's slot, with the seconds since when each does, the oldest first."""

    name: str
    since: dict[str, float] = field(default_factory=dict)

    @property
    def oldest(self) -> float:
        return next(iter(self.since.values()))


class LoraSlots:
    """At most ``max_loras`` adapters among running requests. One whose adapter is not among them waits, and is in nobody's way.

    A slot that is free goes to the adapter of the request that has waited longest. While adapters have waited for ``max_wait``
    seconds and none is free, as many others admit no more, those first that have had theirs longest: they go over
    once they are empty. So no adapter waits longer than ``max_wait`` and what the longest running request takes, while no more
    adapters than there are slots wait. Requests are known by key, adapters by digest; ``name`` is what stands for one in
    metrics. ``now``: monotonic seconds.
    """

    def __init__(self, max_loras: int, max_wait: float) -> None:
        self._max_loras = max_loras
        self._max_wait = max_wait
        self._slots: dict[bytes, _Slot] = {}  # that which has been active longest first
        self._lines: dict[bytes, _Line] = {}
        self._digests: dict[str, bytes] = {}

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The adapters that have a slot, that which has had it longest first. Any thread."""
        return tuple(self._slots)

    @property
    def active(self) -> list[str]:
        """Names of the adapters that have a slot."""
        return [slot.name for slot in list(self._slots.values())]

    @property
    def waiting(self) -> list[str]:
        """Names of the adapters that wait for one."""
        return [line.name for line in list(self._lines.values())]

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(len(line.since) for line in list(self._lines.values()))

    def admits(self, digest: bytes) -> bool:
        """Whether a request with this adapter may start now."""
        slot = self._slots.get(digest)
        if slot is not None:
            return not slot.closing
        return len(self._slots) < self._max_loras and not self._lines

    def start(self, key: str, digest: bytes, name: str) -> None:
        """A request starts. ValueError for one that ``admits`` does not let in, or that runs."""
        if not self.admits(digest):
            raise ValueError(f"request {key!r} starts with adapter {digest.hex()}, which has no slot")
        slot = self._slots.setdefault(digest, _Slot(name))
        if key in slot.running:
            raise ValueError(f"request {key!r} runs already")
        slot.granted.discard(key)
        slot.running.add(key)
        slot.name = name
        self._digests[key] = digest

    def wait(self, key: str, digest: bytes, name: str, now: float) -> None:
        """A request that could start waits for a slot instead."""
        line = self._lines.setdefault(digest, _Line(name))
        line.since[key] = now
        self._digests[key] = digest

    def leave(self, key: str) -> None:
        """A request has ended or lost its turn, wherever it was; one that is not known is passed over."""
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
        """Every request has lost its turn, and its place in line: all begin anew. Returns those that waited."""
        waited = [key for line in self._lines.values() for key in line.since]
        self._slots.clear()
        self._lines.clear()
        self._digests.clear()
        return waited

    def settle(self, now: float) -> list[str]:
        """See about those that wait. Returns the requests whose wait is over: each may start until its slot is taken back."""
        if not self._lines:
            for slot in self._slots.values():
                slot.closing = False
            return []
        released = self._serve()
        self._close_for_overdue(now, fresh={self._digests[key] for key in released})
        return released + self._serve()

    def _serve(self) -> list[str]:
        """Give slots to those that wait, the oldest first, until none is left."""
        released: list[str] = []
        for digest, slot in self._slots.items():
            if digest in self._lines and not slot.closing:  # it was open again
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
        """``fresh``: adapters whose requests have got their turn just now, and could not start yet."""
        overdue = sum(line.oldest + self._max_wait <= now for line in self._lines.values())
        closing = [slot for slot in self._slots.values() if slot.closing]
        for slot in closing[overdue:]:  # those that waited have gone
            slot.closing = False
        if len(closing) >= overdue:
            return
        others = [(digest, slot) for digest, slot in self._slots.items() if not slot.closing and digest not in fresh]
        for digest, slot in others[: overdue - len(closing)]:
            slot.closing = True
            for key in slot.granted:  # they have had their chance
                del self._digests[key]
            slot.granted.clear()
            if slot.empty:
                del self._slots[digest]
