"""Pool of media workers (processes). The pool has a bounded queue that is fair to tenants, and replaces workers that
end or take too long.
"""

import asyncio
import contextlib
import math
import os
import pickle
import signal
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from penstock_common.bounded_queue import DrainRate, retry_after
from penstock_common.errors import ConfigError, ResourceExhausted, Unavailable
from penstock_common.observability.logging import get_logger, incident
from penstock_common.process import start_python
from penstock_common.types.media import DTYPE_BYTES, Modality, TensorData
from penstock_frontend.config.media import MediaConfig
from penstock_frontend.metrics import MediaMetrics
from penstock_frontend.processing.media import sources
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem
from penstock_frontend.processing.media.worker_messages import (
    LENGTH,
    Answer,
    DecodeLimits,
    JobHead,
    JobKind,
    Processed,
    Refused,
    Setup,
    TensorHead,
    TooLarge,
    Unreadable,
    decode_answer,
    decode_ready,
    framed,
)

# The class below is a queue in which tenants take turns.

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Queue that serves tenants round-robin, so that a tenant with many items does not delay other tenants.

    The items of the same tenant keep their order.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        """Waiting items by tenant, in the order in which the tenants have their turns. Tenants without waiting items
        are not in it.
        """
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, tenant: str, item: T) -> None:
        """Add an item after the other items of its tenant. If the tenant has no other items, its turn comes last."""
        self._waiting.setdefault(tenant, deque()).append(item)
        self._count += 1

    def put_back(self, tenant: str, item: T) -> None:
        """Put an item that ``take`` removed back at the front of the queue."""
        self._waiting.setdefault(tenant, deque()).appendleft(item)
        self._waiting.move_to_end(tenant, last=False)
        self._count += 1

    def take(self) -> T:
        """Remove and return the next item. Raises IndexError if the queue is empty."""
        if not self._waiting:
            raise IndexError("the queue of media items is empty")
        tenant, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items
        self._count -= 1
        return item

    def displace(self, tenant: str) -> T | None:
        """Make room for an item of ``tenant``: remove and return the last item of the tenant that has the most items.

        Return None if the item of ``tenant`` must be refused instead. The item must be refused if ``tenant`` would
        otherwise have at least as many items as the tenant with the most items.
        """
        if not self._waiting:
            return None
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        if len(self._waiting.get(tenant, ())) + 1 >= len(self._waiting[most]):
            return None
        item = self._waiting[most].pop()
        self._count -= 1
        return item


# The class below starts the process of a media worker, and exchanges messages with it over a socket.

_MODULE = "penstock_frontend.processing.media.worker"
_LONGEST_HEAD = 1024 * 1024
_MOST_EMBEDS = 1024 * 1024
"""Maximum number of embeddings of one media item. No model accepts as many tokens."""
_ENVIRONMENT = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "TMPDIR",
    "XDG_CACHE_HOME",
)
"""Names of the environment variables that a worker inherits. Other variables may contain secrets and addresses."""
_OF_WORKERS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


class Job(NamedTuple):
    """A media item that a worker must decode and process.

    The item is one file, or the frames of a video, each with its time in seconds.
    """

    modality: Modality
    files: Sequence[bytes]
    timestamps: Sequence[float]
    arguments: bytes
    """Arguments for the model's processor, as a JSON object."""
    kind: JobKind = "process"


class WorkerLost(Exception):  # noqa: N818 - it says what happened
    """Error for a worker process that has ended, or has sent an invalid message."""


class NoWorker(Exception):  # noqa: N818 - it says what happened
    """Error for a worker that cannot create the model's processor. The text has the reason."""


class WorkerProcess:
    """Process of one worker. The frontend checks the worker's messages, because the worker opens files from clients."""

    def __init__(self, most_bytes: int) -> None:
        """Start the worker process. ``most_bytes`` is the maximum size of an item's tensors in bytes."""
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._most_bytes = most_bytes
        environ = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._process = start_python(
                _MODULE, [str(theirs.fileno())], [theirs.fileno()], environ={**environ, **_OF_WORKERS}
            )

    @property
    def pid(self) -> int:
        """Process id of the worker process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the worker process still runs."""
        return self._process.poll() is None

    async def set_up(self, setup: Setup) -> None:
        """Wait until the worker has created the model's processor. Raises NoWorker if the creation fails, and WorkerLost
        if the worker process ends.
        """
        with self._lost_if_broken():
            await asyncio.get_running_loop().sock_sendall(self._channel, framed(setup))
            ready = decode_ready(await self._head())
        if ready.error:
            raise NoWorker(ready.error)

    async def process(self, job: Job) -> tuple[ProcessedItem, float] | Refused:
        """Let the worker process an item. Return the result and the processing time in seconds, or a refusal. Raises
        WorkerLost.
        """
        loop = asyncio.get_running_loop()
        head = JobHead(
            kind=job.kind,
            modality=job.modality,
            sizes=tuple(map(len, job.files)),
            timestamps=tuple(job.timestamps),
            arguments=job.arguments,
        )
        with self._lost_if_broken():
            await loop.sock_sendall(self._channel, framed(head))
            for file in job.files:
                await loop.sock_sendall(self._channel, file)
            answer: Answer = decode_answer(await self._head())
            if isinstance(answer, Refused):
                return answer
            return await self._item(answer, job.modality), answer.seconds

    async def ended(self) -> None:
        """Wait until the worker process ends, or sends data although it processes no item. The wait can be cancelled."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_recv(self._channel, 1)

    async def end(self) -> int:
        """Kill the worker process, and wait until it has ended. Return its exit code, which is negative if a signal
        ended it.
        """
        self._process.kill()
        self._channel.close()
        return await asyncio.to_thread(self._process.wait)

    @contextlib.contextmanager
    def _lost_if_broken(self) -> Any:
        try:
            yield
        except (OSError, EOFError, msgspec.MsgspecError) as e:
            raise WorkerLost(type(e).__name__) from e

    async def _item(self, head: Processed, modality: Modality) -> ProcessedItem:
        sizes = [math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in head.tensors]
        if (
            head.modality != modality
            or not 0 <= head.num_embeds <= _MOST_EMBEDS
            or any(length < 0 for tensor in head.tensors for length in tensor.shape)
            or sizes != [tensor.size for tensor in head.tensors]
            or sum(sizes) > self._most_bytes
        ):
            raise EOFError
        data = {tensor.name: await self._tensor(tensor) for tensor in head.tensors}
        return ProcessedItem(modality=modality, data=data, num_embeds=head.num_embeds, layout=head.layout)

    async def _tensor(self, head: TensorHead) -> TensorData:
        return TensorData(head.dtype, head.shape, await self._take(head.size))

    async def _head(self) -> bytearray:
        (length,) = LENGTH.unpack(await self._take(LENGTH.size))
        if length > _LONGEST_HEAD:
            raise EOFError
        return await self._take(length)

    async def _take(self, size: int) -> bytearray:
        """Read ``size`` bytes into a new buffer. The result is a view of this buffer, without a copy."""
        taken = bytearray(size)
        view, loop = memoryview(taken), asyncio.get_running_loop()
        while len(view):
            if not (count := await loop.sock_recv_into(self._channel, view)):
                raise EOFError
            view = view[count:]
        return taken


_ATTEMPTS = 2
"""Number of workers that may end while they process the same item. The first worker may have ended for another reason."""
_STARTS = 3
"""Number of times in a row that workers may fail to start before waiting items fail."""
_PAUSE = 1.0
"""Number of seconds to wait before the next start of a worker, after a start has failed."""
_UNMEASURED = 1.0
"""Retry delay for clients in seconds, as long as no item was processed from which the delay can be computed."""


class _Waiting:
    """A media item that waits in the queue, or that a worker processes."""

    __slots__ = ("attempts", "came", "job", "result", "tenant")

    def __init__(self, job: Job, tenant: str) -> None:
        self.job = job
        self.tenant = tenant
        self.result: asyncio.Future[ProcessedItem] = asyncio.get_running_loop().create_future()
        self.came = time.perf_counter()
        self.attempts = 0

    def fail(self, error: Exception) -> None:
        """End the wait for an item with an error. Idempotent, and allowed after the client of the item has
        disconnected.
        """
        if not self.result.done():
            self.result.set_exception(error)


class WorkerPool:
    """Pool of media workers.

    The caller calls ``start``, then ``process`` for each item, then ``close``, all on the same event loop.
    """

    def __init__(
        self,
        make_processor: Callable[[], FamilyProcessor],
        sampling_rate: int,
        config: MediaConfig,
        metrics: MediaMetrics,
    ) -> None:
        """Create the pool. Each worker calls ``make_processor``. ``sampling_rate`` is the rate in Hz at which the model
        expects audio.
        """
        self._config = config
        self._metrics = metrics
        self._setup = Setup(
            make_processor=pickle.dumps(make_processor),
            sampling_rate=sampling_rate,
            limits=DecodeLimits(config.max_pixels, config.max_frames, config.max_audio_seconds),
            max_speech_seconds=config.max_speech_seconds,
            memory=config.worker_memory,
            seconds=config.worker_timeout,
            speech_seconds=config.speech_timeout,
        )
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._work = asyncio.Event()
        self._rate = DrainRate()
        self._workers: set[WorkerProcess] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure = ""
        self._num_lost = 0
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are ready."""
        return [worker.pid for worker in self._workers]

    @property
    def num_queued(self) -> int:
        """Number of media items that wait for a worker."""
        return len(self._queue)

    async def start(self) -> None:
        """Wait until the first worker is ready. Then start the other workers without waiting for them.

        Raises ConfigError if the model's processor cannot be created.
        """
        try:
            first = await self._started()
        except (NoWorker, WorkerLost) as e:
            raise ConfigError(f"the model's media processor cannot be created: {e}") from None
        self._tasks = [
            asyncio.create_task(self._serve(first if number == 0 else None), name=f"media worker {number}")
            for number in range(self._config.num_workers)
        ]

    async def process(self, job: Job, tenant: str = "") -> ProcessedItem:
        """Let a worker process a media item. Return the processed item.

        Raises:
            TooLarge: The item exceeds a limit.
            Unreadable: The item cannot be decoded or processed.
            ResourceExhausted: The queue is full, or the item was displaced by a tenant with fewer waiting items.
            Unavailable: No worker can start, or the pool is closed.
        """
        if self._closed:
            raise sources.shutting_down()
        if self._failure and not self._workers:
            raise _no_worker()
        if len(self._queue) >= self._config.max_queued:
            self._make_room(tenant)
        if not self._queue:
            self._rate.begin(time.monotonic())
        waiting = _Waiting(job, tenant)
        self._queue.put(tenant, waiting)
        self._metrics.series("penstock:media_queued").set(len(self._queue))
        self._work.set()
        return await waiting.result

    def _make_room(self, tenant: str) -> None:
        seconds = self._rate.time_for(time.monotonic(), 1, 0)
        full = ResourceExhausted(
            f"{len(self._queue)} media items are waiting for a media worker; the limit media.max_queued is "
            f"{self._config.max_queued}",
            retry_after=retry_after(_UNMEASURED if seconds is None else seconds),
        )
        if (displaced := self._queue.displace(tenant)) is None:
            raise full
        displaced.fail(full)

    async def close(self) -> None:
        """End all worker processes of the pool. Items that still wait fail with Unavailable. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(sources.shutting_down)

    def _fail_all(self, error: Callable[[], Unavailable]) -> None:
        while self._queue:
            self._queue.take().fail(error())

    async def _serve(self, worker: WorkerProcess | None) -> None:
        """Run one of the pool's workers. Whenever its process ends, start a new process in its place."""
        try:
            while True:
                if worker is None and (worker := await self._replaced()) is None:
                    continue
                if (waiting := await self._next(worker)) is None:
                    await self._lost_idle(worker)
                    worker = None
                elif not await self._run(worker, waiting):
                    self._metrics.series("penstock:media_workers_replaced").inc()
                    await self._end(worker)
                    worker = None
        finally:
            if worker is not None:
                await self._end(worker)

    async def _next(self, worker: WorkerProcess) -> _Waiting | None:
        """Return the next item for a worker. Return None if the worker process ends while it waits for an item."""
        while True:
            while self._queue:
                if not worker.alive:  # the worker process ended while it had no item, so no item is the cause
                    return None
                waiting = self._queue.take()
                self._metrics.series("penstock:media_queued").set(len(self._queue))
                if not waiting.result.done():  # the client may have disconnected
                    return waiting
            self._work.clear()
            if not await self._work_for(worker):
                return None

    async def _work_for(self, worker: WorkerProcess) -> bool:
        """Wait until the queue may have an item for the worker. Return False if the worker process ends during the wait."""
        work, end = asyncio.ensure_future(self._work.wait()), asyncio.ensure_future(worker.ended())
        try:
            await asyncio.wait([work, end], return_when=asyncio.FIRST_COMPLETED)
            return not end.done()
        finally:
            for each in (work, end):
                each.cancel()
            await asyncio.gather(work, end, return_exceptions=True)

    async def _lost_idle(self, worker: WorkerProcess) -> None:
        self._metrics.series("penstock:media_workers_replaced").inc()
        get_logger().warning(
            "idle media worker process ended unexpectedly and is replaced", code=await self._end(worker)
        )

    async def _run(self, worker: WorkerProcess, waiting: _Waiting) -> bool:
        """Let a worker process an item. Return whether the worker can process further items."""
        job = waiting.job
        if not waiting.attempts:
            self._metrics.series("penstock:media_seconds", job.modality, "queue").observe(
                time.perf_counter() - waiting.came
            )
        waiting.attempts += 1
        try:
            async with asyncio.timeout(self._timeout(job)[1]):
                outcome = await worker.process(job)
        except TimeoutError:
            waiting.fail(self._too_slow(job))
            return False
        except WorkerLost:
            await self._lost(worker, waiting)
            return False
        except Exception as e:
            waiting.fail(incident(e, request="", doing="processing a media item"))
            return False
        except asyncio.CancelledError:
            waiting.fail(sources.shutting_down())
            raise
        self._rate.left(time.monotonic(), 0)
        if isinstance(outcome, Refused):
            self._refuse(waiting, outcome)
            return not outcome.ends
        item, seconds = outcome
        self._metrics.series("penstock:media_seconds", job.modality, "process").observe(seconds)
        if not waiting.result.done():
            waiting.result.set_result(item)
        return True

    def _refuse(self, waiting: _Waiting, refused: Refused) -> None:
        if refused.unexpected:
            get_logger().info(
                "media item could not be processed", modality=waiting.job.modality, error=refused.unexpected
            )
        if refused.kind == "too_large":
            waiting.fail(TooLarge(refused.what, refused.setting, refused.limit))
        else:
            waiting.fail(Unreadable(refused.what))

    async def _lost(self, worker: WorkerProcess, waiting: _Waiting) -> None:
        code = await self._end(worker)
        get_logger().warning(
            "media worker process ended while it processed a media item", code=code, modality=waiting.job.modality
        )
        if code == -signal.SIGXCPU:
            waiting.fail(self._too_slow(waiting.job))
        elif waiting.attempts >= _ATTEMPTS:
            waiting.fail(Unreadable("crashes the processes that decode it"))
        else:
            self._queue.put_back(waiting.tenant, waiting)
            self._work.set()

    def _timeout(self, job: Job) -> tuple[str, float]:
        """Return the setting that limits the time for a job, and its value in seconds."""
        if job.kind == "split":
            return "media.speech_timeout", self._config.speech_timeout
        return "media.worker_timeout", self._config.worker_timeout

    def _too_slow(self, job: Job) -> TooLarge:
        setting, limit = self._timeout(job)
        return TooLarge("takes too long to decode and process, in seconds", setting, limit)

    async def _replaced(self) -> WorkerProcess | None:
        try:
            return await self._started()
        except (NoWorker, WorkerLost, OSError) as e:
            self._num_lost += 1
            if isinstance(e, WorkerLost) and self._num_lost < _STARTS * self._config.num_workers:
                # Try again, because a new worker may start although this one ended.
                get_logger().warning("media worker process ended while it started", error=str(e))
                return None
            self._failure = str(e) or type(e).__name__
            get_logger().error("media worker process cannot start", error=self._failure)
            if not self._workers:
                self._fail_all(_no_worker)
            await asyncio.sleep(_PAUSE)
            return None

    async def _started(self) -> WorkerProcess:
        worker = WorkerProcess(self._config.worker_memory)
        try:
            await worker.set_up(self._setup)
        except BaseException:
            await worker.end()
            raise
        self._failure, self._num_lost = "", 0
        self._workers.add(worker)
        return worker

    async def _end(self, worker: WorkerProcess) -> int:
        self._workers.discard(worker)
        return await worker.end()


def _no_worker() -> Unavailable:
    return Unavailable("no media worker can start", reason="NO_MEDIA_WORKER", retry_after=_PAUSE)
