"""Adapters that a worker reads while it computes."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

from penstock_enginecore.lora.core.request import LoraRequest
from penstock_enginecore.lora.store import LoraStore, ReadyLora
from penstock_enginecore.worker.device_thread import DeviceThread
from penstock_enginecore.worker.failures import Failure
from penstock_enginecore.worker.messages import Loaded, LoadLora


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
