"""Setup of KV transfer, with which an engine sends KV blocks to other engines and receives KV blocks from other
engines.
"""

import hashlib
import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import msgspec
from prometheus_client import CollectorRegistry

from penstock_common import addresses
from penstock_common.errors import ConfigError
from penstock_common.observability.logging import get_logger
from penstock_common.observability.metrics import Readings
from penstock_common.rpc.interceptor import CallObserver
from penstock_common.security.tls import Certificates
from penstock_common.types.kv_transfer import KvGroup, KvLayout, KvSource
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.config import EngineCoreConfig, KvTransferConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.kv_transfer.core.base import BlockCopier
from penstock_enginecore.kv_transfer.core.leases import Leases
from penstock_enginecore.kv_transfer.core.tiers import TieredConnector
from penstock_enginecore.kv_transfer.core.transfer_stats import Observe, Transfer
from penstock_enginecore.kv_transfer.metrics import TransferCounts, lease_families, tier_families, transfer_families
from penstock_enginecore.kv_transfer.rpc.offers import Offers
from penstock_enginecore.kv_transfer.rpc.pull_client import PullSettings
from penstock_enginecore.kv_transfer.rpc.pull_server import PullSource
from penstock_enginecore.kv_transfer.rpc.transfer import KvTransfer, Peers

# Fingerprint of a block's layout and content. Two engines can use each other's blocks if their fingerprints are equal.

FINGERPRINT_BYTES = 16
_PERSON = b"penstock-kv-1"
_OF_TOKENS_ALONE = frozenset({"task", "eos_token_ids", "enable_in_reasoning", "revision"})
"""Names of properties that the fingerprint leaves out, because they affect tokens but not keys and values, or are only
labels.
"""
_NUMERICS = ("tensor_parallel_size", "batch_invariant")
"""Names of properties that change only how computed numbers are rounded. The fingerprint leaves them out."""
_HASH = re.compile(r"[0-9a-f]{16}")


def layout_of(
    config: KVCacheConfig,
    computes: Mapping[str, str],
    *,
    order: str,
    num_shards: int,
    block_bytes: int,
    numerics: str = "",
    states: BlockCopier | None = None,
) -> KvLayout:
    """Return a description of an engine's KV blocks and recurrent states: their layout, and the fingerprint by which
    engines recognize usable blocks.

    The fingerprint is empty if the weights have no hash, for example random weights. In that case, no other engine has
    equal blocks.

    Args:
        config: Configuration of the KV cache.
        computes: Properties on which the engine's tokens depend, as ``numerics_fingerprint.config_of`` returns them.
            The properties include hashes of weights, but no paths.
        order: Text that describes the order of the numbers in a block.
        num_shards: Number of workers that store a part of each block.
        block_bytes: Size of a block in bytes.
        numerics: Text that describes everything known that affects how keys and values are rounded, such as kernels.
        states: Copier of states, if the model has recurrent layers. The layout of states is part of the fingerprint.
    """
    groups = tuple(KvGroup(group.layer_names, group.sliding_window or 0) for group in config.groups)
    layout = KvLayout(
        dtype=computes.get("cache_dtype", computes.get("dtype", "")),
        block_size=config.block_size,
        groups=groups,
        order=order,
        num_shards=num_shards,
        numerics=" ".join([numerics, *(f"{key}={computes[key]}" for key in _NUMERICS if key in computes)]).strip(),
        states="" if states is None else states.order,
    )
    if _HASH.fullmatch(computes.get("weights", "")) is None:
        return layout
    values = {key: computes[key] for key in computes if key not in _OF_TOKENS_ALONE and key not in _NUMERICS}
    said = [
        layout.dtype,
        layout.block_size,
        [_said(group) for group in config.groups],
        order,
        num_shards,
        block_bytes,
        values,
    ]
    if states is not None:
        said.append([layout.states, states.block_bytes])
    digest = hashlib.blake2b(
        json.dumps(said, sort_keys=True).encode(), digest_size=FINGERPRINT_BYTES, person=_PERSON
    ).digest()
    return msgspec.structs.replace(layout, fingerprint=digest)


def _said(group: KVCacheGroup) -> list[object]:
    """Return the properties of a group that decide what its blocks contain."""
    limits = [group.first_block, group.end_block] if group.first_block or group.end_block is not None else []
    return [group.layer_names, group.sliding_window, group.attention_chunk, *limits]


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
    """Set up KV transfer, if it is enabled, and the metrics of all loads of KV blocks. Yield ``ready`` with the
    engine's KV transfer address added.

    ``observe`` is called with each finished transfer, on any thread. ``observer`` is called for each gRPC call from
    another engine. Raises ConfigError if the model has no KV cache, if the port is in use, or if TLS settings are
    invalid.
    """
    counts = TransferCounts()

    def count(transfer: Transfer) -> None:
        counts.ended(transfer)
        observe(transfer)

    if isinstance(engine.connector, TieredConnector):
        engine.connector.observe = count
        tiers, states = engine.connector.stats, engine.connector.state_stats
        registry.register(Readings(lambda: tier_families(tiers(), ready, states())))
        registry.register(Readings(lambda: transfer_families(counts, tiers(), ready, states())))
    if not config.kv_transfer.enabled:
        yield ready
        return
    if engine.model.pooling is not None:
        raise ConfigError(
            f"kv_transfer.transport is {config.kv_transfer.transport!r}, but pooling models have no KV cache; set "
            "it to 'off'"
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
    states = None if engine.kv_cache_config.states is None else engine.executor.state_copier()
    fingerprint = _fingerprint(engine, ready, copier, states)
    if not fingerprint:
        log.warning(
            "KV transfer is off: without a hash of the weights, engines cannot know whether their KV blocks are equal"
        )
        return ready
    transfer.start()
    ends.callback(transfer.stop)
    offers = Offers(
        settings,
        incarnation=ready.incarnation,
        block_bytes=copier.block_bytes,
        state_bytes=0 if states is None else states.block_bytes,
    )
    ends.callback(offers.close)
    kv_cache, wake = engine.scheduler.kv_cache, engine.queues.wake
    leases = _leases(settings, kv_cache)
    source = PullSource(
        leases,
        copier.read,
        wake,
        read_states=None if states is None else states.read,
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
        Readings(
            lambda: lease_families(leases, ready, num_pulls=transfer.num_pulls, num_slots_used=offers.num_slots_used)
        )
    )
    identity = _identity(ready, _address(config, transfer.port), fingerprint)
    engine.leases.begin(leases, kv_cache, identity, block_bytes=copier.block_bytes)
    if isinstance(engine.connector, TieredConnector):
        engine.connector.take_from(peers)
    return msgspec.structs.replace(
        ready,
        kv_address=identity.address,
        kv_fingerprint=fingerprint,
        capabilities=(*ready.capabilities, CAPABILITY),
    )


def _fingerprint(engine: EngineCore, ready: EngineReady, copier: BlockCopier, states: BlockCopier | None) -> bytes:
    """Return the fingerprint of the engine's blocks and states, or empty bytes if the weights have no hash."""
    layout = layout_of(
        engine.kv_cache_config,
        ready.config,
        order=copier.order,
        num_shards=engine.config.executor.num_workers,
        block_bytes=copier.block_bytes,
        numerics=copier.numerics,
        states=states,
    )
    return layout.fingerprint


def _leases(settings: KvTransferConfig, kv_cache: KVCacheManager) -> Leases:
    """Create the object that tracks leases. The settings limit the number of blocks and states in leases."""
    pool, states, fraction = kv_cache.pool, kv_cache.states, settings.max_leased_fraction
    max_blocks = int(fraction * pool.num_usable_blocks)
    if states is None:
        return Leases(pool.free, max_blocks, lease_seconds=settings.lease, max_seconds=settings.max_lease)
    return Leases(
        pool.free,
        max_blocks,
        lease_seconds=settings.lease,
        max_seconds=settings.max_lease,
        free_slot=states.free_leased,
        max_slots=max(int(fraction * states.config.num_kept), 1),
    )


def _identity(ready: EngineReady, address: str, fingerprint: bytes) -> KvSource:
    """Return the KvSource that identifies the engine, without the fields for one lease."""
    return KvSource(
        engine_id=ready.engine_id,
        incarnation=ready.incarnation,
        address=address,
        lease_id=b"",
        num_tokens=0,
        fingerprint=fingerprint,
    )


def _address(config: EngineCoreConfig, port: int) -> str:
    """Return the address at which other engines can fetch KV blocks from this engine."""
    if config.kv_transfer.advertise:
        return addresses.with_default_port(config.kv_transfer.advertise, port)
    if config.coordinator.advertise:
        host, _ = addresses.split(addresses.with_default_port(config.coordinator.advertise, port))
        return addresses.with_port(host, port)
    return addresses.with_port(socket.getfqdn(), port)
