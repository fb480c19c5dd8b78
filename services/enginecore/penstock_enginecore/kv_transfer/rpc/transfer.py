"""The transfer thread of an engine: what others pull from it, and what it pulls from them."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import msgspec

from penstock.kvtransfer.v1 import service_pb2_grpc
from penstock_common.addresses import with_port
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.rpc.guard import PeerGuard
from penstock_common.rpc.interceptor import CallObserver
from penstock_common.rpc.port_secret import SecretGuard
from penstock_common.rpc.server import SERVICES, RpcServer
from penstock_common.security.certificates import Certificates
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.kv_transfer.rpc.peers import Peers
from penstock_enginecore.kv_transfer.rpc.pull_server import PullServicer, PullSource
from penstock_enginecore.kv_transfer.rpc.window import MESSAGE_BYTES
from penstock_enginecore.rpc.internal_ports import checked_secret
from penstock_enginecore.rpc.loop_thread import LoopThread

SERVICE_NAME = "penstock.kvtransfer.v1.KvTransferService"
PORT_PURPOSE = "kv_transfer"
"""Names the port in what is derived from the shared secret."""
_MAX_MESSAGE_BYTES = 4 * MESSAGE_BYTES
_STOP_TIMEOUT = 2.0
"""Seconds that pulls have to end by themselves when the engine stops."""
_TICKS = 4
"""In a silence."""

log = get_logger()


class KvTransfer:
    """Owns a loop in a thread. Methods may be called from any other one.

    Order: ``start`` (the port answers, not serving), ``attach`` (the model is loaded), ``stop``.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        certificates: Certificates | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        """``observer``: told of the calls that others make.

        Raises ConfigError for TLS and the secret, and if other machines can reach the port and neither the secret nor
        certificates tell who an engine is.
        """
        self.secret = checked_secret(config, PORT_PURPOSE)
        """What calls of other engines are begun with."""
        self._config = config
        self._observer = observer
        self._certificates = certificates or Certificates()
        self._credentials = ClientCredentials(
            config.kv_transfer.tls, field="kv_transfer.tls", certificates=self._certificates
        )
        self._thread = LoopThread("kv transfer")
        self._servicer = PullServicer()
        self._peers: Peers | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._server: RpcServer
        self.port = 0

    def start(self) -> None:
        """Listen. Raises ConfigError when the port is taken."""
        self._thread.start()
        try:
            self._thread.run(self._start())
        except BaseException:
            self._thread.stop()
            raise

    def attach(self, source: PullSource, peers: Peers) -> None:
        """Serve ``source``, and keep the pulls of ``peers`` going."""
        self._thread.run(self._attach(source, peers))

    def stop(self) -> None:
        """End all pulls, and close the port. Idempotent."""
        if not self._thread.running:
            return
        self._thread.run(self._stop())
        self._thread.stop()

    def post(self, work: Callable[[], None]) -> None:
        """Have something done on the transfer thread; nothing once that has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._thread.loop.call_soon_threadsafe(work)

    def connect(self, address: str) -> grpc.aio.Channel:
        """A channel to another engine. For the transfer thread."""
        return make_channel(address, credentials=self._credentials, max_message_bytes=_MAX_MESSAGE_BYTES)

    @property
    def num_pulls(self) -> tuple[int, int]:
        """Open pulls: those of others, and own ones."""
        return self._servicer.num_pulls, 0 if self._peers is None else self._peers.num_pulls

    async def _start(self) -> None:
        config = msgspec.structs.replace(
            self._config.server,
            port=self._config.kv_transfer.port,
            health_port=-1,
            reuse_port=False,
            max_message_bytes=_MAX_MESSAGE_BYTES,
        )
        allowed = {f"/{SERVICE_NAME}/Pull": self._config.peers.engines}
        self._server = RpcServer(
            config,
            service_names=(SERVICE_NAME,),
            interceptors=[SecretGuard(self.secret), *([PeerGuard(allowed)] if config.tls.ca else [])],
            observer=self._observer,
            keepalive=SERVICES,
            field="server",
            certificates=self._certificates,
        )
        service_pb2_grpc.add_KvTransferServiceServicer_to_server(self._servicer, self._server.server)
        try:
            self.port = await self._server.start()
        except BaseException:
            await self._server.server.stop(None)
            raise
        log.info("listening for engines that pull blocks", address=with_port(config.host, self.port))

    async def _attach(self, source: PullSource, peers: Peers) -> None:
        self._servicer.source, self._peers = source, peers
        self._ticker = asyncio.create_task(self._tick(peers))
        await self._server.set_serving(True)

    async def _tick(self, peers: Peers) -> None:
        interval, loop = self._config.kv_transfer.silence / _TICKS, self._thread.loop
        while True:
            due = loop.time() + interval
            await asyncio.sleep(interval)
            peers.tick(late=loop.time() - due)

    async def _stop(self) -> None:
        await self._server.set_serving(False)
        if self._ticker is not None:
            self._ticker.cancel()
        if self._peers is not None:
            await self._peers.close()
        await self._server.stop(_STOP_TIMEOUT)
