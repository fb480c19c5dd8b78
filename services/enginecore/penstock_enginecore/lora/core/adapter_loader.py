"""Requests with adapters between the scheduler and the workers: held until theirs is loaded, ended when that fails."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice

import msgspec

from penstock_common.bounded_queue import DrainRate
from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.lora_registry import MAX_HELD, LoraAdapter, LoraHeld, short
from penstock_common.observability.logging import incident
from penstock_common.types.outputs import MAX_WAITING_NAMES, LoraStats, RequestError
from penstock_enginecore.config import LoraConfig
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.core.request import Hold, Request
from penstock_enginecore.core.scheduler.base import Clock, Scheduler
from penstock_enginecore.core.utility import utility
from penstock_enginecore.lora.core.cache import Call, HeldLora, Load, Loads, LoraCache, LoraRoom, NotWantedError, Want
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, LoraUse, PartlyLoadedError
from penstock_enginecore.lora.core.slots import LoraSlots

# Which adapters the engine tells the cluster that it holds, and what loading one costs it.

_LATEST = 0.25
"""Weight of the latest load in the time that one takes."""


class LoraHoldings:
    """Makes what is told anew only where it has changed. Belongs to the busy loop's thread, but for ``of``, which may be called
    on any.
    """

    def __init__(self, max_loras: int, clock: Callable[[], float]) -> None:
        self._max_loras = max_loras
        self._clock = clock
        self._changes = 0
        self._rate = DrainRate()
        self._num_requests = 0
        self._load_seconds = 0.0
        self._request_seconds = 0.0
        self._told_at: tuple[int, Sequence[bytes]] = (-1, ())
        self._told = LoraHeld()
        self._lock = threading.Lock()  # of what is told

    def changed(self) -> None:
        """Adapters have come or gone, or are on their way."""
        self._changes += 1

    def loaded(self, seconds: float) -> None:
        """An adapter has come, in so many seconds."""
        self._load_seconds += (seconds - self._load_seconds) * (_LATEST if self._load_seconds else 1.0)
        self.changed()

    def began(self) -> None:
        """A request has its adapter."""
        if not self._num_requests:
            self._rate.begin(self._clock())
        self._num_requests += 1

    def ended(self) -> None:
        """A request is done with its adapter."""
        now = self._clock()
        self._num_requests -= 1
        self._rate.left(now, 0.0)
        self._request_seconds = self._rate.time_for(now, 1.0, 0.0) or 0.0

    def of(self, active: Sequence[bytes], held: Callable[[], Iterable[bytes]], *, full: bool = False) -> LoraHeld:
        """What is to be told. ``active``: digests of the adapters that have a slot; ``held``: those in memory and on their way,
        the most recently used first. ``full``: whether there is no room for another.
        """
        with self._lock:
            changes, told = self._changes, self._told
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


DIGEST_BYTES = 16
_MAX_NAME = 256
_MAX_PATH = 4096


class LoraIntake:
    """All methods belong to the busy loop's thread, except ``check`` and ``stats``.

    ``wake`` is called, on any thread, when ``take`` has something to do. What goes wrong with a load ends those requests alone
    that wait for it. Adapters are known by digest; the path that one was last read from stands for it in requests that do not say
    which they mean. ``slots``: None where requests may not have adapters.
    """

    def __init__(
        self,
        config: LoraConfig,
        executor: Executor,
        scheduler: Scheduler,
        slots: LoraSlots | None,
        wake: Callable[[], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._wake = wake
        self._clock = clock
        self._max_loras = config.max_loras
        self.cache = LoraCache(config.cpu_memory)
        self._holdings = LoraHoldings(config.max_loras, clock)
        self._room = LoraRoom(self.cache, self._unload)
        self._loaded: dict[bytes, LoadedLora] = {}
        self._digests: dict[str, bytes] = {}
        """By path, of those that are held."""
        self._loads = Loads(executor, self._put, clock)
        self._news: queue.SimpleQueue[tuple[Load, Future[LoadedLora]] | Want] = queue.SimpleQueue()
        self._num_loads = 0
        self._load_seconds = 0.0
        self._num_requests = 0
        self._num_found = 0

    def check(self, adapter: LoraAdapter) -> None:
        """Refuse an adapter that can be seen to be none. Any thread. Raises Unimplemented or InvalidArgument."""
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
                f"lora.digest has {len(adapter.digest)} bytes; it must have {DIGEST_BYTES}, or none",
                field="lora.digest",
            )

    def start(self, request: Request, lora: LoraRequest) -> None:
        """Get the adapter of a request that is held until then."""
        digest = lora.digest or self._digests.get(lora.path, b"")
        self._num_requests += 1
        if digest in self.cache:
            self._num_found += 1
            self._let_go_on(request, lora, digest)
            return
        self._loads.wait(request, self._load(lora))
        request.lora_use = LoraUse(partial(self._loads.give_up, request))

    def take(self) -> None:
        """Let requests go on whose adapter has come, and end those whose adapter cannot be had."""
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Want):
                self._room.want(news)
            else:
                self._end(*news)
        self._loads.settle()

    @property
    def has_news(self) -> bool:
        """Whether ``take`` has something to do."""
        return not self._news.empty()

    def stats(self) -> LoraStats | None:
        """Which adapters there are, and what became of loads; None where requests may have none. Any thread."""
        slots, cache = self._slots, self.cache
        if slots is None:
            return None
        return LoraStats(
            max_loras=self._max_loras,
            active=slots.active,
            waiting=slots.waiting[:MAX_WAITING_NAMES],
            num_waiting_reqs=slots.num_waiting,
            num_loading_reqs=self._loads.num_waiting,
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
        """Those on their way and those in memory, the most recently used first. Any thread."""
        yield from self._loads.digests()
        yield from reversed(self.cache.digests)

    # What operators may call, through EngineControl.

    @utility
    def add_lora(self, name: str, path: str, digest: bytes = b"", pinned: bool = False) -> "Future[HeldLora]":
        """Read the adapter in the directory ``path`` on the engine's machine, hold it, and say what it is. ``digest``: of
        its config and tensors, where that is known; FailedPrecondition with reason LORA_CHANGED for other content. ``pinned``: it
        stays.
        """
        adapter = LoraAdapter(name, path, digest)
        self.check(adapter)
        answer: Future[HeldLora] = Future()
        if digest and digest in self.cache:
            self.cache.add(digest, self._loaded[digest].num_bytes)  # it stays if it was to leave
            self._answer(Call(answer, pinned), digest)
        else:
            self._load(LoraRequest(name, path, digest)).calls.append(Call(answer, pinned))
        return answer

    @utility
    def remove_lora(self, digest: bytes) -> None:
        """Let go of an adapter once no request uses it any more. One that is not held is passed over."""
        self._check_served()
        self._unload(self.cache.remove(digest))

    @utility
    def pin_lora(self, digest: bytes, pinned: bool = True) -> HeldLora:
        """Hold an adapter whatever else is loaded; not ``pinned``: no more. Raises NotFound for one that is not held."""
        self._check_served()
        self.cache.pin(digest, pinned=pinned)
        return self._facts(digest)

    @utility
    def list_loras(self) -> list[HeldLora]:
        """The adapters that are held, those used last last."""
        return [self._facts(digest) for digest in self.cache.digests]

    def _check_served(self) -> None:
        if self._slots is None:
            raise Unimplemented("lora is not served by this engine: lora.max_loras is 0", field="lora")

    def _facts(self, digest: bytes) -> HeldLora:
        loaded = self._loaded[digest]
        return HeldLora(
            digest=digest,
            rank=loaded.max_rank,
            modules=loaded.modules,
            num_bytes=loaded.num_bytes,
            pinned=self.cache.is_pinned(digest),
        )

    # Loads.

    def _load(self, lora: LoraRequest) -> Load:
        self._holdings.changed()
        return self._loads.of(lora)

    def _put(self, news: "tuple[Load, Future[LoadedLora]] | Want") -> None:
        """Any thread."""
        self._news.put(news)
        self._wake()

    def _end(self, load: Load, future: "Future[LoadedLora]") -> None:
        """A load is over."""
        reservation = load.reservation
        self._loads.end(load)
        self._holdings.changed()
        try:
            loaded = future.result()
            held = loaded.digest in self.cache
            if not held and not load.is_wanted and self._loads.was_let_go(loaded.digest):
                self._unload([loaded.digest])
            elif not held and self._loads.was_let_go(loaded.digest, max(load.number, reservation.number)):
                self._unload([loaded.digest])
                self._loads.again(load)  # it had been there, and was let go of meanwhile
            else:
                self._hold(loaded, load)
        except NotWantedError:
            if load.is_wanted:  # by somebody who has come since
                self._loads.again(load)
        except Exception as e:
            self._fail(load, e)
        finally:
            self._room.end(reservation)

    def _hold(self, loaded: LoadedLora, load: Load) -> None:
        """Those who wait for a load get it. Raises what ``LoraCache.add`` does; workers let go of it then."""
        digest = loaded.digest
        try:
            self._unload(self.cache.add(digest, loaded.num_bytes, load.reservation.num_bytes))
            load.reservation.num_bytes = 0
        except RequestFailed:
            self._unload([digest])
            raise
        self._loaded[digest] = loaded
        self._digests[load.lora.path] = digest
        seconds = self._clock() - load.began
        self._num_loads += 1
        self._load_seconds += seconds
        self._holdings.loaded(seconds)
        for request in list(load.requests.values()):
            lora = request.lora
            if lora is None or request.finished:
                continue
            try:
                self._let_go_on(request, lora, digest)
            except Exception as e:
                self._fail_request(request, e)
        for call in load.calls:
            self._answer(call, digest)

    def _let_go_on(self, request: Request, lora: LoraRequest, digest: bytes) -> None:
        self.cache.acquire(digest)
        self._holdings.began()
        request.lora_use = LoraUse(partial(self._released, digest))
        if not lora.digest:
            request.lora = msgspec.structs.replace(lora, digest=digest)
            self._scheduler.kv_cache.hash_prompt(request)
        self._scheduler.release(request, Hold.LORA_LOAD)

    def _answer(self, call: Call, digest: bytes) -> None:
        if call.pinned:
            self.cache.pin(digest)
        call.answer.set_result(self._facts(digest))

    def _released(self, digest: bytes) -> None:
        self._holdings.ended()
        self._unload(self.cache.release(digest))

    def _unload(self, digests: list[bytes]) -> int:
        """Returns the number of what workers were told last."""
        for digest in digests:
            self._holdings.changed()
            self._loaded.pop(digest, None)
            self._digests = {path: other for path, other in self._digests.items() if other != digest}
            self._loads.unload(digest)
        return self._loads.number

    def _fail(self, load: Load, error: Exception) -> None:
        if isinstance(error, PartlyLoadedError):
            self._unload([digest for digest in error.digests if digest not in self.cache])
            error = error.error
        for request in list(load.requests.values()):
            self._fail_request(request, error)
        for call in load.calls:
            call.answer.set_exception(error)

    def _fail_request(self, request: Request, error: Exception) -> None:
        """End a request; what is no fault of its adapter gets a number."""
        if request.finished:
            return
        failure = (
            error
            if isinstance(error, RequestFailed)
            else incident(error, request=request.request_id, doing="loading the adapter")
        )
        self._scheduler.fail(request, RequestError.from_exception(failure))
