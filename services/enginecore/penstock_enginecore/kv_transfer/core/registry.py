"""Which connector brings blocks to an engine, by its configuration and among those that plugins add."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock_common.config.class_paths import load_target
from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.kv_transfer.core.base import BlockCopier, PluggedConnector
from penstock_enginecore.kv_transfer.core.host_disk_tiers import BlockStore
from penstock_enginecore.kv_transfer.core.tiers import TieredConnector


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is made of. ``wake``: see ``KVConnector``; ``clock``: monotonic seconds."""

    config: EngineCoreConfig
    model: ModelInfo
    wake: Callable[[], None]
    clock: Callable[[], float]


ConnectorFactory = Callable[[ConnectorContext], PluggedConnector]

_KNOWN: dict[str, str] = {}


def register_kv_connector(name: str, target: str) -> None:
    """Make ``kv_transfer.connector: name`` mean the class at ``target``, written ``package.module:Class``."""
    _KNOWN[name] = target


def create_connector(context: ConnectorContext) -> PluggedConnector:
    """The connector that ``kv_transfer.connector`` names: a registered name, or ``package.module:Class``.

    Raises ConfigError.
    """
    factory: ConnectorFactory = load_target("kv_transfer.connector", context.config.kv_transfer.connector, _KNOWN)
    return factory(context)


# What brings blocks to an engine, by its configuration.


def make_connector(
    config: EngineCoreConfig, model: ModelInfo, wake: Callable[[], None], clock: Callable[[], float]
) -> TieredConnector | PluggedConnector | None:
    """None where nothing is configured that brings blocks. Raises ConfigError for a model that keeps none, and for a connector
    that cannot be had.
    """
    if name := config.kv_transfer.connector:
        if model.pooling is not None:
            raise ConfigError(f"kv_transfer.connector is {name!r} and the model pools: it keeps no keys and values")
        return create_connector(ConnectorContext(config, model, wake, clock))
    if not config.cache.host_memory and not config.kv_transfer.enabled:
        return None
    if config.cache.host_memory and model.pooling is not None:
        raise ConfigError("cache.host_memory is set and the model pools; only models that generate keep KV blocks")
    return TieredConnector(wake, clock)


OpenStore = Callable[[EngineCoreConfig, ModelInfo, KVCacheConfig, BlockCopier], BlockStore]
"""Opens the disk that ``cache.disk`` names, for an engine whose KV cache is there. Raises ConfigError."""


def begin_connector(
    connector: TieredConnector | PluggedConnector,
    config: EngineCoreConfig,
    executor: Executor,
    model: ModelInfo,
    kv_cache: KVCacheConfig,
    open_store: OpenStore | None,
) -> None:
    """The KV cache is there. Raises ConfigError for memory that no block fits in, and for a disk that cannot be had."""
    copier = executor.block_copier()
    if not isinstance(connector, TieredConnector):
        connector.begin(copier, kv_cache)
        return
    num_slots = config.cache.host_memory // copier.block_bytes
    if config.cache.host_memory and num_slots < 1:
        raise ConfigError(
            f"cache.host_memory is {config.cache.host_memory} bytes and a KV block takes {copier.block_bytes}; it must hold one "
            "at least"
        )
    store = None
    if config.cache.disk:
        if open_store is None:
            raise ConfigError("cache.disk is set, and nothing here opens disks")
        store = open_store(config, model, kv_cache, copier)
    connector.begin(copier, num_slots, store)
