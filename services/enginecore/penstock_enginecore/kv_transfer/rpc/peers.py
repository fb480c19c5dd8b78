"""The sources of an engine's requests: a pull of each, over one connection to each engine."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import grpc

from penstock_common.observability.logging import get_logger
from penstock_common.types.kv_transfer import BlockName, KvMedium, KvSource
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.leases import LEASE_ID_BYTES, Leases
from penstock_enginecore.kv_transfer.core.peer import PeerBlock
from penstock_enginecore.kv_transfer.core.transfers import Transfer
from penstock_enginecore.kv_transfer.rpc.pull_client import CHECKSUM, Post, PullClient, PullSettings

MAX_PULLS = 1024
"""That are open at once; requests beyond them are computed."""
_MAX_BAD_BLOCKS = 3
_LEFT_ALONE = 60.0
"""Seconds for which nothing is taken from an engine of which so many bad blocks have come."""
_IDLE = 60.0
"""Seconds after which a connection without pulls is closed."""

Connect = Callable[[str], grpc.aio.Channel]
log = get_logger()


class _Peer:
    """Another engine. ``users``: pulls from it; ``idle_since``: seconds; ``alone_until``: when it may be asked again."""

    def __init__(self) -> None:
        self.channel: grpc.aio.Channel | None = None
        self.users = 0
        self.idle_since = 0.0
        self.num_bad_blocks = 0
        self.alone_until = 0.0


class Peers:
    """A ``PeerTier``. ``incarnation``: this engine's, whose own ``leases`` need no pull. ``allows``: whether blocks
    may be taken from an address. ``post`` runs something on the transfer thread, to whose loop ``tick`` and ``close`` belong.
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
        """By key of a request that has one that may be asked. The thread of the busy loop's, as the next two."""
        self._pulls: dict[str, PullClient] = {}
        self._own: dict[str, bytes] = {}
        """Leases of this engine that its own requests have open."""
        self._peers: dict[str, _Peer] = {}
        """By address. The transfer thread's, as the following."""
        self._fetching: dict[int, PullClient] = {}
        self._running: dict[asyncio.Task[None], PullClient] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Close connections."""
        self._is_closed = False

    # The thread of the busy loop: see ``PeerTier``.

    def opened(self, request: Request) -> None:
        """Open a pull of its source, if it may be asked."""
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
        """Give its lease up."""
        if (lease_id := self._own.pop(request.key, None)) is not None:
            self._leases.closed(lease_id, self._settings.clock())
            self._leases.released(lease_id)
            self._wake()
        if (client := self._pulls.pop(request.key, None)) is not None:
            del self._sources[request.key]
            self._post(partial(client.close, released=True))

    def num_blocks(self, request: Request) -> int:
        """Of whole blocks, those that the source said it has, until it has failed."""
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
        """Ask its source for blocks."""
        fetch_id = next(self._next_fetch)
        client = self._pulls.get(request.key)
        if client is None:
            self._post(ended)
        else:
            self._post(partial(self._fetch, client, fetch_id, tuple(names), arrived, ended))
        return fetch_id

    def abandon(self, fetch_id: int) -> None:
        """End a fetch."""
        self._post(partial(self._abandon, fetch_id))

    def _refusal(self, source: KvSource) -> str | None:
        """Why a source is not asked; None where it is."""
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

    # The transfer thread.

    @property
    def num_pulls(self) -> int:
        """Those that have not ended. Any thread."""
        return len(self._running)

    def tick(self, late: float) -> None:
        """To be called a few times in a silence. ``late``: seconds by which this call is late; for so long nobody was heard."""
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
        """End all pulls, and begin none any more. Their leases last for whoever comes next."""
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
            log.error("a pull failed", exc_info=error)

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
        log.error("nothing is taken for a while from an engine whose blocks come broken", address=address)
        return CHECKSUM
