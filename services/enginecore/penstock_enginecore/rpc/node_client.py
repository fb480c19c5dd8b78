"""Client side of the session between a node (another host with workers of the engine) and the engine."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import grpc

from penstock.worker.v1 import messages_pb2 as pb
from penstock.worker.v1 import service_pb2_grpc
from penstock_common.addresses import with_default_port
from penstock_common.errors import Internal, Unavailable
from penstock_common.observability.logging import get_logger
from penstock_common.observability.metrics import service_version
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import ClientCredentials, advised
from penstock_common.rpc.status import from_rpc_error
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.rpc.internal_ports import own_secret
from penstock_enginecore.rpc.node_listener import PORT_PURPOSE, shared_config

_AGAIN = 0.5
"""Time in seconds between two attempts to reach the engine."""

Session = grpc.aio.StreamStreamCall[pb.NodeReport, pb.NodeCommand]
log = get_logger()


class NodeOrders(Protocol):
    """Interface of objects that carry out the engine's commands to a node."""

    def call(self, message: bytes) -> None:
        """Pass a message to all workers of the node."""

    def expect_ends(self) -> None:
        """Prepare for the end of the workers, because the engine is about to stop them."""

    def dump_stacks(self) -> Mapping[int, str]:
        """Return the stack traces of the workers' threads, by rank. The call may block."""


class NodeClient:
    """Connects a node (a host with workers) to its engine. Only one event loop may use the object, except for
    ``answer`` and ``give_up``, which are thread-safe.

    Raises ConfigError if the TLS files or the secret are invalid.
    """

    def __init__(self, config: EngineCoreConfig) -> None:
        nodes = config.executor.nodes
        self._nodes = nodes
        self._address = with_default_port(nodes.leader, nodes.port)
        self._credentials = ClientCredentials(nodes.tls, field="executor.nodes.tls")
        self._max_message_bytes = config.server.max_message_bytes
        self._attach = pb.Attach(version=service_version(), index=nodes.index, config=shared_config(config))
        self._secret = own_secret(config, PORT_PURPOSE)
        self._reports: asyncio.Queue[pb.NodeReport] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._channel: grpc.aio.Channel
        self._session: Session

    async def attach(self) -> pb.Attached:
        """Connect to the engine, which may still be starting.

        Raises RequestFailed if the engine rejects the node, or Unavailable if the engine was not reached in time.
        """
        deadline = self._loop.time() + self._nodes.timeout
        told = False
        while True:
            try:
                return await self._try()
            except grpc.aio.AioRpcError as e:
                failed = from_rpc_error(e)
                if e.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise failed from None
            if self._loop.time() >= deadline:
                raise Unavailable(
                    f"the engine at {self._address} (executor.nodes.leader) was not reached within {self._nodes.timeout:g} s "
                    f"(executor.nodes.timeout): {advised(failed.message)}"
                )
            if not told:
                log.info(
                    "waiting until the engine can be reached", address=self._address, reason=advised(failed.message)
                )
                told = True
            await asyncio.sleep(_AGAIN)

    async def serve(self, orders: NodeOrders) -> None:
        """Carry out the engine's commands until the session ends. Raises RequestFailed, unless the session ended
        because the engine told the node to stop the workers.
        """
        writer = asyncio.create_task(self._write())
        try:
            while isinstance(command := await self._session.read(), pb.NodeCommand):
                await self._carry_out(command, orders)
            if await self._session.code() is not grpc.StatusCode.OK:
                await self._session.initial_metadata()
                raise Unavailable(await self._session.details() or "the engine cannot be reached")
        except grpc.aio.AioRpcError as e:
            raise from_rpc_error(e) from None
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self._channel.close()

    def answer(self, rank: int, message: bytes) -> None:
        """Send a worker's answer to the engine."""
        self._report(pb.NodeReport(answer=pb.Answer(rank=rank, message=message)))

    def give_up(self, reason: str) -> None:
        """Report to the engine that the node's workers have ended."""
        self._report(pb.NodeReport(workers_ended=pb.WorkersEnded(reason=reason)))

    async def _try(self) -> pb.Attached:
        channel = make_channel(self._address, credentials=self._credentials, max_message_bytes=self._max_message_bytes)
        try:
            metadata = () if self._secret is None else self._secret.metadata()
            session: Session = service_pb2_grpc.WorkerServiceStub(channel).NodeSession(metadata=metadata)
            if self._secret is not None:
                await self._secret.check_server(session, metadata)
            await session.write(pb.NodeReport(attach=self._attach))
            first = await session.read()
            if not isinstance(first, pb.NodeCommand) or first.WhichOneof("message") != "attached":
                raise Internal("the engine answered the message 'attach' with another message than 'attached'")
        except BaseException:
            await channel.close()
            raise
        self._channel, self._session = channel, session
        return first.attached

    async def _carry_out(self, command: pb.NodeCommand, orders: NodeOrders) -> None:
        match command.WhichOneof("message"):
            case "call":
                orders.call(command.call.message)
            case "expect_ends":
                orders.expect_ends()
            case "dump_stacks":
                texts = await asyncio.to_thread(orders.dump_stacks)
                self._reports.put_nowait(pb.NodeReport(stacks=pb.Stacks(texts=texts)))
            case _:
                raise Internal("the engine sent an unknown message; use the same version on all nodes")

    async def _write(self) -> None:
        while True:
            await self._session.write(await self._reports.get())

    def _report(self, report: pb.NodeReport) -> None:
        self._loop.call_soon_threadsafe(self._reports.put_nowait, report)
