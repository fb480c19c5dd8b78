"""The connectors that plugins add, by name."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from penstock_common.errors import ConfigError, nearest
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.kv_transfer.base import PluggedConnector
from penstock_enginecore.core.model_info import ModelInfo


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
    name = context.config.kv_transfer.connector
    target = name if ":" in name else _KNOWN.get(name)
    if target is None:
        known = ", ".join(_KNOWN) or "none"
        raise ConfigError(f"kv_transfer.connector is {name!r}; known: {known}{nearest(name, _KNOWN)}")
    module_name, _, class_name = target.partition(":")
    try:
        factory: ConnectorFactory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"kv_transfer.connector is {name!r}, which cannot be loaded: {e}") from e
    return factory(context)
