"""Worker processes of an engine on one node: starting the processes, receiving their answers, detecting exits and
hangs, and ending the processes.
"""

import logging
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from penstock_common.process import start_python
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.executor.multiproc.calls import Overdue, read_stacks
from penstock_enginecore.executor.multiproc.ring import ANSWERS, CALLS, RingClosed, RingMemory, RingReader, RingWriter
from penstock_enginecore.parallel import collectives
from penstock_enginecore.worker.failures import WorkersGone
from penstock_enginecore.worker.messages import Node, Start, WorkerConfig

logger = logging.getLogger(__name__)

MODULE = "penstock_enginecore.executor.multiproc.worker_process"
LAST_MOMENT = 10.0
"""Number of seconds after a shutdown call in which workers must exit. After this time, the engine kills the workers."""

Hear = Callable[[int, bytes], None]
"""Function that receives a worker's rank and encoded ``Answer``. For each worker, a separate thread calls this
function.
"""
Stacks = Callable[[], Mapping[int, str]]
"""Function that returns stack traces of workers' threads, by rank."""


def _nobody() -> dict[int, str]:
    return {}


class _Process:
    """One worker process, with the process's pidfd, and the engine's ends of the connections to the process."""

    def __init__(self, module: str, config: WorkerConfig, calls: int) -> None:
        answers = ANSWERS.create(1)
        engine, self.engine = os.pipe()
        self.stacks, stacks = os.pipe()
        start = os.memfd_create("penstock-worker", os.MFD_CLOEXEC)
        try:
            told = Start(config=config, calls=calls, answers=answers, engine=engine, stacks=stacks)
            os.pwrite(start, msgspec.msgpack.encode(told), 0)
            shared = [calls, *(each for each in (config.store, config.exchange) if each is not None)]
            self.popen = start_python(module, [str(start)], [start, answers, engine, stacks, *shared])
            self.memory = RingMemory(answers)
        finally:
            for theirs in (start, answers, engine, stacks):
                os.close(theirs)
        self.pidfd = os.pidfd_open(self.popen.pid)
        self.answers = RingReader(self.memory)
        for descriptor in (self.engine, self.stacks, self.pidfd):
            # The descriptors need not be closed when the interpreter exits, because the workers end with the engine
            # anyway.
            weakref.finalize(self, os.close, descriptor).atexit = False


class Workers:
    """Worker processes of this node, which all receive the same calls.

    A thread of this object starts the processes. The operating system kills the processes when this thread ends.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        hear: Hear,
        failed: Callable[[WorkersGone], None],
        overdue: Overdue,
        module: str = MODULE,
        *,
        node: Node | None = None,
        elsewhere: Stacks = _nobody,
    ) -> None:
        """Start the processes. Raises OSError if a process cannot be started.

        Args:
            config: Config of the engine.
            hear: Function that receives the workers' answers.
            failed: Function that is called once, when a worker has exited unexpectedly or ``overdue`` reports hung
                workers. All workers are killed before this call or soon after.
            overdue: Detects calls that take too long.
            module: Program of the worker processes.
            node: Description of this node, or None if the engine has only one node.
            elsewhere: Function that returns stack traces of workers on other nodes.
        """
        self._hear, self._failed, self._overdue, self._elsewhere = hear, failed, overdue, elsewhere
        self._first_rank, num_workers = (
            (node.first_rank, node.num_workers) if node else (0, config.executor.num_workers)
        )
        descriptor = CALLS.create(num_workers)
        self._memory = RingMemory(descriptor)
        self._calls = RingWriter(self._memory)
        self._module = module
        self._processes: list[_Process] = []
        self._ending = threading.Event()
        self._told = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake).atexit = False
        started = threading.Event()
        errors: list[BaseException] = []
        watch = partial(self._run, config, node, descriptor, started, errors)
        self._watch = threading.Thread(target=watch, name="workers", daemon=True)
        self._watch.start()
        started.wait()
        if errors:
            self._watch.join()
            raise errors[0]

    @property
    def pids(self) -> list[int]:
        """Process IDs of the workers in the order of their ranks, starting with the first rank of this node."""
        return [each.popen.pid for each in self._processes]

    def wait(self, progress: Progress) -> None:
        """Return immediately, because the workers of this node can receive calls as soon as they are started."""

    def write(self, message: bytes, timeout: float) -> None:
        """Send a call to all workers.

        Raises:
            RingTimeout: A worker has not read messages for ``timeout`` seconds, so the ring is full.
            RingClosed: A worker has ended.
        """
        self._calls.write(message, timeout)

    def expect_ends(self) -> None:
        """Treat exits of workers as expected from now on, because the workers are about to be stopped.

        One worker may exit while other workers are still stopping.
        """
        self._told = True

    def look_again(self) -> None:
        """Recompute the time of the next check for hung workers, because a call other than a step has begun."""
        os.eventfd_write(self._wake, 1)

    def has_ended(self, within: float, *others: int) -> bool:
        """Return whether a worker has exited, or exits in the next ``within`` seconds.

        ``others`` are descriptors that become readable when a worker on another node has exited.
        """
        poll = select.poll()
        for other in others:
            poll.register(other, select.POLLIN)
        for process in self._processes:
            poll.register(process.pidfd, select.POLLIN)
        return bool(poll.poll(1000 * within))

    def end(self, *, told: bool) -> None:
        """End the workers. If ``told`` is true, the workers have received a shutdown call, and get ``LAST_MOMENT``
        seconds to exit. If ``told`` is false, the workers are killed immediately. Idempotent.
        """
        self._told = told
        self._ending.set()
        os.eventfd_write(self._wake, 1)
        self._watch.join()

    def _run(
        self,
        config: EngineCoreConfig,
        node: Node | None,
        descriptor: int,
        started: threading.Event,
        errors: list[BaseException],
    ) -> None:
        world_size, first = config.executor.num_workers, self._first_rank
        ranks = range(first, first + (node.num_workers if node else world_size))
        store = os.memfd_create("penstock-store", os.MFD_CLOEXEC) if world_size > 1 else None
        exchanges = _exchanges(config, len(ranks) // config.executor.tensor_parallel_size)
        try:
            for rank in ranks:
                exchange = exchanges[(rank - first) // config.executor.tensor_parallel_size] if exchanges else None
                worker = WorkerConfig(
                    engine=config, rank=rank, world_size=world_size, node=node, store=store, exchange=exchange
                )
                self._processes.append(_Process(self._module, worker, descriptor))
        except BaseException as e:
            self._kill()
            errors.append(e)
            return
        finally:
            for shared in (descriptor, *exchanges, *(() if store is None else (store,))):
                os.close(shared)
            started.set()
        hearing = [
            threading.Thread(target=partial(self._listen, rank, process), name=f"worker-{rank}", daemon=True)
            for rank, process in enumerate(self._processes, first)
        ]
        for thread in hearing:
            thread.start()
        error = self._watched()
        if error is not None:
            self._failed(error)
        self._kill()
        for thread in hearing:
            thread.join()

    def _listen(self, rank: int, process: _Process) -> None:
        try:
            while True:
                self._hear(rank, bytes(process.answers.read()))
        except RingClosed:
            return
        except Exception as e:  # Without this handler, callers would wait for the answer forever.
            logger.exception("cannot handle an answer that a worker process sent worker=%d", rank)
            self._failed(WorkersGone(f"answers of worker {rank} cannot be read: {e}"))

    def _watched(self) -> WorkersGone | None:
        """Wait until a worker exits or hangs. Returns the reason as an error, or None if the engine has told the
        workers to stop.
        """
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for process in self._processes:
            poll.register(process.pidfd, select.POLLIN)
        while not self._ending.is_set():
            ready = {descriptor for descriptor, _ in poll.poll(1000 * max(self._overdue.look_in(), 0.0))}
            if self._ending.is_set():
                break
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for rank, process in enumerate(self._processes, self._first_rank):
                if process.pidfd in ready:
                    code = process.popen.wait()
                    if code or not self._told:
                        return WorkersGone(f"worker {rank} (pid {process.popen.pid}) {_ended(code)}")
                    poll.unregister(process.pidfd)
            if reason := self._overdue.reason(self.pids, self._first_rank):
                for rank, text in {**self.stacks(), **self._elsewhere()}.items():
                    logger.error("stack traces of worker %d:\n%s", rank, text)
                return WorkersGone(reason)
        if self._told:
            self._wait_for_ends()
        return None

    def stacks(self) -> dict[int, str]:
        """Return stack traces of the threads of this node's workers, by rank."""
        texts = read_stacks([each.stacks for each in self._processes], self.pids)
        return dict(enumerate(texts, self._first_rank))

    def _wait_for_ends(self) -> None:
        until = time.monotonic() + LAST_MOMENT
        for process in self._processes:
            try:
                process.popen.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                logger.warning(
                    "worker process %d did not stop within %g s, so the engine kills it", process.popen.pid, LAST_MOMENT
                )

    def _kill(self) -> None:
        """Kill all worker processes, and wake the threads that wait for messages from them."""
        for process in self._processes:
            process.popen.kill()
        self._memory.close_writer()
        for rank, process in enumerate(self._processes):
            process.popen.wait()
            self._memory.close_reader(rank)
            process.memory.close_writer()


def _exchanges(config: EngineCoreConfig, num_stages: int) -> list[int]:
    """Return descriptors of the shared memory in which the workers of a pipeline stage exchange results. The list is
    empty if the workers exchange results with gloo.
    """
    executor = config.executor
    if executor.tensor_parallel_size == 1 or executor.collectives == "gloo":
        return []
    if executor.collectives == "auto" and not collectives.available():
        return []
    return [collectives.create(executor.tensor_parallel_size) for _ in range(num_stages)]


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"
