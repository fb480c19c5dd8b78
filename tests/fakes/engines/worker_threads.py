"""Workers of a ``MultiprocExecutor`` as threads of the test, with the same calls, answers and errors as processes.

Stages pass their messages in memory. Partial results of layers are summed as between processes.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.executor import worker as worker_module
from penstock_enginecore.executor.multiproc import executor as executor_module
from penstock_enginecore.executor.multiproc.ring import RingTimeout
from penstock_enginecore.executor.multiproc.worker_process import WorkerLoop
from penstock_enginecore.models import loader as loader_module
from penstock_enginecore.models.loader import load_weights
from penstock_enginecore.parallel import collectives as shared_memory
from penstock_enginecore.parallel.collectives import SharedMemoryCollectives, TimedCollectives
from penstock_enginecore.parallel.stage_links import StageLinks
from penstock_enginecore.worker.failures import WorkersGone
from penstock_enginecore.worker.messages import WorkerConfig
from tests.fakes.patience import PATIENCE

_LOADING = threading.Lock()
"""Lock, because transformers loads one model at a time. Threads of a refused engine may still load when the next
starts.
"""

_CONNECTING = threading.Lock()


class Streams:
    """Messages sent by stages, by sender, receiver and channel."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._sent: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self._asked: dict[tuple[int, int, int], int] = {}

    def send(self, stream: tuple[int, int, int], message: torch.Tensor) -> None:
        with self._arrived:
            self._sent.setdefault(stream, []).append(message)
            self._arrived.notify_all()

    def ask(self, stream: tuple[int, int, int]) -> int:
        with self._arrived:
            index = self._asked.get(stream, 0)
            self._asked[stream] = index + 1
            return index

    def get(self, stream: tuple[int, int, int], index: int) -> torch.Tensor:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self._sent.get(stream, [])) > index, PATIENCE), stream
            return self._sent[stream][index]

    @property
    def nothing_left(self) -> bool:
        """Return whether all sent messages were received."""
        return all(len(sent) <= self._asked.get(stream, 0) for stream, sent in self._sent.items())


class _Sent:
    def wait(self) -> None:
        pass


class _Receiving:
    def __init__(self, streams: Streams, stream: tuple[int, int, int], buffer: torch.Tensor) -> None:
        self._streams, self._stream, self._buffer = streams, stream, buffer
        self._index = streams.ask(stream)

    def wait(self) -> None:
        message = self._streams.get(self._stream, self._index)
        self._buffer[: len(message)] = message


class ThreadTransport:
    """``StageTransport`` between threads."""

    def __init__(self, streams: Streams, stage: int, num_stages: int) -> None:
        self.stage, self.num_stages = stage, num_stages
        self._streams = streams

    def send(self, message: torch.Tensor, stage: int, channel: int) -> _Sent:
        self._streams.send((self.stage, stage, channel), message.clone())
        return _Sent()

    def receive(self, buffer: torch.Tensor, stage: int, channel: int) -> _Receiving:
        return _Receiving(self._streams, (stage, self.stage, channel), buffer)

    def close(self) -> None:
        pass


class _Reader:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read(self, timeout: float | None = None) -> bytes:
        try:
            return self.queue.get(timeout=timeout)
        except queue.Empty:
            raise RingTimeout("no message") from None


class _Writer:
    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def write(self, data: bytes, timeout: float | None = None) -> None:
        self._write(data)


class WorkerThreads:
    """Replacement for ``Workers``."""

    def __init__(
        self,
        config: EngineCoreConfig,
        hear: Callable[[int, bytes], None],
        failed: Callable[[WorkersGone], None],
        *_others: object,
    ) -> None:
        store = os.memfd_create("store")
        weakref.finalize(self, os.close, store)
        num_workers, size = config.executor.num_workers, config.executor.tensor_parallel_size
        exchanges = [shared_memory.create(size) for _ in range(config.executor.pipeline_parallel_size)]
        for exchange in exchanges:
            weakref.finalize(self, os.close, exchange)
        readers = [_Reader() for _ in range(num_workers)]
        self._readers = readers
        self.pids: list[int] = []
        self._threads = []
        for rank, reader in enumerate(readers):
            writer = _Writer(partial(hear, rank))
            exchange = exchanges[rank // size] if size > 1 else None
            own = WorkerConfig(engine=config, rank=rank, world_size=num_workers, store=store, exchange=exchange)
            loop = WorkerLoop(own, reader, writer)
            run = partial(_run, loop, failed)
            self._threads.append(threading.Thread(target=run, name=f"worker-{rank}", daemon=True))
            self._threads[-1].start()

    def wait(self, progress: object) -> None:
        """Return immediately, because the workers are already running."""

    def write(self, message: bytes, timeout: float) -> None:
        """Send a message to all threads."""
        for reader in self._readers:
            reader.queue.put(message)

    def look_again(self) -> None:
        """Do nothing, because no watcher exists for threads."""

    def has_ended(self, within: float) -> bool:
        """Do nothing; failed threads report their errors themselves."""
        return False

    def expect_ends(self) -> None:
        """Do nothing, because threads may end at any time."""

    def end(self, *, told: bool) -> None:
        """Join threads that were told to end."""
        for thread in self._threads if told else ():
            thread.join(PATIENCE)


def _run(loop: WorkerLoop, failed: Callable[[WorkersGone], None]) -> None:
    try:
        loop.run()
    except Exception as e:
        failed(WorkersGone(f"a worker's thread ended: {e!r}"))
        raise


def use_threads(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Let executors of this test start threads, which read their weights one after the other.

    Returns the messages that the first workers of the first engine's stages send.
    """
    first = Streams()
    streams: dict[tuple[int, int], Streams] = {}

    def connect(config: WorkerConfig, device: torch.device) -> Any:
        executor, collectives, links = config.engine.executor, None, None
        if config.exchange is not None:
            collectives = SharedMemoryCollectives(config.exchange, config.tensor_rank, executor.tensor_parallel_size)
        if executor.pipeline_parallel_size > 1:
            with _CONNECTING:
                is_first = not config.tensor_rank and not any(rank == 0 for _, rank in streams)
                own = streams.setdefault((config.store, config.tensor_rank), first if is_first else Streams())
            links = StageLinks(ThreadTransport(own, config.stage, executor.pipeline_parallel_size))
        return collectives and TimedCollectives(collectives), links

    def load(*args: Any, **kwargs: Any) -> Any:
        with _LOADING:
            return load_weights(*args, **kwargs)

    monkeypatch.setattr(executor_module, "Workers", WorkerThreads)
    monkeypatch.setattr(worker_module, "_connect", connect)
    monkeypatch.setattr(loader_module, "load_weights", load)
    return first
