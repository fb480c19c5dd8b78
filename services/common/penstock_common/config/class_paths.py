"""Import of classes by the names in settings."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock_common.errors import ConfigError, nearest

_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")
"""Error texts of the dynamic loader when the process has too little memory for a library."""


def load_target(field: str, name: str, known: Mapping[str, str], *, others: Sequence[str] = ()) -> Any:
    """Import and return the object that a setting names. Raises ConfigError if the name is unknown or the object cannot
    be imported.

    Args:
        field: Name of the setting.
        name: Value of the setting: a key of ``known``, or ``package.module:Class``.
        known: Short names and their ``package.module:Class``.
        others: Other valid values of the setting, for the error message.
    """
    target = name if ":" in name else known.get(name)
    if target is None:
        names = [*others, *known]
        raise ConfigError(f"{field} is {name!r}; known: {', '.join(names) or 'none'}{nearest(name, names)}")
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, MemoryError) as e:
        if isinstance(e, MemoryError) or any(words in str(e) for words in _NO_MEMORY):
            raise ConfigError(
                f"not enough memory to load {field} {name!r}: {e!r}; raise the memory limit of the process "
                "(the container's memory limit, or ulimit -v)"
            ) from e
        raise ConfigError(f"{field} is {name!r}, which cannot be loaded: {e}") from e
