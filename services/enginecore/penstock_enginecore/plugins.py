"""Plugins: installed packages that add to an engine before it starts.

A plugin is a function of no arguments, named by an entry point of the group ``penstock.plugins``. It calls what it is here
for: ``register_scheduler``, ``register_executor``, ``register_backend`` (attention), ``register_kv_connector``,
``register_utility``. With several plugins the order is that of their names.
"""

from collections.abc import Sequence
from importlib.metadata import entry_points

from penstock_common.errors import ConfigError, nearest
from penstock_common.observability.logging import get_logger

GROUP = "penstock.plugins"
log = get_logger()


def load_plugins(wanted: Sequence[str] | None) -> list[str]:
    """Call the plugins of these names, or all that are installed for None. Returns the names called.

    Raises ConfigError for a name that is not installed, and for a plugin that cannot be loaded.
    """
    installed = {point.name: point for point in entry_points(group=GROUP)}
    names = sorted(installed) if wanted is None else list(wanted)
    for name in names:
        if name not in installed:
            known = ", ".join(sorted(installed)) or "none"
            raise ConfigError(f"plugins: {name!r} is not installed; installed: {known}{nearest(name, installed)}")
        try:
            installed[name].load()()
        except Exception as e:  # a plugin may raise anything
            raise ConfigError(f"plugins: {name!r} ({installed[name].value}) failed: {type(e).__name__}: {e}") from e
        log.info("plugin loaded", plugin=name, target=installed[name].value)
    return names
