"""Utilities that plugins add to those of the engine and of its workers."""

from collections.abc import Callable
from typing import Any, Literal

from penstock_enginecore.core.utility import UtilityRegistry

Where = Literal["engine", "worker"]

_ADDED: dict[Where, dict[str, Callable[..., Any]]] = {"engine": {}, "worker": {}}


def register_utility(name: str, function: Callable[..., Any], *, where: Where = "engine") -> None:
    """Let ``function(owner, ...)`` be called as ``name``, in engines that are built from now on.

    Every parameter but the first must have a type: arguments are converted to it. ``owner`` is the EngineControl or the Worker.
    The result must have a form in msgpack. Raises ValueError for a name that a plugin has registered already.
    """
    if name in _ADDED[where]:
        raise ValueError(f"{where} utility {name!r} is registered already")
    _ADDED[where][name] = function


def extend(registry: UtilityRegistry, where: Where) -> UtilityRegistry:
    """Add what plugins registered. Raises ValueError when a name is in use, or a parameter has no type."""
    for name, function in _ADDED[where].items():
        registry.register(name, function)
    return registry
