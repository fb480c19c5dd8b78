"""Creation of an engine's KV connector according to the configuration, including connectors of plugins."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from penstock_common.config.class_paths import load_target
from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig, EngineCoreConfig
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.kv_transfer.core.base import BlockCopier, PluggedConnector
from penstock_enginecore.kv_transfer.core.host_disk_tiers import BlockStore
from penstock_enginecore.kv_transfer.core.size_class import TierPlan
from penstock_enginecore.kv_transfer.core.tiers import TieredConnector
from penstock_enginecore.states.core.sizing import tier_share_of_states


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """Arguments for creating a connector. The docstring of ``KVConnector`` describes ``wake``. ``clock`` returns
    monotonic seconds.
    """

    config: EngineCoreConfig
    model: ModelInfo
    wake: Callable[[], None]
    clock: Callable[[], float]


ConnectorFactory = Callable[[ConnectorContext], PluggedConnector]

_KNOWN: dict[str, str] = {}


def register_kv_connector(name: str, target: str) -> None:
    """Register the connector class at ``target`` (``package.module:Class``) under ``name``. The setting
    ``kv_transfer.connector`` then accepts this name.
    """
    _KNOWN[name] = target


def create_connector(context: ConnectorContext) -> PluggedConnector:
    """Create the connector of the setting ``kv_transfer.connector``, which is a registered name or
    ``package.module:Class``.

    Raises ConfigError if the name is unknown or the class cannot be imported.
    """
    factory: ConnectorFactory = load_target("kv_transfer.connector", context.config.kv_transfer.connector, _KNOWN)
    return factory(context)


# Creation of the configured connector.


def make_connector(
    config: EngineCoreConfig, model: ModelInfo, wake: Callable[[], None], clock: Callable[[], float]
) -> TieredConnector | PluggedConnector | None:
    """Create the connector, or return None if the configuration enables no loads of KV blocks.

    Raises ConfigError if the model has no KV cache, or if the connector cannot be created.
    """
    if name := config.kv_transfer.connector:
        if model.pooling is not None:
            raise ConfigError(f"kv_transfer.connector is {name!r}, but pooling models have no KV cache; set it to ''")
        return create_connector(ConnectorContext(config, model, wake, clock))
    if not config.cache.host_memory and not config.kv_transfer.enabled:
        return None
    if config.cache.host_memory and model.pooling is not None:
        raise ConfigError("cache.host_memory is set, but pooling models have no KV cache; set it to 0")
    return TieredConnector(wake, clock)


@dataclass(frozen=True, slots=True)
class Copiers:
    """Copiers of an engine: one for KV blocks, and one for recurrent states if the model has recurrent layers."""

    blocks: BlockCopier
    states: BlockCopier | None = None


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Plan for a file of a disk tier in the directory ``cache.disk``.

    Attributes:
        copiers: Copiers of the engine for KV blocks and states.
        size: Size of the file in bytes.
        of_states: Whether the file has states of recurrent layers instead of KV blocks.
    """

    copiers: Copiers
    size: int
    of_states: bool


OpenStore = Callable[[EngineCoreConfig, ModelInfo, KVCacheConfig, StorePlan], BlockStore]
"""Function that opens a file of the disk tier. The KV cache must be allocated. Raises ConfigError if the directory
cannot be written or another engine uses the directory.
"""


def begin_connector(
    connector: TieredConnector | PluggedConnector,
    config: EngineCoreConfig,
    executor: Executor,
    model: ModelInfo,
    kv_cache: KVCacheConfig,
    open_store: OpenStore | None,
) -> None:
    """Start the connector. The KV cache must be allocated.

    If the model has recurrent layers, host memory and disk space are divided between KV blocks and states. Raises
    ConfigError if the host memory tier is too small for a block or a state, or if the disk cannot be used.
    """
    if not isinstance(connector, TieredConnector):
        connector.begin(executor.block_copier(), kv_cache)
        return
    if config.cache.disk and open_store is None:
        raise ConfigError("cache.disk is set, but this engine was created without disk support")
    copiers = Copiers(executor.block_copier(), None if kv_cache.states is None else executor.state_copier())
    share = _share_of_states(config.cache, kv_cache, copiers)

    def tiers(copier: BlockCopier, part: Fraction, *, of_states: bool) -> TierPlan:
        if not copier.block_bytes:  # A model without attention has blocks without memory, which are never copied.
            return TierPlan(copier, 0)
        num_slots = int(config.cache.host_memory * part) // copier.block_bytes
        if config.cache.host_memory and num_slots < 1:
            raise _too_small(config.cache, copiers, share)
        if not config.cache.disk or open_store is None:
            return TierPlan(copier, num_slots)
        plan = StorePlan(copiers, int(config.cache.disk_size * part), of_states)
        return TierPlan(copier, num_slots, open_store(config, model, kv_cache, plan))

    blocks = tiers(copiers.blocks, 1 - share, of_states=False)
    connector.begin(blocks, None if copiers.states is None else tiers(copiers.states, share, of_states=True))


def _share_of_states(cache: CacheConfig, kv_cache: KVCacheConfig, copiers: Copiers) -> Fraction:
    if kv_cache.states is None or copiers.states is None:
        return Fraction(0)
    return tier_share_of_states(
        cache,
        slot_bytes=copiers.states.block_bytes,
        token_bytes=copiers.blocks.block_bytes * len(kv_cache.groups) // kv_cache.block_size,
        interval=kv_cache.states.interval,
    )


def _too_small(cache: CacheConfig, copiers: Copiers, share: Fraction) -> ConfigError:
    """Return the error for a ``cache.host_memory`` that is too small for one block, or for one state."""
    blocks, states = copiers.blocks, copiers.states
    if states is None:
        return ConfigError(
            f"cache.host_memory is {cache.host_memory} bytes, but a KV block takes {blocks.block_bytes} bytes; "
            "set cache.host_memory to at least the size of one block"
        )
    least = max(
        math.ceil(copier.block_bytes / part)
        for copier, part in ((blocks, 1 - share), (states, share))
        if copier.block_bytes
    )
    return ConfigError(
        f"cache.host_memory is {cache.host_memory} bytes, but a state of the recurrent layers takes "
        f"{states.block_bytes} bytes and a KV block {blocks.block_bytes} bytes; set cache.host_memory to at least "
        f"{least} bytes"
    )
