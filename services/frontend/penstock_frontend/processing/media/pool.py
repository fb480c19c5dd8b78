"""Media workers: a bounded queue in front of processes that are replaced when they end, or take too long."""

import asyncio
import pickle
import signal
import time
from collections.abc import Callable

from penstock_common.drain_rate import DrainRate, retry_after
from penstock_common.errors import ConfigError, ResourceExhausted, Unavailable
from penstock_common.observability.incidents import incident
from penstock_common.observability.logging import get_logger
from penstock_frontend.config.media import MediaConfig
from penstock_frontend.processing.media import refusals
from penstock_frontend.processing.media.decode_limits import DecodeLimits, TooLarge, Unreadable
from penstock_frontend.processing.media.fair_queue import FairQueue
from penstock_frontend.processing.media.families.base import FamilyProcessor
from penstock_frontend.processing.media.item import ProcessedItem
from penstock_frontend.processing.media.metrics import MediaMetrics
from penstock_frontend.processing.media.worker_messages import Refused, Setup
from penstock_frontend.processing.media.worker_process import Job, NoWorker, WorkerLost, WorkerProcess

_ATTEMPTS = 2
"""Workers that may end while they have an item: the first may have ended for a reason of its own."""
_STARTS = 3
"""Workers that may end while they start, one after the other in each place, before nobody waits for the next."""
_PAUSE = 1.0
"""Seconds before a worker is started again after one that did not start."""
_UNMEASURED = 1.0
"""Seconds that clients are told to wait before any item has been processed, so that there is no rate to go by."""


class _Waiting:
    """An item in the queue or in a worker."""

    __slots__ = ("attempts", "came", "job", "result", "tenant")

    def __init__(self, job: Job, tenant: str) -> None:
        self.job = job
        self.tenant = tenant
        self.result: asyncio.Future[ProcessedItem] = asyncio.get_running_loop().create_future()
        self.came = time.perf_counter()
        self.attempts = 0

    def fail(self, error: Exception) -> None:
        """Idempotent, also after its client has gone."""
        if not self.result.done():
            self.result.set_exception(error)


class WorkerPool:
    """``start`` and ``close`` it; ``process`` items between. On one event loop."""

    def __init__(
        self,
        make_processor: Callable[[], FamilyProcessor],
        sampling_rate: int,
        config: MediaConfig,
        metrics: MediaMetrics,
    ) -> None:
        """``make_processor``: called in each worker. ``sampling_rate``: of sound, in Hz."""
        self._config = config
        self._metrics = metrics
        self._setup = Setup(
            make_processor=pickle.dumps(make_processor),
            sampling_rate=sampling_rate,
            limits=DecodeLimits(config.max_pixels, config.max_frames, config.max_audio_seconds),
            memory=config.worker_memory,
            seconds=config.worker_timeout,
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
        """Of the workers that are ready."""
        return [worker.pid for worker in self._workers]

    @property
    def num_queued(self) -> int:
        """Items that wait for a worker."""
        return len(self._queue)

    async def start(self) -> None:
        """Wait for the first worker; the others come beside. Raises ConfigError when the model's processor cannot be made."""
        try:
            first = await self._started()
        except (NoWorker, WorkerLost) as e:
            raise ConfigError(f"the model's processor of media cannot be made: {e}") from None
        self._tasks = [
            asyncio.create_task(self._serve(first if number == 0 else None), name=f"media worker {number}")
            for number in range(self._config.num_workers)
        ]

    async def process(self, job: Job, tenant: str = "") -> ProcessedItem:
        """Raises TooLarge, Unreadable; ResourceExhausted while the queue is full, or where it was and the place went to a tenant
        that had fewer waiting; Unavailable where there is no worker.
        """
        if self._closed:
            raise refusals.shutting_down()
        if self._failure and not self._workers:
            raise _no_worker()
        if len(self._queue) >= self._config.max_queued:
            self._make_room(tenant)
        if not self._queue:
            self._rate.begin(time.monotonic())
        waiting = _Waiting(job, tenant)
        self._queue.put(tenant, waiting)
        self._metrics.queued(len(self._queue))
        self._work.set()
        return await waiting.result

    def _make_room(self, tenant: str) -> None:
        seconds = self._rate.time_for(time.monotonic(), 1, 0)
        full = ResourceExhausted(
            f"{len(self._queue)} items wait for a media worker; media.max_queued is {self._config.max_queued}",
            retry_after=retry_after(_UNMEASURED if seconds is None else seconds),
        )
        if (displaced := self._queue.displace(tenant)) is None:
            raise full
        displaced.fail(full)

    async def close(self) -> None:
        """End all workers; what waits fails as Unavailable. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(refusals.shutting_down)

    def _fail_all(self, error: Callable[[], Unavailable]) -> None:
        while self._queue:
            self._queue.take().fail(error())

    async def _serve(self, worker: WorkerProcess | None) -> None:
        """A place in the pool: a worker, and the next when that is gone."""
        try:
            while True:
                if worker is None and (worker := await self._replaced()) is None:
                    continue
                if (waiting := await self._next(worker)) is None:
                    await self._lost_idle(worker)
                    worker = None
                elif not await self._run(worker, waiting):
                    self._metrics.replaced_worker()
                    await self._end(worker)
                    worker = None
        finally:
            if worker is not None:
                await self._end(worker)

    async def _next(self, worker: WorkerProcess) -> _Waiting | None:
        """The next item; None when the worker has ended before there is one."""
        while True:
            while self._queue:
                if not worker.alive:  # which is no item's fault
                    return None
                waiting = self._queue.take()
                self._metrics.queued(len(self._queue))
                if not waiting.result.done():  # its client may have gone
                    return waiting
            self._work.clear()
            if not await self._work_for(worker):
                return None

    async def _work_for(self, worker: WorkerProcess) -> bool:
        """Wait until there may be something to do; False when the worker has ended before."""
        work, end = asyncio.ensure_future(self._work.wait()), asyncio.ensure_future(worker.ended())
        try:
            await asyncio.wait([work, end], return_when=asyncio.FIRST_COMPLETED)
            return not end.done()
        finally:
            for each in (work, end):
                each.cancel()
            await asyncio.gather(work, end, return_exceptions=True)

    async def _lost_idle(self, worker: WorkerProcess) -> None:
        self._metrics.replaced_worker()
        get_logger().warning("a media worker ended while it had nothing to do", code=await self._end(worker))

    async def _run(self, worker: WorkerProcess, waiting: _Waiting) -> bool:
        """Have an item processed. Returns whether the worker goes on."""
        job = waiting.job
        if not waiting.attempts:
            self._metrics.took(job.modality, "queue", time.perf_counter() - waiting.came)
        waiting.attempts += 1
        try:
            async with asyncio.timeout(self._config.worker_timeout):
                outcome = await worker.process(job)
        except TimeoutError:
            waiting.fail(self._too_slow())
            return False
        except WorkerLost:
            await self._lost(worker, waiting)
            return False
        except Exception as e:
            waiting.fail(incident(e, request="", doing="processing a medium"))
            return False
        except asyncio.CancelledError:
            waiting.fail(refusals.shutting_down())
            raise
        self._rate.left(time.monotonic(), 0)
        if isinstance(outcome, Refused):
            self._refuse(waiting, outcome)
            return not outcome.ends
        item, seconds = outcome
        self._metrics.took(job.modality, "process", seconds)
        if not waiting.result.done():
            waiting.result.set_result(item)
        return True

    def _refuse(self, waiting: _Waiting, refused: Refused) -> None:
        if refused.unexpected:
            get_logger().info(
                "a medium could not be processed", modality=waiting.job.modality, error=refused.unexpected
            )
        if refused.kind == "too_large":
            waiting.fail(TooLarge(refused.what, refused.setting, refused.limit))
        else:
            waiting.fail(Unreadable(refused.what))

    async def _lost(self, worker: WorkerProcess, waiting: _Waiting) -> None:
        code = await self._end(worker)
        get_logger().warning("a media worker ended", code=code, modality=waiting.job.modality)
        if code == -signal.SIGXCPU:
            waiting.fail(self._too_slow())
        elif waiting.attempts >= _ATTEMPTS:
            waiting.fail(Unreadable("ends the processes that decode it"))
        else:
            self._queue.put_back(waiting.tenant, waiting)
            self._work.set()

    def _too_slow(self) -> TooLarge:
        limit = self._config.worker_timeout
        return TooLarge("takes too long to decode and process, in seconds", "media.worker_timeout", limit)

    async def _replaced(self) -> WorkerProcess | None:
        try:
            return await self._started()
        except (NoWorker, WorkerLost, OSError) as e:
            self._num_lost += 1
            if isinstance(e, WorkerLost) and self._num_lost < _STARTS * self._config.num_workers:
                # Whatever killed it need not kill the next.
                get_logger().warning("a media worker ended while it started", error=str(e))
                return None
            self._failure = str(e) or type(e).__name__
            get_logger().error("a media worker does not start", error=self._failure)
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
    return Unavailable("no media worker starts", reason="NO_MEDIA_WORKER", retry_after=_PAUSE)
