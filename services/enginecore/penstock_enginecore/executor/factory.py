"""Executors by name."""

import importlib
from collections.abc import Callable

from penstock_common.errors import ConfigError, nearest
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Executor

_KNOWN: dict[str, str] = {
    "uniproc": "penstock_enginecore.executor.uniproc:UniprocExecutor",
    "multiproc": "penstock_enginecore.executor.multiproc.executor:MultiprocExecutor",
}


def register_executor(name: str, target: str) -> None:
    """Make ``executor.kind: name`` mean the class at ``target``, written ``package.module:Class``."""
    _KNOWN[name] = target


def make_executor(config: EngineCoreConfig) -> Executor:
    """The executor that ``executor.kind`` names: a registered name, or ``package.module:Class``. Raises ConfigError."""
    kind = config.executor.resolved_kind
    target = kind if ":" in kind else _KNOWN.get(kind)
    if target is None:
        known = ["auto", *_KNOWN]
        raise ConfigError(f"executor.kind is {kind!r}; known: {', '.join(known)}{nearest(kind, known)}")
    module_name, _, class_name = target.partition(":")
    try:
        factory: Callable[[EngineCoreConfig], Executor] = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"executor.kind is {kind!r}, which cannot be loaded: {e}") from e
    return factory(config)
