"""Which adapters the engine holds in host memory, those on their way, and who waits for them."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from penstock_common.errors import FailedPrecondition, NotFound, RequestFailed, ResourceExhausted
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.base import Clock
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest

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


# Adapters on their way, and who waits for them.


class HeldLora(msgspec.Struct, frozen=True, kw_only=True):
    """What operators are told of an adapter that the engine holds. ``rank``: the largest of its layers'."""

    digest: bytes
    rank: int
    modules: tuple[str, ...]
    num_bytes: int
    pinned: bool


class Call(NamedTuple):
    """Somebody who has asked for an adapter, and waits for what it is."""

    answer: "Future[HeldLora]"
    pinned: bool


@dataclass(slots=True)
class Load:
    """An adapter on its way. ``number``: of what the workers were told; ``began``: seconds. ``requests``: those that wait for it
    and have not ended, by key.
    """

    lora: LoraRequest
    number: int
    began: float
    reservation: Reservation = field(default_factory=Reservation)
    requests: dict[str, Request] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return bool(self.requests or self.calls)


class Loads:
    """Those of an engine's ``executor``: one for each adapter, however many wait for it. ``tell`` is called on any thread with a
    load that needs room, and with one that is over and what came of it.
    """

    def __init__(
        self,
        executor: Executor,
        tell: "Callable[[Want | tuple[Load, Future[LoadedLora]]], None]",
        clock: Clock = time.monotonic,
    ) -> None:
        self._executor = executor
        self._tell = tell
        self._clock = clock
        self._loads: dict[LoraRequest, Load] = {}
        self._waiting: dict[str, Load] = {}
        """By key of the request that waits for it."""
        self._let_go: dict[bytes, int] = {}
        """What workers were told to let go of while loads were under way, with the number that that had."""
        self.number = 0
        """Of what the workers were told last."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a load. Any thread."""
        return len(self._waiting)

    def digests(self) -> Iterator[bytes]:
        """Those on their way, as far as they are known. Any thread."""
        return (lora.digest for lora in list(self._loads) if lora.digest)

    def of(self, lora: LoraRequest) -> Load:
        """The load that reads ``lora``: one that is under way, or a new one."""
        load = self._loads.get(_what(lora))
        if load is None:
            load = Load(lora, 0, self._clock())
            self._begin(load)
        return load

    def again(self, load: Load) -> None:
        """Have what was loaded loaded once more, for those who wait for it."""
        known = self._loads.get(_what(load.lora))
        if known is None:
            known = load
            self._begin(load)
        else:
            known.calls += load.calls
        for request in load.requests.values():
            self.wait(request, known)

    def wait(self, request: Request, load: Load) -> None:
        """``request`` waits for it from now on."""
        load.requests[request.key] = request
        self._waiting[request.key] = load

    def give_up(self, request: Request) -> None:
        """A request has ended before its adapter was there."""
        if (load := self._waiting.pop(request.key, None)) is not None:
            del load.requests[request.key]

    def end(self, load: Load) -> None:
        """It is over. Those who waited for it are its own yet."""
        self._loads.pop(_what(load.lora))
        for key in load.requests:
            del self._waiting[key]

    def settle(self) -> None:
        """All that was over is taken care of."""
        if not self._loads:
            self._let_go.clear()

    def unload(self, digest: bytes) -> None:
        """Have the workers let go of an adapter."""
        self.number += 1
        if self._loads:
            self._let_go[digest] = self.number
        self._executor.unload_lora(digest)

    def was_let_go(self, digest: bytes, since: int = 0) -> bool:
        """Whether workers were told to let go of it while loads were under way, behind what had the number ``since``."""
        return self._let_go.get(digest, 0) > since

    def _begin(self, load: Load) -> None:
        self.number += 1
        load.number, load.reservation = self.number, Reservation()
        future = self._executor.load_lora(load.lora, partial(self._want, load, load.reservation))
        self._loads[_what(load.lora)] = load
        future.add_done_callback(lambda done: self._tell((load, done)))

    def _want(self, load: Load, reservation: Reservation, num_bytes: int, made: "Future[None]") -> None:
        """Any thread."""
        self._tell(Want(reservation, num_bytes, made, lambda: load.is_wanted))


def _what(lora: LoraRequest) -> LoraRequest:
    """What a load reads: names are labels."""
    return LoraRequest("", lora.path, lora.digest)
