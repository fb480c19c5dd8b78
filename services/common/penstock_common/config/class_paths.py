"""Classes that settings name."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock_common.errors import ConfigError, nearest

# Classes that settings name.

_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")
"""What the system's loader says of a library for which there is no memory."""


def load_target(field: str, name: str, known: Mapping[str, str], *, others: Sequence[str] = ()) -> Any:
    """What ``name``, the value of the setting ``field``, means: one of ``known``, whose values are written
    ``package.module:Class``, or such a text itself. ``others``: names that the setting takes, too, for the error.

    Raises ConfigError.
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
                f"not enough memory to load {field} {name!r}: {e!r}; give the process more than its limit "
                "now allows (the container's memory limit, or ulimit -v)"
            ) from e
        raise ConfigError(f"{field} is {name!r}, which cannot be loaded: {e}") from e
