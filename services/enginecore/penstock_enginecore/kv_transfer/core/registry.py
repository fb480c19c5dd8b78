"""The connectors that plugins add, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock_common.config.targets import load_target
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.kv_transfer.core.base import PluggedConnector


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
