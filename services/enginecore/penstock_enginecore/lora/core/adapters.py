"""LoRA adapters of an engine's requests. The module tracks which adapters are in memory, which are being loaded, and
which are used by running requests. A request waits until its adapter is ready.
"""

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import msgspec

from penstock_common.bounded_queue import DrainRate
from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.lora_registry import MAX_HELD, LoraAdapter, LoraHeld, short
from penstock_common.observability.logging import incident
from penstock_common.types.outputs import MAX_WAITING_NAMES, LoraStats, RequestError
from penstock_enginecore.config import LoraConfig
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.core.request import Hold, Request
from penstock_enginecore.core.scheduler.base import Clock, Scheduler, StepResource
from penstock_enginecore.core.utility import utility
from penstock_enginecore.lora.core.cache import LoraCache, LoraRoom, LoraSlots, NotWantedError, Reservation, Want
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, PartlyLoadedError

logger = logging.getLogger(__name__)

# Report of the engine's adapters to the cluster, with the measured time that loading an adapter takes.

_LATEST = 0.25
"""Weight of the latest load in the moving average of loading times."""


class LoraHoldings:
    """Builds the report about this engine's adapters for the cluster. A new report is built only after a change.

    Only the busy loop's thread may call the methods, except for ``of``, which any thread may call.
    """

    def __init__(self, max_loras: int, clock: Callable[[], float]) -> None:
        self._max_loras = max_loras
        self._clock = clock
        self.num_changes = 0
        """Number of calls of ``changed``."""
        self._rate = DrainRate()
        self._num_requests = 0
        self._load_seconds = 0.0
        self._request_seconds = 0.0
        self._told_at: tuple[int, Sequence[bytes]] = (-1, ())
        self._told = LoraHeld()
        self._lock = threading.Lock()  # This lock protects the last report.

    def changed(self) -> None:
        """Record that adapters were added or removed, or that the load of an adapter has started."""
        self.num_changes += 1

    def loaded(self, seconds: float) -> None:
        """Record that an adapter was loaded in ``seconds``."""
        self._load_seconds += (seconds - self._load_seconds) * (_LATEST if self._load_seconds else 1.0)
        self.changed()

    def began(self) -> None:
        """Record that a request got its adapter."""
        if not self._num_requests:
            self._rate.begin(self._clock())
        self._num_requests += 1

    def ended(self) -> None:
        """Record that a request has stopped using its adapter."""
        now = self._clock()
        self._num_requests -= 1
        self._rate.left(now, 0.0)
        self._request_seconds = self._rate.time_for(now, 1.0, 0.0) or 0.0

    def of(self, active: Sequence[bytes], held: Callable[[], Iterable[bytes]], *, full: bool = False) -> LoraHeld:
        """Return the current report. Thread-safe.

        Args:
            active: Digests of the adapters that have a slot.
            held: Function that returns the digests of the adapters that are in memory or being loaded, most recently
                used first.
            full: Whether the cache has no room for another adapter.
        """
        with self._lock:
            changes, told = self.num_changes, self._told
            if (changes, active) == self._told_at:
                return told
            news = changes != self._told_at[0]
            self._told_at = changes, active
            self._told = LoraHeld(
                version=told.version + 1,
                active=tuple(map(short, active[:MAX_HELD])),
                held=tuple(map(short, islice(dict.fromkeys(held()), MAX_HELD))) if news else told.held,
                max_loras=self._max_loras,
                requests_per_load=self._requests_per_load() if news else told.requests_per_load,
                full=full,
            )
            return self._told

    def _requests_per_load(self) -> float:
        return self._load_seconds / self._request_seconds if self._request_seconds else 0.0


# Loads in progress, and the requests and calls that wait for them.


class HeldLora(msgspec.Struct, frozen=True, kw_only=True):
    """Description of an adapter that is in memory, for operators.

    Attributes:
        rank: Largest rank of the adapter's layers.
    """

    digest: bytes
    rank: int
    modules: tuple[str, ...]
    num_bytes: int
    pinned: bool


class Call(NamedTuple):
    """A utility call that has requested the load of an adapter, and waits for the adapter's description."""

    answer: "Future[HeldLora]"
    pinned: bool


@dataclass(slots=True)
class Load:
    """A load of one adapter that is in progress.

    Attributes:
        number: Sequence number of the command that starts this load, among all commands to workers.
        began: Monotonic start time, in seconds.
        requests: Unfinished requests that wait for the adapter, by key.
    """

    lora: LoraRequest
    number: int
    began: float
    reservation: Reservation = field(default_factory=Reservation)
    requests: dict[str, Request] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        """Whether a request or a call still waits for the adapter."""
        return bool(self.requests or self.calls)


DIGEST_BYTES = 16
_MAX_NAME = 256
_MAX_PATH = 4096


class Usable(enum.Enum):
    """Whether a request can use its adapter in the step that is being scheduled.

    Attributes:
        READY: The adapter has a slot, or a slot is free.
        LOADING: The adapter is being loaded.
        NO_SLOT: Other adapters occupy all slots.
    """

    READY = enum.auto()
    LOADING = enum.auto()
    NO_SLOT = enum.auto()


class LoraAdapters(StepResource):
    """Manages the adapters of an engine's requests: adapters in host memory, adapters that are being loaded, and
    adapters with running requests.

    Only the busy loop's thread may call the methods, except for ``check`` and ``stats``. A request is held with
    ``Hold.LORA`` while it cannot use its adapter. If a load fails, only the requests that wait for this load end.
    Digests identify adapters. If a request gives a path but no digest, the request gets the adapter that was last read
    from that path.
    """

    stats_name = "lora"

    def __init__(
        self,
        config: LoraConfig,
        executor: Executor,
        wake: Callable[[], None],
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
    ) -> None:
        """Args:
        wake: Function that wakes the busy loop. Any thread calls it when ``take`` has an event to process.
        wall_clock: Function that returns the seconds since the epoch, as the arrival times of requests.
        """
        self._served = config.enabled
        self._executor = executor
        self._wake = wake
        self._clock = clock
        self._wall_clock = wall_clock
        self.cache = LoraCache(config.cpu_memory)
        self._slots = LoraSlots(config.max_loras, config.max_wait)
        self._max_loras = config.max_loras
        self._holdings = LoraHoldings(config.max_loras, clock)
        self._room = LoraRoom(self.cache, self._evict)
        self._loaded: dict[bytes, LoadedLora] = {}
        self._loaded_at: dict[bytes, float] = {}
        """Time at which each adapter was loaded, in seconds since the epoch."""
        self._digests: dict[str, bytes] = {}
        """Digests of loaded adapters, by path."""
        self._users: dict[str, Request] = {}
        """Requests that keep their adapter in memory, by key."""
        self._loads: dict[LoraRequest, Load] = {}
        """Loads in progress. All requests for the same adapter wait for the same load."""
        self._waiting: dict[str, Load] = {}
        """The load for which a request waits, by the request's key."""
        self._let_go: dict[bytes, int] = {}
        """Digests of adapters that workers were told to free while loads were in progress. The value is the sequence
        number of the command to free the adapter.
        """
        self._told = 0
        """Sequence number of the last command to the workers."""
        self._news: queue.SimpleQueue[tuple[Load, Future[LoadedLora]] | Want] = queue.SimpleQueue()
        self._num_loads = 0
        self._load_seconds = 0.0
        self._num_requests = 0
        self._num_found = 0

    def check(self, adapter: LoraAdapter) -> None:
        """Raise Unimplemented or InvalidArgument if the adapter's fields cannot be valid. Thread-safe."""
        self._check_served()
        if not adapter.path:
            raise InvalidArgument("lora.path is empty", field="lora.path")
        for name, value, limit in (("name", adapter.name, _MAX_NAME), ("path", adapter.path, _MAX_PATH)):
            if len(value) > limit:
                raise InvalidArgument(
                    f"lora.{name} has {len(value)} characters; it must have at most {limit}", field=f"lora.{name}"
                )
        if adapter.digest and len(adapter.digest) != DIGEST_BYTES:
            raise InvalidArgument(
                f"lora.digest has {len(adapter.digest)} bytes; it must have {DIGEST_BYTES} bytes or be empty",
                field="lora.digest",
            )

    def take(self) -> None:
        """Resume requests whose adapter was loaded, and fail requests whose adapter failed to load."""
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Want):
                self._room.want(news)
            else:
                self._end(*news)
        if not self._loads:
            self._let_go.clear()

    @property
    def has_news(self) -> bool:
        """Whether there are events that ``take`` would process."""
        return not self._news.empty()

    @property
    def num_changes(self) -> int:
        """Number of times that adapters were added, removed, or started to load."""
        return self._holdings.num_changes

    def stats(self) -> LoraStats:
        """Return statistics of adapters and loads. Thread-safe."""
        slots, cache = self._slots, self.cache
        return LoraStats(
            max_loras=self._max_loras,
            active=slots.active,
            waiting=slots.waiting[:MAX_WAITING_NAMES],
            num_waiting_reqs=slots.num_waiting,
            num_loading_reqs=len(self._waiting),
            num_cached=len(cache),
            cached_bytes=cache.num_bytes,
            num_loads=self._num_loads,
            load_seconds=self._load_seconds,
            num_evictions=cache.num_evictions,
            num_requests=self._num_requests,
            num_found=self._num_found,
            held=self._holdings.of(slots.digests, self._held_digests, full=cache.full),
        )

    def _held_digests(self) -> Iterator[bytes]:
        """Yield the digests of adapters that are being loaded, then the digests of adapters in memory, most recently
        used first. Thread-safe.
        """
        yield from (lora.digest for lora in list(self._loads) if lora.digest)
        yield from reversed(self.cache.digests)

    # Methods that the scheduler calls.

    def attach(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def acquire(self, request: Request, lora: LoraRequest) -> Usable:
        """Get the adapter of a request, or start to load it.

        The adapter stays in memory from the end of its load until the request ends. The request occupies the adapter's
        slot from its start. A request that must wait is released once it can start.
        """
        if request.key not in self._users:
            if request.key not in self._waiting:
                self._wait(request, self._load(lora))
            return Usable.LOADING
        if self._slots.admits(lora.digest):
            return Usable.READY
        self._slots.wait(request.key, lora.digest, lora.name, self._clock())
        return Usable.NO_SLOT

    def added(self, request: Request) -> None:
        """Use the request's adapter if it is in memory. Otherwise start to load it and hold the request."""
        if (lora := request.lora) is None:
            return
        self._num_requests += 1
        if (digest := lora.digest or self._digests.get(lora.path, b"")) in self.cache:
            # The frontend lets an engine read an adapter with an unknown digest before it sends the request. Such a
            # request waited for the load, although the adapter is in memory now.
            arrival = request.context.arrival_time
            self._num_found += not arrival or self._loaded_at[digest] <= arrival
            self._let_go_on(request, lora, digest)
        else:
            self.acquire(request, lora)

    def begin_step(self, *, paused: bool) -> None:
        """Resume the requests whose adapter now has a slot."""
        if not paused:
            for key in self._slots.settle(self._clock()):
                self._scheduler.release(self._users[key], Hold.LORA)

    def may_start(self, request: Request) -> Hold:
        """Return ``Hold.NONE`` if the request's adapter has a slot or can get a slot now. Otherwise return the reason
        why the request must wait.
        """
        lora = request.lora
        return Hold.NONE if lora is None or self.acquire(request, lora) is Usable.READY else Hold.LORA

    def started(self, request: Request, num_computed: int, count: int) -> None:
        """Occupy the slot of the request's adapter."""
        if request.lora is not None:
            self._slots.start(request.key, request.lora.digest, request.lora.name)

    def preempted(self, request: Request) -> None:
        """Record that the request stopped using the adapter's slot."""
        self._slots.leave(request.key)

    def all_preempted(self) -> None:
        """Empty all slots. Release every request that waits for a slot, so that the request asks for a slot again."""
        for key in self._slots.reset():
            self._scheduler.release(self._users[key], Hold.LORA)

    def ended(self, request: Request) -> None:
        """Release the request's adapter and slot, or stop waiting for them."""
        self._slots.leave(request.key)
        if (load := self._waiting.pop(request.key, None)) is not None:
            del load.requests[request.key]
        if self._users.pop(request.key, None) is not None and request.lora is not None:
            self._holdings.ended()
            self._unload(self.cache.release(request.lora.digest))

    # Methods for operators, called through EngineControl.

    @utility
    def add_lora(self, name: str, path: str, digest: bytes = b"", pinned: bool = False) -> "Future[HeldLora]":
        """Load the adapter in the directory ``path`` on the engine's machine, and return its description.

        Args:
            name: Label of the adapter.
            path: Directory of the adapter.
            digest: Expected digest of the adapter's config and tensors, or empty. If the content differs, the call
                fails with FailedPrecondition and reason LORA_CHANGED.
            pinned: Whether the adapter must stay in memory until it is removed or unpinned.
        """
        adapter = LoraAdapter(name, path, digest)
        self.check(adapter)
        answer: Future[HeldLora] = Future()
        if digest and digest in self.cache:
            self.cache.add(digest, self._loaded[digest].num_bytes)  # Using the adapter cancels a pending removal.
            self._answer(Call(answer, pinned), digest)
        else:
            self._load(LoraRequest(name, path, digest)).calls.append(Call(answer, pinned))
        return answer

    @utility
    def remove_lora(self, digest: bytes) -> None:
        """Free an adapter once no request uses it. Does nothing if the adapter is not loaded."""
        self._check_served()
        self._unload(self.cache.remove(digest))

    @utility
    def pin_lora(self, digest: bytes, pinned: bool = True) -> HeldLora:
        """Pin an adapter so that it is never evicted, or unpin it. Raises NotFound if the adapter is not loaded."""
        self._check_served()
        self.cache.pin(digest, pinned=pinned)
        return self._facts(digest)

    @utility
    def list_loras(self) -> list[HeldLora]:
        """Return the loaded adapters, least recently used first."""
        return [self._facts(digest) for digest in self.cache.digests]

    def _check_served(self) -> None:
        if not self._served:
            raise Unimplemented(
                "this engine serves no LoRA adapters, because lora.max_loras is 0; set lora.max_loras to at least 1",
                field="lora",
            )

    def _facts(self, digest: bytes) -> HeldLora:
        loaded = self._loaded[digest]
        return HeldLora(
            digest=digest,
            rank=loaded.max_rank,
            modules=loaded.modules,
            num_bytes=loaded.num_bytes,
            pinned=self.cache.is_pinned(digest),
        )

    # Loads of adapters, from the request for a load to its end.

    def _load(self, lora: LoraRequest) -> Load:
        """Return the load of ``lora`` that is in progress, or start a new one."""
        self._holdings.changed()
        if (load := self._loads.get(_what(lora))) is None:
            load = Load(lora, 0, self._clock())
            self._begin(load)
        return load

    def _begin(self, load: Load) -> None:
        self._told += 1
        load.number, load.reservation = self._told, Reservation()
        future = self._executor.load_lora(load.lora, partial(self._want, load, load.reservation))
        self._loads[_what(load.lora)] = load
        future.add_done_callback(lambda done: self._put((load, done)))

    def _again(self, load: Load) -> None:
        """Repeat a load whose adapter is missing, because requests or calls still wait for this adapter."""
        known = self._loads.get(_what(load.lora))
        if known is None:
            known = load
            self._begin(load)
        else:
            known.calls += load.calls
        for request in load.requests.values():
            self._wait(request, known)

    def _wait(self, request: Request, load: Load) -> None:
        load.requests[request.key] = request
        self._waiting[request.key] = load

    def _want(self, load: Load, reservation: Reservation, num_bytes: int, made: "Future[None]") -> None:
        """Queue the request of a load for memory in the adapter cache. Thread-safe."""
        self._put(Want(reservation, num_bytes, made, lambda: load.is_wanted))

    def _put(self, news: "tuple[Load, Future[LoadedLora]] | Want") -> None:
        """Queue an event for ``take``, and wake the busy loop. Thread-safe."""
        self._news.put(news)
        self._wake()

    def _end(self, load: Load, future: "Future[LoadedLora]") -> None:
        """Handle the end of a load."""
        reservation = load.reservation
        del self._loads[_what(load.lora)]
        for key in load.requests:
            del self._waiting[key]
        self._holdings.changed()
        try:
            loaded = future.result()
            held, let_go = loaded.digest in self.cache, self._let_go.get(loaded.digest, 0)
            if not held and not load.is_wanted and let_go:
                self._unload([loaded.digest])
            elif not held and let_go > max(load.number, reservation.number):
                self._unload([loaded.digest])
                self._again(load)  # The adapter was already in memory, but was freed while this load ran.
            else:
                self._hold(loaded, load)
        except NotWantedError:
            if load.is_wanted:  # While the load ended, another request or call has requested the adapter.
                self._again(load)
        except Exception as e:
            self._fail(load, e)
        finally:
            self._room.end(reservation)

    def _hold(self, loaded: LoadedLora, load: Load) -> None:
        """Give a loaded adapter to the requests and calls that wait for it.

        Raises the errors of ``LoraCache.add``. If an error is raised, this method first tells the workers to free the
        adapter.
        """
        digest = loaded.digest
        try:
            self._evict(self.cache.add(digest, loaded.num_bytes, load.reservation.num_bytes))
            load.reservation.num_bytes = 0
        except RequestFailed:
            self._unload([digest])
            raise
        self._loaded[digest] = loaded
        self._loaded_at.setdefault(digest, self._wall_clock())
        self._digests[load.lora.path] = digest
        seconds = self._clock() - load.began
        logger.info(
            "LoRA adapter loaded",
            extra={
                "adapter": load.lora.name,
                "path": load.lora.path,
                "digest": digest.hex(),
                "seconds": round(seconds, 3),
                "bytes": loaded.num_bytes,
            },
        )
        self._num_loads += 1
        self._load_seconds += seconds
        self._holdings.loaded(seconds)
        for request in list(load.requests.values()):
            if request.lora is None or request.finished:
                continue
            try:
                self._let_go_on(request, request.lora, digest)
            except Exception as e:
                self._fail_one(request, e)
        for call in load.calls:
            self._answer(call, digest)

    def _let_go_on(self, request: Request, lora: LoraRequest, digest: bytes) -> None:
        self.cache.acquire(digest)
        self._holdings.began()
        self._users[request.key] = request
        if not lora.digest:
            request.lora = msgspec.structs.replace(lora, digest=digest)
            self._scheduler.kv_cache.hash_prompt(request)
        self._scheduler.release(request, Hold.LORA)

    def _answer(self, call: Call, digest: bytes) -> None:
        if call.pinned:
            self.cache.pin(digest)
        call.answer.set_result(self._facts(digest))

    def _evict(self, digests: list[bytes]) -> int:
        """Log evicted adapters, and do the same as ``_unload``."""
        for digest in digests:
            paths = [path for path, other in self._digests.items() if other == digest]
            extra = {"paths": paths, "digest": digest.hex(), "bytes": self._loaded[digest].num_bytes}
            logger.info("LoRA adapter evicted", extra=extra)
        return self._unload(digests)

    def _unload(self, digests: list[bytes]) -> int:
        """Tell the workers to free adapters. Returns the sequence number of the last command to the workers."""
        for digest in digests:
            self._holdings.changed()
            self._loaded.pop(digest, None)
            self._loaded_at.pop(digest, None)
            self._digests = {path: other for path, other in self._digests.items() if other != digest}
            self._told += 1
            if self._loads:
                self._let_go[digest] = self._told
            self._executor.unload_lora(digest)
        return self._told

    def _fail(self, load: Load, error: Exception) -> None:
        if isinstance(error, PartlyLoadedError):
            self._unload([digest for digest in error.digests if digest not in self.cache])
            error = error.error
        for request in list(load.requests.values()):
            self._fail_one(request, error)
        for call in load.calls:
            call.answer.set_exception(error)

    def _fail_one(self, request: Request, error: Exception) -> None:
        """End a request with an error. If the adapter did not cause the error, the error is reported as an incident,
        with an incident number.
        """
        if request.finished:
            return
        failure = (
            error
            if isinstance(error, RequestFailed)
            else incident(error, request=request.request_id, doing="loading the adapter")
        )
        self._scheduler.fail(request, RequestError.from_exception(failure))


def _what(lora: LoraRequest) -> LoraRequest:
    """Return the reference that identifies a load: it has the path and the digest, but no name."""
    return LoraRequest("", lora.path, lora.digest)
