"""Adapters that workers read while they compute, and that the engine waits for."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

from penstock_common.errors import FailedPrecondition
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, PartlyLoadedError
from penstock_enginecore.lora.store import LoraStore, ReadyLora
from penstock_enginecore.worker.device_thread import DeviceThread
from penstock_enginecore.worker.failures import Failure
from penstock_enginecore.worker.messages import Loaded, LoadLora

# At the engine.


class LoadsAwaited:
    """Loads that workers have not all answered. From any thread."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._last = 0
        self._waiting: dict[int, tuple[Future[LoadedLora], dict[int, LoadedLora | Exception]]] = {}
        self._failed: Exception | None = None

    def begin(self) -> "tuple[int, Future[LoadedLora]]":
        """The next number, and what becomes of the load: what all workers have taken, or the error of the first that has one,
        as PartlyLoadedError where others have taken it. The modules are those of all workers, the bytes those of the worker
        that has the most.
        """
        with self._lock:
            self._last += 1
            future: Future[LoadedLora] = Future()
            if self._failed is not None:
                future.set_exception(self._failed)
            else:
                self._waiting[self._last] = future, {}
            return self._last, future

    def answered(self, rank: int, number: int, outcome: LoadedLora | Exception) -> None:
        """A worker's answer. Numbers that are not waited for are ignored."""
        with self._lock:
            if number not in self._waiting:
                return
            future, outcomes = self._waiting[number]
            outcomes[rank] = outcome
            if len(outcomes) < self._num_workers:
                return
            del self._waiting[number]
        by_rank = [outcomes[rank] for rank in sorted(outcomes)]
        error = next((outcome for outcome in by_rank if isinstance(outcome, Exception)), None)
        loaded = [outcome for outcome in by_rank if isinstance(outcome, LoadedLora)]
        if error is None and any(each.digest != loaded[0].digest for each in loaded):
            digests = ", ".join(each.digest.hex() for each in loaded)
            error = FailedPrecondition(
                f"workers read different adapters: {digests}", field="lora", reason="LORA_CHANGED"
            )
        if error is None:
            future.set_result(
                LoadedLora(
                    digest=loaded[0].digest,
                    max_rank=max(each.max_rank for each in loaded),
                    modules=tuple(sorted({name for each in loaded for name in each.modules})),
                    num_bytes=max(each.num_bytes for each in loaded),
                )
            )
        elif loaded:
            future.set_exception(PartlyLoadedError(error, frozenset(each.digest for each in loaded)))
        else:
            future.set_exception(error)

    def refused(self, number: int, error: Exception) -> None:
        """A load was not begun. Numbers that are not waited for are ignored."""
        with self._lock:
            future, _ = self._waiting.pop(number, (None, {}))
        if future is not None:
            future.set_exception(error)

    def fail(self, error: Exception) -> None:
        """Nothing is answered any more: end every load, also those to come, with ``error``."""
        with self._lock:
            self._failed = self._failed or error
            waiting = [future for future, _ in self._waiting.values()]
            self._waiting.clear()
        for future in waiting:
            future.set_exception(error)


# At a worker.


class LoadsUnderWay:
    """Reads adapters on a thread of its own, in order. All methods belong to the worker's thread."""

    LOOK = 0.005
    """Seconds between two looks at what is being read."""

    def __init__(self) -> None:
        self._thread: DeviceThread | None = None
        self._reading: deque[tuple[LoadLora, Future[ReadyLora]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._reading)

    def begin(self, load: LoadLora, store: LoraStore) -> None:
        """Have an adapter read, and made ready for the forward pass."""
        if self._thread is None:
            self._thread = DeviceThread("lora loader")
        self._reading.append((load, self._thread.submit(partial(_load, store, load.lora))))

    def take(self, store: LoraStore) -> Iterator[Loaded]:
        """Take what has been read, between steps. The answers."""
        while self._reading and self._reading[0][1].done():
            load, future = self._reading.popleft()
            try:
                yield Loaded(load.number, store.add(future.result()))
            except Exception as e:
                yield Loaded(load.number, Failure.of(e))


def _load(store: LoraStore, lora: LoraRequest) -> ReadyLora:
    return store.prepare(lora, store.read(lora))
