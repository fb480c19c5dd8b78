"""Transfer thread of an engine. The thread serves pulls of KV blocks by other engines, and runs this engine's own
pulls.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import grpc
import msgspec

from penstock.kvtransfer.v1 import service_pb2_grpc
from penstock_common.addresses import with_port
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.call_authorization import PeerGuard, SecretGuard
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.rpc.interceptor import CallObserver
from penstock_common.rpc.server import SERVICES, RpcServer
from penstock_common.security.tls import Certificates
from penstock_common.types.kv_transfer import BlockName, KvMedium, KvSource
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.base import PeerBlock
from penstock_enginecore.kv_transfer.core.leases import LEASE_ID_BYTES, Leases
from penstock_enginecore.kv_transfer.core.transfer_stats import Transfer
from penstock_enginecore.kv_transfer.rpc.pull_client import CHECKSUM, Post, PullClient, PullSettings
from penstock_enginecore.kv_transfer.rpc.pull_server import PullServicer, PullSource
from penstock_enginecore.kv_transfer.rpc.transports import MESSAGE_BYTES
from penstock_enginecore.rpc.internal_ports import LoopThread, checked_secret

# Pulls of KV blocks from the sources of requests, over one connection per source engine.

MAX_PULLS = 1024
"""Maximum number of open pulls by this engine. While the limit is reached, the engine computes the blocks of new
requests instead of pulling them.
"""
_MAX_BAD_BLOCKS = 3
_LEFT_ALONE = 60.0
"""Time in seconds for which no blocks are requested from an engine that has sent ``_MAX_BAD_BLOCKS`` blocks with wrong
checksums.
"""
_IDLE = 60.0
"""Time in seconds after which a connection without pulls is closed."""

Connect = Callable[[str], grpc.aio.Channel]
log = get_logger()


class _Peer:
    """Connection to another engine from which this engine pulls blocks.

    Attributes:
        users: Number of open pulls from the other engine.
        idle_since: Time in seconds at which the last pull from the other engine ended.
        alone_until: Time in seconds before which no blocks may be requested from the other engine.
    """

    def __init__(self) -> None:
        self.channel: grpc.aio.Channel | None = None
        self.users = 0
        self.idle_since = 0.0
        self.num_bad_blocks = 0
        self.alone_until = 0.0


class Peers:
    """``PeerTier`` implementation that pulls blocks over gRPC.

    ``incarnation`` and ``leases`` belong to this engine. With them, the class recognizes requests whose source is this
    engine itself. Such requests need no pull. ``allows`` returns whether blocks may be pulled from an address. ``post``
    runs a function on the transfer thread. ``tick`` and ``close`` must run on the loop of that thread.
    """

    def __init__(
        self,
        settings: PullSettings,
        *,
        incarnation: str,
        leases: Leases,
        block_size: int,
        allows: Callable[[str], bool],
        connect: Connect,
        post: Post,
        wake: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self._leases = leases
        self._block_size = block_size
        self._allows = allows
        self._connect = connect
        self._post = post
        self._wake = wake
        self._next_fetch = itertools.count(1)
        self._sources: dict[str, KvSource] = {}
        """Source of each request whose source is allowed, by request key. Only the busy loop's thread uses this
        attribute and the next two attributes.
        """
        self._pulls: dict[str, PullClient] = {}
        self._own: dict[str, bytes] = {}
        """Ids of leases of this engine whose blocks this engine's own requests use, by request key."""
        self._peers: dict[str, _Peer] = {}
        """Connections to other engines, by address. Only the transfer thread uses this attribute and the attributes
        after it.
        """
        self._fetching: dict[int, PullClient] = {}
        self._running: dict[asyncio.Task[None], PullClient] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks that close connections."""
        self._is_closed = False

    # Methods for the busy loop's thread, see ``PeerTier``.

    def opened(self, request: Request) -> None:
        """Open a pull from the request's source, if that source is allowed."""
        source = request.kv_source
        if source is None:
            return
        if source.incarnation == self._incarnation:
            if self._leases.opened(source.lease_id) is not None:
                self._own[request.key] = source.lease_id
            return
        if (reason := self._refusal(source)) is not None:
            self._settings.counts.failures[reason] += 1
            now = self._settings.clock()
            self._settings.observe(
                Transfer(request.context.trace_context, KvMedium.PEER, "", now, now, 0, 0, 0, reason)
            )
            return
        bad_block = partial(self._bad_block, source.address)
        client = PullClient(source, self._settings, self._post, bad_block, request.context.trace_context)
        self._sources[request.key], self._pulls[request.key] = source, client
        self._post(partial(self._start, source.address, client))

    def closed(self, request: Request) -> None:
        """Release the lease of the request's source, and close the pull."""
        if (lease_id := self._own.pop(request.key, None)) is not None:
            self._leases.closed(lease_id, self._settings.clock())
            self._leases.released(lease_id)
            self._wake()
        if (client := self._pulls.pop(request.key, None)) is not None:
            del self._sources[request.key]
            self._post(partial(client.close, released=True))

    def num_blocks(self, request: Request) -> int:
        """Return the number of full blocks that the source announced, or 0 once the source has failed."""
        client = self._pulls.get(request.key)
        if client is None or client.failed:
            return 0
        return self._sources[request.key].num_tokens // self._block_size

    def fetch(
        self,
        request: Request,
        names: Sequence[BlockName],
        arrived: Callable[[Sequence[PeerBlock]], None],
        ended: Callable[[], None],
    ) -> int:
        """Request blocks from the request's source."""
        fetch_id = next(self._next_fetch)
        client = self._pulls.get(request.key)
        if client is None:
            self._post(ended)
        else:
            self._post(partial(self._fetch, client, fetch_id, tuple(names), arrived, ended))
        return fetch_id

    def abandon(self, fetch_id: int) -> None:
        """Stop waiting for the blocks of a fetch that have not arrived."""
        self._post(partial(self._abandon, fetch_id))

    def _refusal(self, source: KvSource) -> str | None:
        """Return the reason why blocks must not be requested from a source, or None if they may be requested."""
        if source.fingerprint != self._settings.fingerprint:
            return "layout"
        if len(source.lease_id) != LEASE_ID_BYTES or not source.num_tokens:
            return "lease"
        if not self._allows(source.address):
            return "address"
        peer = self._peers.get(source.address)
        if peer is not None and peer.alone_until > self._settings.clock():
            return "left_alone"
        return "too_many" if len(self._pulls) >= MAX_PULLS else None

    # Methods for the transfer thread.

    @property
    def num_pulls(self) -> int:
        """Number of pulls that have not ended. Thread-safe."""
        return len(self._running)

    def tick(self, late: float) -> None:
        """Fail pulls whose source has been silent for too long, and close idle connections. The method is called
        several times per timeout for silent sources.

        ``late`` is the delay of this call in seconds. During the delay, this engine could not receive messages.
        """
        now = self._settings.clock()
        for client in list(self._running.values()):
            if late > self._settings.silence / 2:
                client.forgive(now)
            client.look(now)
        for address, peer in list(self._peers.items()):
            if peer.users or now - peer.idle_since < _IDLE or peer.alone_until > now:
                continue
            del self._peers[address]
            if peer.channel is not None:
                task = asyncio.ensure_future(peer.channel.close())
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """End all pulls and refuse new pulls. The leases of the pulls are not released, because other engines may need
        the leased blocks.
        """
        self._is_closed = True
        for client in list(self._running.values()):
            client.close(released=False)
        await asyncio.gather(*self._running, *self._leaving, return_exceptions=True)
        for peer in self._peers.values():
            if peer.channel is not None:
                await peer.channel.close()
        self._peers.clear()

    def _start(self, address: str, client: PullClient) -> None:
        if self._is_closed:
            client.fail("stopped")
            return
        peer = self._peers.setdefault(address, _Peer())
        if peer.channel is None:
            peer.channel = self._connect(address)
        peer.users += 1
        task = asyncio.create_task(client.run(peer.channel))
        self._running[task] = client
        task.add_done_callback(partial(self._ended, peer))

    def _ended(self, peer: _Peer, task: "asyncio.Task[None]") -> None:
        del self._running[task]
        peer.users -= 1
        peer.idle_since = self._settings.clock()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("fetching KV blocks from another engine failed unexpectedly", exc_info=error)

    def _fetch(
        self,
        client: PullClient,
        fetch_id: int,
        names: Sequence[BlockName],
        arrived: Callable[[Sequence[PeerBlock]], None],
        ended: Callable[[], None],
    ) -> None:
        def over() -> None:
            self._fetching.pop(fetch_id, None)
            ended()

        self._fetching[fetch_id] = client
        client.fetch(fetch_id, names, arrived, over)

    def _abandon(self, fetch_id: int) -> None:
        if (client := self._fetching.get(fetch_id)) is not None:
            client.abandon(fetch_id)

    def _bad_block(self, address: str) -> str | None:
        peer = self._peers.setdefault(address, _Peer())
        peer.num_bad_blocks += 1
        if peer.num_bad_blocks < _MAX_BAD_BLOCKS:
            return None
        peer.num_bad_blocks = 0
        peer.alone_until = self._settings.clock() + _LEFT_ALONE
        log.error(
            "another engine sent several KV blocks with wrong checksums; temporarily requesting no blocks from that engine",
            address=address,
        )
        return CHECKSUM


# The transfer thread.

SERVICE_NAME = "penstock.kvtransfer.v1.KvTransferService"
PORT_PURPOSE = "kv_transfer"
"""Name of the port's purpose. The key that authenticates calls to the port is derived from the shared secret and this
name.
"""
_MAX_MESSAGE_BYTES = 4 * MESSAGE_BYTES
_STOP_TIMEOUT = 2.0
"""Time in seconds to wait for the end of open pulls when the engine stops."""
_TICKS = 4
"""Number of checks for silent sources within one timeout."""


class KvTransfer:
    """Thread with an event loop for KV transfers. Any other thread may call its methods.

    The caller must call ``start`` first, to open the port, then ``attach`` once the model is loaded, and ``stop`` at
    the end.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        certificates: Certificates | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        """Create the transfer thread. ``observer`` is called for each gRPC call from another engine.

        Raises ConfigError if the TLS files or the secret are invalid. Also raises ConfigError if other machines can
        reach the port, but neither a secret nor certificates authenticate engines.
        """
        self.secret = checked_secret(config, PORT_PURPOSE)
        """Secret for gRPC calls to other engines, or None."""
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
        """Start to listen on the port. Raises ConfigError if the port is in use."""
        self._thread.start()
        try:
            self._thread.run(self._start())
        except BaseException:
            self._thread.stop()
            raise

    def attach(self, source: PullSource, peers: Peers) -> None:
        """Start to serve the blocks of ``source`` to other engines, and to run the pulls of ``peers``."""
        self._thread.run(self._attach(source, peers))

    def stop(self) -> None:
        """End all pulls, and close the port. Idempotent."""
        if not self._thread.running:
            return
        self._thread.run(self._stop())
        self._thread.stop()

    def post(self, work: Callable[[], None]) -> None:
        """Run a function on the transfer thread. Do nothing once the thread has ended."""
        with contextlib.suppress(RuntimeError):  # The event loop is closed, so do nothing.
            self._thread.loop.call_soon_threadsafe(work)

    def connect(self, address: str) -> grpc.aio.Channel:
        """Open a gRPC channel to another engine. Only the transfer thread may call this method."""
        return make_channel(address, credentials=self._credentials, max_message_bytes=_MAX_MESSAGE_BYTES)

    @property
    def num_pulls(self) -> tuple[int, int]:
        """Two numbers: the number of open pulls by other engines, and the number of open pulls by this engine."""
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
        log.info("listening for engines that fetch KV blocks", address=with_port(config.host, self.port))

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
