"""What lets an engine give blocks to other engines, and take them from these."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry

from penstock_common import addresses
from penstock_common.errors import ConfigError
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.interceptor import CallObserver
from penstock_common.security.certificates import Certificates
from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.config import EngineCoreConfig, KvTransferConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.kv_cache.block_pool import BlockPool
from penstock_enginecore.kv_transfer.core.copier import BlockCopier
from penstock_enginecore.kv_transfer.core.counts import TransferCounts
from penstock_enginecore.kv_transfer.core.layout import layout_of
from penstock_enginecore.kv_transfer.core.lease_grants import LeasedBlocks
from penstock_enginecore.kv_transfer.core.leases import Leases
from penstock_enginecore.kv_transfer.core.tiers import TieredConnector
from penstock_enginecore.kv_transfer.core.transfers import Observe, Transfer
from penstock_enginecore.kv_transfer.rpc.offers import Offers
from penstock_enginecore.kv_transfer.rpc.peers import Peers
from penstock_enginecore.kv_transfer.rpc.pull_client import PullSettings
from penstock_enginecore.kv_transfer.rpc.pull_server import PullSource
from penstock_enginecore.kv_transfer.rpc.transfer import KvTransfer
from penstock_enginecore.kv_transfer.tier_metrics import TierCollector
from penstock_enginecore.kv_transfer.transfer_metrics import LeaseCollector, TransferCollector

CAPABILITY = "kv_transfer"
log = get_logger()


@contextmanager
def transferring(
    config: EngineCoreConfig,
    engine: EngineCore,
    ready: EngineReady,
    *,
    certificates: Certificates,
    registry: CollectorRegistry,
    observe: Observe = lambda _: None,
    observer: CallObserver | None = None,
) -> Iterator[EngineReady]:
    """Give and take blocks, if the engine is to, and tell of all that come from elsewhere. Yields who the engine is, with where
    its blocks are to be had. ``observe``: told of what came and what did not, on any thread. ``observer``: told of the calls that
    others make. Raises ConfigError for a model without blocks, when the port is taken, and for TLS.
    """
    counts = TransferCounts()

    def count(transfer: Transfer) -> None:
        counts.ended(transfer)
        observe(transfer)

    if isinstance(engine.connector, TieredConnector):
        engine.connector.observe = count
        registry.register(TierCollector(engine.connector.stats, ready))
        registry.register(TransferCollector(counts, engine.connector.stats, ready))
    if not config.kv_transfer.enabled:
        yield ready
        return
    if engine.model.pooling is not None:
        raise ConfigError(
            f"kv_transfer.transport is {config.kv_transfer.transport!r} and the model pools: it keeps no keys and values; "
            "use 'off'"
        )
    with ExitStack() as ends:
        transfer = KvTransfer(config, certificates, observer)
        yield _begin(config, engine, ready, transfer, registry, ends, counts, count)


def _begin(
    config: EngineCoreConfig,
    engine: EngineCore,
    ready: EngineReady,
    transfer: KvTransfer,
    registry: CollectorRegistry,
    ends: ExitStack,
    counts: TransferCounts,
    observe: Observe,
) -> EngineReady:
    copier, settings = engine.executor.block_copier(), config.kv_transfer
    fingerprint = _fingerprint(engine, ready, copier)
    if not fingerprint:
        log.warning("the weights cannot be told from others: the engine gives no blocks and takes none")
        return ready
    transfer.start()
    ends.callback(transfer.stop)
    offers = Offers(settings, incarnation=ready.incarnation, block_bytes=copier.block_bytes)
    ends.callback(offers.close)
    kv_cache, wake = engine.scheduler.kv_cache, partial(_wake, engine)
    leases = _leases(settings, kv_cache.pool)
    source = PullSource(
        leases,
        copier.read,
        wake,
        incarnation=ready.incarnation,
        fingerprint=fingerprint,
        block_bytes=copier.block_bytes,
        senders=offers.sender,
        counts=counts,
    )
    pulls = PullSettings(
        fingerprint=fingerprint,
        silence=settings.silence,
        transports=offers.transports,
        shared_memory_id=offers.shared_memory_id,
        receiver=offers.receiver,
        counts=counts,
        observe=observe,
        secret=transfer.secret,
    )
    peers = Peers(
        pulls,
        incarnation=ready.incarnation,
        leases=leases,
        block_size=ready.block_size,
        allows=settings.allows,
        connect=transfer.connect,
        post=transfer.post,
        wake=wake,
    )
    transfer.attach(source, peers)
    registry.register(
        LeaseCollector(
            leases,
            ready,
            num_pulls=lambda: transfer.num_pulls,
            num_slots_used=lambda: offers.num_slots_used,
        )
    )
    identity = _identity(ready, _address(config, transfer.port), fingerprint)
    engine.leases = LeasedBlocks(leases, kv_cache, identity, block_bytes=copier.block_bytes)
    if isinstance(engine.connector, TieredConnector):
        engine.connector.take_from(peers)
    return msgspec.structs.replace(
        ready,
        kv_address=identity.address,
        kv_fingerprint=fingerprint,
        capabilities=(*ready.capabilities, CAPABILITY),
    )


def _fingerprint(engine: EngineCore, ready: EngineReady, copier: BlockCopier) -> bytes:
    """Of the engine's blocks; empty where its weights cannot be told from others."""
    layout = layout_of(
        engine.kv_cache_config,
        ready.config,
        order=copier.order,
        num_shards=engine.config.executor.num_workers,
        block_bytes=copier.block_bytes,
        numerics=copier.numerics,
    )
    return layout.fingerprint


def _leases(settings: KvTransferConfig, pool: BlockPool) -> Leases:
    """Of as many blocks of the pool as the settings allow."""
    return Leases(
        pool.free,
        int(settings.max_leased_fraction * pool.num_usable_blocks),
        lease_seconds=settings.lease,
        max_seconds=settings.max_lease,
    )


def _identity(ready: EngineReady, address: str, fingerprint: bytes) -> KvSource:
    """The engine as whoever keeps blocks, but for what a lease says."""
    return KvSource(
        engine_id=ready.engine_id,
        incarnation=ready.incarnation,
        address=address,
        lease_id=b"",
        num_tokens=0,
        fingerprint=fingerprint,
    )


def _wake(engine: EngineCore) -> None:
    """What ``wake`` is then: the busy loop sets it."""
    engine.wake()


def _address(config: EngineCoreConfig, port: int) -> str:
    """Where other engines reach this one."""
    if config.kv_transfer.advertise:
        return addresses.with_default_port(config.kv_transfer.advertise, port)
    if config.coordinator.advertise:
        host, _ = addresses.split(addresses.with_default_port(config.coordinator.advertise, port))
        return addresses.with_port(host, port)
    return addresses.with_port(socket.getfqdn(), port)
