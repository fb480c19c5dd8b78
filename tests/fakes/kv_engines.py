"""Engines without a model that pull KV blocks from each other. The bytes of a block are computed from its name."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock_common.config.sections import ServerConfig
from penstock_common.rpc.interceptor import CallObserver
from penstock_common.tensors.shared_memory import ROOT
from penstock_common.types.kv_transfer import BlockName, KvSource
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import EngineCoreConfig, KvTransferConfig, ModelConfig, ParallelConfig
from penstock_enginecore.core.kv_cache.block_pool import BlockPool
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.base import Content, PeerBlock
from penstock_enginecore.kv_transfer.core.leases import Leases
from penstock_enginecore.kv_transfer.core.transfer_stats import Transfer
from penstock_enginecore.kv_transfer.metrics import TransferCounts
from penstock_enginecore.kv_transfer.rpc.offers import Offers
from penstock_enginecore.kv_transfer.rpc.pull_client import PullSettings
from penstock_enginecore.kv_transfer.rpc.pull_server import PullSource
from penstock_enginecore.kv_transfer.rpc.transfer import KvTransfer, Peers
from tests.fakes.nixl import NixlNetwork
from tests.fakes.patience import PATIENCE

BLOCK_SIZE = 4
FINGERPRINT = b"f" * 16


def names_of(prompt: str, count: int, *, group: int = 0) -> list[BlockName]:
    """Return the names of the blocks of a prompt."""
    return [
        BlockName(group, hashlib.blake2b(f"{prompt}:{place}".encode(), digest_size=16).digest())
        for place in range(count)
    ]


def content(name: BlockName, size: int) -> bytes:
    """Return the content of a block, the same on every medium."""
    seed = hashlib.blake2b(bytes([name.group]) + name.hash, digest_size=64).digest()
    return (seed * (size // 64 + 1))[:size]


@dataclass
class Fetched:
    """Result of a fetch."""

    names: Sequence[BlockName]
    hold: bool = False
    """Whether the fetched blocks are kept instead of released immediately."""
    contents: dict[BlockName, bytes] = field(default_factory=dict)
    held: list[PeerBlock] = field(default_factory=list)
    some: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    num_ends: int = 0
    number: int = 0

    def arrived(self, blocks: Sequence[PeerBlock]) -> None:
        assert not self.num_ends, "a block came behind the end"
        for block in blocks:
            name = self.names[block.place]
            assert name not in self.contents, "a block came twice"
            self.contents[name] = bytes(block.data)
            if self.hold:
                self.held.append(block)
            else:
                block.done()
        self.some.set()

    def ended(self) -> None:
        self.num_ends += 1
        self.over.set()

    def wait(self) -> dict[BlockName, bytes]:
        assert self.over.wait(PATIENCE), "the fetch never ended"
        assert self.num_ends == 1
        return self.contents


class FakeKvEngine:
    """Engine of a cluster. Its pool is a dict of bytes. ``before_read`` is called on the reading thread."""

    def __init__(
        self,
        name: str,
        *,
        block_bytes: int = 1000,
        num_blocks: int = 65,
        lease: float = 5.0,
        incarnation: str = "",
        fingerprint: bytes = FINGERPRINT,
        root: Path | None = None,
        observer: CallObserver | None = None,
        nixl: NixlNetwork | None = None,
        **settings: Any,
    ) -> None:
        self.name, self.block_bytes = name, block_bytes
        self.incarnation = incarnation or f"{name}-1"
        self.fingerprint = fingerprint
        config = EngineCoreConfig(
            model=ModelConfig(path="m"),
            engine_id=name,
            server=settings.pop("server", ServerConfig(host="127.0.0.1")),
            parallel=settings.pop("parallel", ParallelConfig()),
            kv_transfer=KvTransferConfig(**{"transport": "grpc", "port": 0, "lease": lease, **settings}),
        )
        self.config = config
        self.pool = BlockPool(num_blocks)
        self.leases = Leases(self.pool.free, num_blocks // 2, lease_seconds=lease)
        self.memory: dict[int, bytes] = {}
        self.before_read: Callable[[Sequence[int]], object] = lambda _: None
        self.num_read = 0
        self.woken = threading.Event()
        self.counts = TransferCounts()
        self.transfers: list[Transfer] = []
        """Ended leases."""
        self._reader = ThreadPoolExecutor(1)
        self.transfer = KvTransfer(config, observer=observer)
        self.offers = Offers(
            config.kv_transfer,
            incarnation=self.incarnation,
            block_bytes=block_bytes,
            root=root or ROOT,
            make_agent=(nixl or NixlNetwork()).agent,
        )
        self._next_request = 0
        self.peers = self.make_peers()

    def make_peers(self) -> Peers:
        settings = PullSettings(
            fingerprint=self.fingerprint,
            silence=self.config.kv_transfer.silence,
            transports=self.offers.transports,
            shared_memory_id=self.offers.shared_memory_id,
            receiver=self.offers.receiver,
            counts=self.counts,
            observe=self.transfers.append,
            secret=self.transfer.secret,
        )
        return Peers(
            settings,
            incarnation=self.incarnation,
            leases=self.leases,
            block_size=BLOCK_SIZE,
            allows=self.config.kv_transfer.allows,
            connect=self.transfer.connect,
            post=self.transfer.post,
            wake=self.woken.set,
        )

    def make_source(self) -> PullSource:
        return PullSource(
            self.leases,
            self.read,
            self.woken.set,
            incarnation=self.incarnation,
            fingerprint=self.fingerprint,
            block_bytes=self.block_bytes,
            senders=self.offers.sender,
            counts=self.counts,
        )

    def __enter__(self) -> "FakeKvEngine":
        self.transfer.start()
        self.transfer.attach(self.make_source(), self.peers)
        return self

    def __exit__(self, *_: object) -> None:
        self.transfer.stop()
        self.offers.close()
        self._reader.shutdown()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.transfer.port}"

    def read(self, block_ids: Sequence[int]) -> "Future[list[Content]]":
        """Read blocks. Those with even IDs are bytes, as on a CPU, and the others memoryviews, as on a GPU."""

        def copy() -> list[Content]:
            self.before_read(block_ids)
            self.num_read += len(block_ids)
            found = ((block_id, self.memory[block_id]) for block_id in block_ids)
            return [memoryview(bytearray(data)) if block_id % 2 else data for block_id, data in found]

        return self._reader.submit(copy)

    def fill(self, names: Sequence[BlockName]) -> list[Any]:
        """Return blocks with the contents of these names, each with a reference."""
        blocks = self.pool.allocate(len(names))
        for block, name in zip(blocks, names, strict=True):
            self.pool.cache(block, name.hash, name.group)
            self.memory[block.block_id] = content(name, self.block_bytes)
        return blocks

    def grant(self, names: Sequence[BlockName], now: float, lease_id: bytes = b"l" * 16) -> KvSource:
        """Grant a lease on new blocks with the contents of these names."""
        blocks = self.fill(names)
        by_name = {name: block.block_id for name, block in zip(names, blocks, strict=True)}
        assert self.leases.grant(lease_id, [blocks], by_name, now) is not None
        return KvSource(
            engine_id=self.name,
            incarnation=self.incarnation,
            address=self.address,
            lease_id=lease_id,
            num_tokens=len(names) * BLOCK_SIZE,
            fingerprint=self.fingerprint,
        )

    def request(self, source: KvSource | None) -> Request:
        """Return a request that resumes on this engine."""
        self._next_request += 1
        sent = EngineCoreRequest(
            request_id=str(self._next_request),
            prompt_token_ids=[1],
            sampling_params=SamplingParams(),
            kv_source=source,
        )
        return Request(sent, client_id="c", max_model_len=64)

    def fetch(self, request: Request, names: Sequence[BlockName], *, hold: bool = False) -> Fetched:
        """Ask the request's source for blocks."""
        fetched = Fetched(names, hold=hold)
        fetched.number = self.peers.fetch(request, names, fetched.arrived, fetched.ended)
        return fetched
