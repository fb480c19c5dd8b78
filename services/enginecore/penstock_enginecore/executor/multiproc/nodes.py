"""Workers of one engine on several nodes: the code of the engine's node, the code of the other nodes, and the addresses
of nodes.
"""

import asyncio
import logging
import os
import queue
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from penstock_common import addresses
from penstock_common.errors import ConfigError, RequestFailed
from penstock_common.observability.logging import configure, get_logger
from penstock_common.process import name_process
from penstock_common.security.shared_secret import SharedSecret, check_internal_port, load_secret
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.executor.multiproc.calls import Oldest, Overdue
from penstock_enginecore.executor.multiproc.ring import RingClosed, RingTimeout
from penstock_enginecore.executor.multiproc.workers import MODULE, Hear, Workers
from penstock_enginecore.parallel.meeting_server import MeetingServer
from penstock_enginecore.rpc.node_client import NodeClient
from penstock_enginecore.rpc.node_listener import NodeListener
from penstock_enginecore.worker.failures import WorkersGone
from penstock_enginecore.worker.messages import Node

# Rendezvous stores and addresses for workers on several nodes.

_ANYWHERE = ("", "0.0.0.0", "::")


def meeting_place(address: str, secret: SharedSecret | None) -> MeetingServer:
    """Start a rendezvous store on a free port of ``address``.

    Processes on other hosts that know the secret can use the store until the store is closed. Raises ConfigError if
    ``address`` is not an address of this host.
    """
    try:
        return MeetingServer(address, secret)
    except OSError as e:
        raise ConfigError(f"cannot bind to executor.nodes.address {address!r}: {e}") from None


def secret_of(config: EngineCoreConfig, address: str) -> SharedSecret | None:
    """Return the secret with which the pipeline stages of all nodes authenticate each other, or None if no secret is
    configured.

    This node's stages listen on ``address``. Raises ConfigError if other hosts can reach ``address`` and no secret is
    configured. Also raises ConfigError if the file with the secret is invalid.
    """
    secret = load_secret(config.parallel.secret_file)
    check_internal_port(address, field="executor.nodes.address", has_secret=secret is not None)
    return secret


def own_address(configured: str, host: str) -> str:
    """Return the IP address at which other nodes reach the engine's node.

    ``configured`` is the setting executor.nodes.address, and ``host`` is the listen address of the engine's server.
    Raises ConfigError if the name of this host cannot be resolved.
    """
    if configured or host not in _ANYWHERE:
        return configured or host
    name = socket.getfqdn()
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as e:
        raise ConfigError(
            f"executor.nodes.address is empty, and this host's name {name} cannot be resolved: {e}; set executor.nodes.address "
            "to the IP address at which the other nodes reach this node"
        ) from None


def address_towards(leader: str, port: int) -> str:
    """Return the IP address of this host from which connections to the engine's node start. Raises ConfigError if there
    is no route to the engine's node.
    """
    host, number = addresses.split(addresses.with_default_port(leader, port))
    try:
        family, _, _, _, there = socket.getaddrinfo(host, number, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # connecting a UDP socket sends nothing
            return str(probe.getsockname()[0])
    except OSError as e:
        raise ConfigError(f"executor.nodes.leader is {leader!r}, which cannot be reached: {e}") from None


# Program of a node that runs workers of an engine whose process is on another host.

log = get_logger()


def check(config: EngineCoreConfig) -> None:
    """Raise ConfigError if the settings are not valid for a node other than the engine's node."""
    nodes = config.executor.nodes
    if nodes.size == 1:
        raise ConfigError(
            "executor.nodes.size is 1, so the engine has no other nodes; set executor.nodes.size to the number of nodes, "
            "with the same value on all nodes"
        )
    if nodes.index == 0:
        raise ConfigError(
            f"executor.nodes.index is 0, which is the index of the engine's node; give every node except the engine's node a "
            f"different index from 1 to {nodes.size - 1}"
        )
    if not nodes.leader:
        raise ConfigError(
            "executor.nodes.leader is empty; set executor.nodes.leader to the engine's address, as host or host:port"
        )


def run(config: EngineCoreConfig, module: str = MODULE) -> None:
    """Run the workers of this node until the engine ends. ``module`` is the program of the worker processes.

    Raises:
        ConfigError: The settings are not valid for a node.
        RequestFailed: The engine refused this node, or ended with an error.
        WorkersGone: The workers of this node have exited.
    """
    check(config)
    configure(config.log, service="enginecore-node")
    name_process("enginecore-node", f"{config.executor.nodes.index}")
    asyncio.run(_serve(config, module))


async def _serve(config: EngineCoreConfig, module: str) -> None:
    nodes = config.executor.nodes
    address = nodes.address or address_towards(nodes.leader, nodes.port)
    secret_of(config, address)  # check the secret before any worker starts
    client = NodeClient(config)
    attached = await client.attach()
    log.info("this node is attached to the engine", engine=attached.engine_id, node=nodes.index)
    for number in (signal.SIGTERM, signal.SIGINT):  # The engine drains before it stops, and needs this node until then.
        asyncio.get_running_loop().add_signal_handler(number, _leave_it_to_the_engine)
    count = config.executor.num_workers // nodes.size
    node = Node(nodes.index * count, count, attached.meeting, address)
    workers = NodeWorkers(msgspec.structs.replace(config, engine_id=attached.engine_id), node, client, module)
    told = False
    try:
        await client.serve(workers)
        told = workers.error is None
    except RequestFailed:
        if workers.error is None:
            raise
    finally:
        await asyncio.to_thread(workers.end, told=told)
    if workers.error is not None:
        raise workers.error
    log.info("node stopped")


def _leave_it_to_the_engine() -> None:
    log.info("ignored a stop signal, because only the engine stops this node")


class NodeWorkers:
    """Workers of this node, which the engine controls over a session. ``error`` is the reason why the workers have
    exited, or None.
    """

    def __init__(self, config: EngineCoreConfig, node: Node, client: NodeClient, module: str) -> None:
        self._client = client
        self._timeout = config.executor.step_timeout
        self.error: WorkersGone | None = None
        # Only the engine knows which calls run. So this node detects only workers that a signal has stopped.
        overdue = Overdue(self._timeout, lambda: Oldest(0.0, timed=False, limit=None))
        self._workers = Workers(config, client.answer, self._fail, overdue, module, node=node)

    def call(self, message: bytes) -> None:
        try:
            self._workers.write(message, self._timeout)
        except RingTimeout as e:
            self._fail(WorkersGone(f"the workers do not read their messages: {e}"))
        except RingClosed:
            return  # a worker has ended, and this end is reported separately

    def expect_ends(self) -> None:
        self._workers.expect_ends()

    def dump_stacks(self) -> Mapping[int, str]:
        return self._workers.stacks()

    def end(self, *, told: bool) -> None:
        """End the workers."""
        self._workers.end(told=told)

    def _fail(self, error: WorkersGone) -> None:
        self.error = self.error or error
        log.error("the worker processes of this node ended unexpectedly", reason=str(error))
        self._client.give_up(str(error))


# Code that runs in the engine's process.

logger = logging.getLogger(__name__)

_STACKS_WITHIN = 3.0
"""Seconds to wait for stack traces from other nodes."""


class SpreadWorkers:
    """All workers of an engine on several nodes, with the methods of ``Workers``. The other nodes attach to this node,
    the engine's node. If one worker exits, all workers are ended.

    A separate thread handles the answers of each node, so that a slow node delays neither other nodes nor the network.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        hear: Hear,
        failed: Callable[[WorkersGone], None],
        overdue: Overdue,
        module: str = MODULE,
    ) -> None:
        """Start to listen for other nodes, and start the workers of this node. See ``Workers`` for the arguments.

        Raises ConfigError if the port for nodes is in use, or if other nodes cannot reach this node. Also raises
        ConfigError if every host can reach this node and no secret is configured.
        """
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
        """Process IDs of this node's workers."""
        return self._local.pids

    def wait(self, progress: Progress) -> None:
        """Wait until all nodes have attached. Raises WorkersGone if a node has not attached within
        ``executor.nodes.timeout``.
        """
        if self._missing():
            progress(f"waiting for {self._missing()} to attach; executor.nodes.size is {self._nodes.size}")
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
        """Send a call to all workers of all nodes. Raises the errors of ``Workers.write``."""
        self._listener.call(message)
        self._local.write(message, timeout)

    def expect_ends(self) -> None:
        self._listener.expect_ends()
        self._local.expect_ends()

    def look_again(self) -> None:
        """Recompute the time of the next check for hung workers, because a call has begun."""
        self._local.look_again()

    def has_ended(self, within: float) -> bool:
        """Return whether a worker of any node has exited, or exits in the next ``within`` seconds."""
        return self._local.has_ended(within, self._gone)

    def end(self, *, told: bool) -> None:
        self._listener.end("" if told else str(self._error or "the engine has ended its workers"))
        self._local.end(told=told)
        self._listener.stop()
        self._meeting.close()
        for said in self._said.values():
            said.put(None)
        for thread in self._hearing:
            if thread is not threading.current_thread():
                thread.join()

    # Handlers of messages from other nodes. These handlers run on the listener's thread.

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

    # Methods that run on the threads that handle the answers of workers and nodes.

    def _listen(self, index: int) -> None:
        while (said := self._said[index].get()) is not None:
            if isinstance(said, WorkersGone):
                self._fail_here(said)
                self._local.end(told=False)
                continue
            try:
                self._hear(*said)
            except Exception as e:  # Without this handler, callers would wait for the answer forever.
                logger.exception("cannot handle an answer that the workers of a node sent node=%d", index)
                self._fail_here(WorkersGone(f"answers of node {index} cannot be read: {e}"))
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
