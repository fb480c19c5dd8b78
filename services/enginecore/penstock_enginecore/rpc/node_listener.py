"""The engine's side of sessions with its other nodes (hosts with workers of the engine), and the comparison of the
engine's settings with the nodes' settings.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, Protocol

import grpc
import msgspec

from penstock.worker.v1 import messages_pb2 as pb
from penstock.worker.v1 import service_pb2_grpc
from penstock_common.addresses import with_port
from penstock_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, RequestFailed, Unavailable
from penstock_common.observability.logging import get_logger
from penstock_common.observability.metrics import service_version
from penstock_common.rpc.call_authorization import PeerGuard, SecretGuard
from penstock_common.rpc.handshake import first_message
from penstock_common.rpc.server import SERVICES, RpcServer
from penstock_common.security.tls import Certificates
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.rpc.internal_ports import LoopThread, checked_secret

ENGINE_ONLY = frozenset(
    (
        "engine_id",
        "pool",
        "role",
        "structured_output",
        "data_parallel",
        "expert_parallel",
        "kv_transfer",
        "coordinator",
        "server",
        "peers",
        "metrics",
        "log",
        "tracing",
        "profiler",
        "error_dump",
        "iteration_log_interval",
        "drain_timeout",
        "wedged_after",
    )
)
"""Settings that do not affect workers. A node may have other values for these settings than the engine. All other
settings must be equal.
"""
NODE_ONLY = ("index", "leader", "port", "address", "timeout", "tls")
"""Settings of ``executor.nodes`` that may differ between nodes."""
_ABSENT = "nothing"


def shared_config(config: EngineCoreConfig) -> dict[str, str]:
    """Return the settings that affect workers, as JSON values by dotted key, such as ``model.dtype``."""
    values = msgspec.to_builtins(config)
    for name in NODE_ONLY:
        del values["executor"]["nodes"][name]
    found: dict[str, str] = {}
    for section in values:
        if section not in ENGINE_ONLY:
            _flatten(section, values[section], found)
    return found


def config_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first key whose values differ between the engine and a node, with both values. Return None if all
    values are equal.
    """
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            return key, ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
    return None


def _flatten(key: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(f"{key}.{name}", inner, into)
    else:
        whole = isinstance(value, float) and value.is_integer()
        into[key] = json.dumps(int(value) if whole else value)


SERVICE_NAME = "penstock.worker.v1.WorkerService"
PORT_PURPOSE = "nodes"
"""Name of the port's purpose. The key that authenticates calls to the port is derived from the shared secret and this
name.
"""
_STOP_TIMEOUT = 2.0
"""Time in seconds to wait until all nodes have received the message that the engine stops."""

Context = grpc.aio.ServicerContext[Any, Any]
log = get_logger()


class NodeEvents(Protocol):
    """Interface with callbacks for events of an engine's nodes. The listener's thread calls the methods, so they must
    not block.
    """

    def attached(self, index: int) -> None:
        """Handle a node that has attached to the engine. The node's workers are starting, and commands can now be sent
        to the node.
        """

    def answered(self, index: int, rank: int, message: bytes) -> None:
        """Handle a worker's answer to a command."""

    def stacks(self, index: int, texts: Mapping[int, str]) -> None:
        """Handle the stack traces of the node's worker threads, by rank."""

    def ended(self, index: int, reason: str) -> None:
        """Handle the end of the node's workers, or the loss of the connection. The method is called once per node. If
        the listener ended the session, the method is not called.
        """


Commands = asyncio.Queue[pb.NodeCommand | None]


class NodeListener:
    """Serves the sessions of nodes on an event loop in a separate thread. Other threads may call the methods. Each
    command is sent to all nodes, in the order of the calls.
    """

    def __init__(self, config: EngineCoreConfig, meeting: str, events: NodeEvents) -> None:
        """Create a listener. ``meeting`` is the address (host:port) at which the workers of all nodes connect to each
        other.

        Raises ConfigError if the secret cannot be read. Also raises ConfigError if other machines can reach the port,
        but neither a secret nor certificates authenticate nodes.
        """
        self._config = config
        self._meeting = meeting
        self._events = events
        self._shared = shared_config(config)
        self._nodes: dict[int, Commands] = {}
        self._over: str | None = None
        self._secret = checked_secret(config, PORT_PURPOSE)
        self._thread = LoopThread("nodes")
        self._server: RpcServer
        self.port = 0

    def start(self) -> None:
        """Start to listen for nodes. Raises ConfigError if the port is in use."""
        self._thread.start()
        self._thread.run(self._start())

    def call(self, message: bytes) -> None:
        """Send a message to all workers on other nodes."""
        self._tell(pb.NodeCommand(call=pb.Call(message=message)))

    def expect_ends(self) -> None:
        """Tell all nodes that the engine is about to stop the workers."""
        self._tell(pb.NodeCommand(expect_ends=pb.ExpectEnds()))

    def dump_stacks(self) -> None:
        """Ask all nodes for the stack traces of their workers."""
        self._tell(pb.NodeCommand(dump_stacks=pb.DumpStacks()))

    def end(self, error: str = "") -> None:
        """End all sessions without waiting. ``error`` is the reason, or empty if the workers were stopped on purpose.
        Only the first call has an effect.
        """
        self._soon(partial(self._end, error))

    def stop(self) -> None:
        """Close the port. ``end`` must have been called before. Idempotent."""
        if not self._thread.running:
            return
        self._thread.run(self._server.stop(_STOP_TIMEOUT))
        self._thread.stop()

    async def session(self, requests: AsyncIterator[pb.NodeReport], context: Context) -> AsyncIterator[pb.NodeCommand]:
        """Serve the stream of one node."""
        index = self._admit(await first_message(requests, "attach"))
        commands = self._nodes[index] = Commands()
        log.info("a node is attached to this engine", node=index, peer=context.peer())
        commands.put_nowait(pb.NodeCommand(attached=pb.Attached(engine_id=self._config.name, meeting=self._meeting)))
        self._events.attached(index)
        reader = asyncio.create_task(self._read(index, requests))
        reader.add_done_callback(lambda _: commands.put_nowait(None))
        reason = "the connection to this node broke"
        try:
            while (command := await commands.get()) is not None:
                yield command
            if reader.done():
                reason = reader.result() or reason
        except RequestFailed as e:
            reason = e.message
            raise
        finally:
            reader.cancel()
            if self._over is None:
                self._events.ended(index, reason)
        if self._over:
            raise Unavailable(self._over, reason="ENGINE_DEAD")

    async def _read(self, index: int, requests: AsyncIterator[pb.NodeReport]) -> str:
        """Read reports until the node ends the stream. Return the reason why the node's workers ended, or an empty
        string if the node gave no reason.
        """
        async for report in requests:
            match report.WhichOneof("message"):
                case "answer":
                    self._events.answered(index, report.answer.rank, report.answer.message)
                case "stacks":
                    self._events.stacks(index, dict(report.stacks.texts))
                case "workers_ended":
                    return report.workers_ended.reason
                case _:
                    raise InvalidArgument(
                        "a NodeReport after the first must have one of the fields answer, stacks, workers_ended",
                        field="message",
                    )
        return ""

    def _admit(self, first: pb.NodeReport | None) -> int:
        """Check the first message of a node, and return the node's index. Raises an error if the node cannot attach."""
        if first is None or first.WhichOneof("message") != "attach":
            raise InvalidArgument(
                "the first message of NodeSession must be a NodeReport with the field attach", field="attach"
            )
        attach, size = first.attach, self._config.executor.nodes.size
        if self._over is not None:
            raise Unavailable("the engine has ended", reason="ENGINE_DEAD")
        if attach.version != service_version():
            raise FailedPrecondition(
                f"node {attach.index} has version {attach.version}, but the engine has version {service_version()}; use the same "
                "container image for the node and the engine",
                reason="VERSIONS_DIFFER",
            )
        if differs := config_difference(self._shared, attach.config):
            key, ours, theirs = differs
            raise FailedPrecondition(
                f"node {attach.index} is configured differently: {key} is {theirs} on the node and {ours} on the engine",
                reason="CONFIGURATIONS_DIFFER",
            )
        if not 1 <= attach.index < size:
            raise InvalidArgument(
                f"executor.nodes.index is {attach.index}; nodes other than the engine's node have indices from 1 to {size - 1}",
                field="index",
            )
        if attach.index in self._nodes:
            raise AlreadyExists(
                f"node {attach.index} is already attached; give each node a different executor.nodes.index"
            )
        return attach.index

    async def _start(self) -> None:
        config = msgspec.structs.replace(
            self._config.server, port=self._config.executor.nodes.port, health_port=-1, reuse_port=False
        )
        allowed = {f"/{SERVICE_NAME}/NodeSession": self._config.peers.engines}
        self._server = RpcServer(
            config,
            service_names=(SERVICE_NAME,),
            interceptors=[SecretGuard(self._secret), *([PeerGuard(allowed)] if config.tls.ca else [])],
            keepalive=SERVICES,
            field="server",
            certificates=Certificates(),
        )
        service_pb2_grpc.add_WorkerServiceServicer_to_server(_Servicer(self), self._server.server)
        self.port = await self._server.start()
        log.info("listening for nodes of this engine", address=with_port(config.host, self.port))

    def _tell(self, command: pb.NodeCommand) -> None:
        self._soon(partial(self._put, command))

    def _end(self, error: str) -> None:
        if self._over is not None:
            return
        self._over = error
        self._put(None)

    def _put(self, command: pb.NodeCommand | None) -> None:
        for commands in self._nodes.values():
            commands.put_nowait(command)

    def _soon(self, work: Callable[[], Any]) -> None:
        if self._thread.running:
            self._thread.loop.call_soon_threadsafe(work)


class _Servicer(service_pb2_grpc.WorkerServiceServicer):
    def __init__(self, listener: NodeListener) -> None:
        self._listener = listener

    async def NodeSession(
        self, request_iterator: AsyncIterator[pb.NodeReport], context: Context
    ) -> AsyncIterator[pb.NodeCommand]:
        """Serve the stream of one node. See ``NodeListener.session``."""
        async for command in self._listener.session(request_iterator, context):
            yield command
