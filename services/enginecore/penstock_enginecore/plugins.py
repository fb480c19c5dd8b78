"""Plugins: installed packages that extend an engine before it starts.

A plugin is a function without arguments, which an entry point of the group ``penstock.plugins`` names. The function
calls registration functions: ``register_scheduler``, ``register_executor``, ``register_backend`` (attention),
``register_kv_connector``, ``register_utility``. Plugins are called in the order of their names.
"""

from collections.abc import Sequence
from importlib.metadata import entry_points

from penstock_common.errors import ConfigError, nearest
from penstock_common.observability.logging import get_logger

GROUP = "penstock.plugins"
log = get_logger()


def load_plugins(wanted: Sequence[str] | None) -> list[str]:
    """Call the plugins with these names, or all installed plugins if ``names`` is None. Return the names of the called
    plugins. Raises ConfigError if a plugin is not installed, or if a plugin raises an error.
    """
    installed = {point.name: point for point in entry_points(group=GROUP)}
    names = sorted(installed) if wanted is None else list(wanted)
    for name in names:
        if name not in installed:
            known = ", ".join(sorted(installed)) or "none"
            raise ConfigError(f"plugins: {name!r} is not installed; installed: {known}{nearest(name, installed)}")
        try:
            installed[name].load()()
        except Exception as e:  # A plugin may raise any exception.
            raise ConfigError(f"plugins: {name!r} ({installed[name].value}) failed: {type(e).__name__}: {e}") from e
        log.info("plugin loaded", plugin=name, target=installed[name].value)
    return names
