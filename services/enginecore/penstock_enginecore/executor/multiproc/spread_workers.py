"""The workers of an engine that are on several nodes."""

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.executor.multiproc.rendezvous import meeting_place, own_address, secret_of
from penstock_enginecore.executor.multiproc.step_watchdog import Overdue
from penstock_enginecore.executor.multiproc.workers import MODULE, Hear, Workers
from penstock_enginecore.rpc.node_listener import NodeListener
from penstock_enginecore.worker.failures import WorkersGone
from penstock_enginecore.worker.worker_config import Node

logger = logging.getLogger(__name__)

_STACKS_WITHIN = 3.0
"""Seconds that nodes have to say where their workers are."""


class SpreadWorkers:
    """``Workers`` of this node and of others, which attach to it. The end of one ends all of them.

    A node's answers are heard on a thread of its own, so that one that waits holds up no other and not what comes over the net.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        hear: Hear,
        failed: Callable[[WorkersGone], None],
        overdue: Overdue,
        module: str = MODULE,
    ) -> None:
        """See ``Workers``. Raises ConfigError when the port for nodes is taken, no node could reach this one, or all could."""
        self._nodes = nodes = config.executor.nodes
        self._hear, self._failed = hear, failed
        self._changed = threading.Condition()
        self._attached: set[int] = set()
        self._error: WorkersGone | None = None
        self._stacks: dict[int, str] = {}
        self._stacks_of: set[int] = set()
        self._gone = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._gone).atexit = False
        self._said: dict[int, queue.SimpleQueue[tuple[int, bytes] | WorkersGone | None]] = {
            index: queue.SimpleQueue() for index in range(1, nodes.size)
        }
        address = own_address(nodes.address, config.server.host)
        self._meeting = meeting_place(address, secret_of(config, address))
        self._listener = NodeListener(config, self._meeting.address, self)
        try:
            self._listener.start()
        except BaseException:
            self._meeting.close()
            raise
        self.port = self._listener.port
        self._num_each = config.executor.num_workers // nodes.size
        own = Node(0, self._num_each, self._meeting.address, address)
        self._local = Workers(
            config, hear, self._fail_here, overdue, module, node=own, elsewhere=self._stacks_elsewhere
        )
        self._hearing = [
            threading.Thread(target=partial(self._listen, index), name=f"node-{index}", daemon=True)
            for index in self._said
        ]
        for thread in self._hearing:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Of this node's."""
        return self._local.pids

    def wait(self, progress: Progress) -> None:
        """Until all nodes have attached. Raises WorkersGone where they have not within ``executor.nodes.timeout``."""
        if self._missing():
            progress(f"waiting for {self._missing()} of {self._nodes.size}")
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._missing(), self._nodes.timeout)
            missing = self._missing()
        if missing:
            self._fail_here(
                WorkersGone(
                    f"{missing} of {self._nodes.size} did not attach to port {self.port} within {self._nodes.timeout:g} s "
                    "(executor.nodes.timeout)"
                )
            )
        if self._error is not None:
            raise self._error

    def write(self, message: bytes, timeout: float) -> None:
        """Tell all workers. See ``Workers``."""
        self._listener.call(message)
        self._local.write(message, timeout)

    def expect_ends(self) -> None:
        self._listener.expect_ends()
        self._local.expect_ends()

    def look_again(self) -> None:
        """Look when the call that has just begun will be overdue."""
        self._local.look_again()

    def has_ended(self, within: float) -> bool:
        """Return if a worker has ended, or ends within so many seconds."""
        return self._local.has_ended(within, self._gone)

    def end(self, *, told: bool) -> None:
        self._listener.end("" if told else str(self._error or "the engine has given its workers up"))
        self._local.end(told=told)
        self._listener.stop()
        self._meeting.close()
        for said in self._said.values():
            said.put(None)
        for thread in self._hearing:
            if thread is not threading.current_thread():
                thread.join()

    # What nodes say, on the listener's thread.

    def attached(self, index: int) -> None:
        with self._changed:
            self._attached.add(index)
            self._changed.notify_all()

    def answered(self, index: int, rank: int, message: bytes) -> None:
        self._said[index].put((rank, message))

    def stacks(self, index: int, texts: Mapping[int, str]) -> None:
        with self._changed:
            self._stacks.update(texts)
            self._stacks_of.add(index)
            self._changed.notify_all()

    def ended(self, index: int, reason: str) -> None:
        os.eventfd_write(self._gone, 1)
        self._said[index].put(WorkersGone(f"node {index}: {reason}"))

    # On threads of the workers and of the nodes.

    def _listen(self, index: int) -> None:
        while (said := self._said[index].get()) is not None:
            if isinstance(said, WorkersGone):
                self._fail_here(said)
                self._local.end(told=False)
                continue
            try:
                self._hear(*said)
            except Exception as e:  # whoever waits for its answers must not wait on
                logger.exception("node %d cannot be heard", index)
                self._fail_here(WorkersGone(f"what node {index} says cannot be read: {e}"))
                self._local.end(told=False)

    def _fail_here(self, error: WorkersGone) -> None:
        with self._changed:
            first = self._error is None
            self._error = self._error or error
            self._changed.notify_all()
        if first:
            self._failed(error)
            self._listener.end(str(error))

    def _stacks_elsewhere(self) -> dict[int, str]:
        self._listener.dump_stacks()
        deadline = time.monotonic() + _STACKS_WITHIN
        with self._changed:
            while self._attached - self._stacks_of and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            each = self._num_each
            silent = {
                rank: f"node {index} does not answer"
                for index in self._attached - self._stacks_of
                for rank in range(index * each, (index + 1) * each)
            }
            return silent | self._stacks

    def _missing(self) -> str:
        missing = [str(index) for index in range(1, self._nodes.size) if index not in self._attached]
        return f"node{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else ""
