"""Classes that settings name."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock_common.errors import ConfigError, nearest


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
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"{field} is {name!r}, which cannot be loaded: {e}") from e
