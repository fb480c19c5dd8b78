"""Parser of ``penstock serve --set SERVICE.KEY=VALUE``, which sets service settings that have no flag."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import yaml

from penstock_common.config.loader import build, hint
from penstock_common.config.settings import ENV_PREFIX, removed, settings_of
from penstock_common.errors import ConfigError, nearest

FLAG = "--set"
_OWN = (
    "server.host",
    "server.port",
    "server.reuse_port",
    "coordinator.",
    "admin.",
    "http.host",
    "http.port",
    "http.reuse_port",
    "engine_id",
    "engines",
    "models",
)
"""Keys and key prefixes that the command sets itself, so that its processes can connect to each other."""
_OWN_OF_MODEL = ("model.path", "model.served_model_name", "frontend_id")
"""Keys that the command sets itself: the served model and the names of frontends."""


def parse_settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse texts such as ``engine.scheduler.policy=priority``. Values are YAML, and the service checks them.

    Raises:
        ConfigError: A text has another form, names an unknown service or key, or names a key that the command sets
            itself.
    """
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        service, _, key = name.partition(".")
        if not separator or not key:
            raise ConfigError(f"{FLAG} {text}: write SERVICE.KEY=VALUE, e.g. engine.scheduler.policy=priority")
        _check_key(text, service, key.replace("-", "_"))
        try:
            settings.setdefault(service, {})[key.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as e:
            raise ConfigError(f"{FLAG} {text}: the value cannot be read: {e}") from None
    return settings


_OTHERS = {
    "api_key": "auth.api_keys",
    "chat_template": "model.chat_template",
    "gpu_memory_utilization": "memory_utilization",
    "tool_call_parser": "tool_parser",
}
"""Map from setting names of other servers to the end of the equivalent key in Penstock."""


def named(name: str) -> list[str]:
    """Return the settings, as ``SERVICE.KEY``, whose key ends in ``name``.

    If ``name`` is a setting of another server, also return settings whose key ends in the equivalent name.
    """
    end = _OTHERS.get(name, name)
    return [
        f"{service}.{setting.key}"
        for service, struct in _structs().items()
        for setting in settings_of(struct)
        if f".{setting.key}".endswith(f".{end}") and not _is_own(setting.key)
    ]


def apply_settings(config: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Set each value at its dotted key in ``config``, and return ``config``."""
    for key, value in settings.items():
        *parents, last = key.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return config


def check_config(service: str, config: Mapping[str, Any]) -> None:
    """Check a service's configuration as the service does when it starts.

    Raises ConfigError that begins with ``service``.
    """
    try:
        build(_structs()[service], copy.deepcopy(dict(config)), strict=False)
    except ConfigError as e:
        raise ConfigError(f"{service}: {e}") from None


def check_parsers(frontend: Mapping[str, Any]) -> None:
    """Check the parser names in the frontend settings. Raises ConfigError for unknown names."""
    tool, reasoning = (str(frontend.get(f"model.{name}_parser", "none")) for name in ("tool", "reasoning"))
    if not {tool, reasoning} <= {"auto", "none"}:
        from penstock_frontend.app.assembly import (
            check_parsers as check,
        )  # imported here because it loads most of the frontend

        try:
            check(tool=tool, reasoning=reasoning)
        except ConfigError as e:
            raise ConfigError(f"frontend: {e}") from None


def of_environment(name: str) -> str:
    """Return the settings that an environment variable sets, as ``SERVICE.KEY``.

    Empty if the command sets that key itself, or if the variable is not a setting.
    """
    key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
    structs = _structs().items()
    if _is_own(key):
        return ""
    return " or ".join(f"{s}.{key}" for s, struct in structs if any(each.key == key for each in settings_of(struct)))


def _is_own(key: str) -> bool:
    return key in _OWN_OF_MODEL or any(key == own or (own.endswith(".") and key.startswith(own)) for own in _OWN)


def _check_key(text: str, service: str, key: str) -> None:
    structs = _structs()
    if service not in structs:
        raise ConfigError(
            f"{FLAG} {text}: no such service {service!r}; known: {', '.join(structs)}{nearest(service, structs)}"
        )
    keys = [setting.key for setting in settings_of(structs[service])]
    if key not in keys:
        meant = hint(key, keys, removed(structs[service]))
        raise ConfigError(f"{FLAG} {text}: {service} has no key {key!r}{meant}")
    if _is_own(key):
        raise ConfigError(f"{FLAG} {text}: penstock serve sets {service}.{key} itself; leave it out")


def _structs() -> dict[str, type[msgspec.Struct]]:
    from penstock_coordinator.config import CoordinatorConfig
    from penstock_enginecore.config import EngineCoreConfig
    from penstock_frontend.config import FrontendConfig

    return {"coordinator": CoordinatorConfig, "engine": EngineCoreConfig, "frontend": FrontendConfig}
