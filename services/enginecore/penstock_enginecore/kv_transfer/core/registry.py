"""Selection of an engine's connector by the configuration, including connectors of plugins."""

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
    """Arguments for creating a connector. ``KVConnector`` describes ``wake``. ``clock`` returns monotonic seconds."""

    config: EngineCoreConfig
    model: ModelInfo
    wake: Callable[[], None]
    clock: Callable[[], float]


ConnectorFactory = Callable[[ConnectorContext], PluggedConnector]

_KNOWN: dict[str, str] = {}


def register_kv_connector(name: str, target: str) -> None:
    """Register the class at ``target`` (``package.module:Class``) under ``name``. The setting ``kv_transfer.connector``
    can then use the name.
    """
    _KNOWN[name] = target


def create_connector(context: ConnectorContext) -> PluggedConnector:
    """Create the connector of the setting ``kv_transfer.connector``, which is a registered name or
    ``package.module:Class``.

    Raises ConfigError.
    """
    factory: ConnectorFactory = load_target("kv_transfer.connector", context.config.kv_transfer.connector, _KNOWN)
    return factory(context)


# Creation of the configured connector.


def make_connector(
    config: EngineCoreConfig, model: ModelInfo, wake: Callable[[], None], clock: Callable[[], float]
) -> TieredConnector | PluggedConnector | None:
    """Create the connector, or return None if the configuration enables no loads of blocks.

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


OpenStore = Callable[[EngineCoreConfig, ModelInfo, KVCacheConfig, BlockCopier], BlockStore]
"""Function that opens the disk tier in ``cache.disk``, once the KV cache is allocated. Raises ConfigError."""


def begin_connector(
    connector: TieredConnector | PluggedConnector,
    config: EngineCoreConfig,
    executor: Executor,
    model: ModelInfo,
    kv_cache: KVCacheConfig,
    open_store: OpenStore | None,
) -> None:
    """Start the connector. The KV cache must be allocated.

    Raises ConfigError if host memory is too small for a block, or if the disk cannot be used.
    """
    copier = executor.block_copier()
    if not isinstance(connector, TieredConnector):
        connector.begin(copier, kv_cache)
        return
    num_slots = config.cache.host_memory // copier.block_bytes
    if config.cache.host_memory and num_slots < 1:
        raise ConfigError(
            f"cache.host_memory is {config.cache.host_memory} bytes, but a KV block takes {copier.block_bytes} bytes; "
            "set cache.host_memory to at least the size of one block"
        )
    store = None
    if config.cache.disk:
        if open_store is None:
            raise ConfigError("cache.disk is set, but this engine was created without disk support")
        store = open_store(config, model, kv_cache, copier)
    connector.begin(copier, num_slots, store)
