"""Settings that have an effect only together with another setting.

Each service has a table of such settings. The table is checked when the service loads its settings.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock_common.config.settings import Setting, settings_of
from penstock_common.errors import ConfigError


class When(msgspec.Struct, frozen=True, kw_only=True):
    """A condition on the value of one setting.

    Args:
        setting: Dotted key of the setting.
        values: Values that meet the condition. If empty, all values except ``off`` meet the condition.
        off: Values that do not meet the condition.
    """

    setting: str
    values: tuple[Any, ...] = ()
    off: tuple[Any, ...] = (None, "", 0, False)

    def holds(self, value: Any) -> bool:
        """Return whether ``value`` of the setting meets the condition. Empty lists and mappings do not meet the
        condition.
        """
        if self.values:
            return value in self.values
        return value not in self.off and value != () and value != {}

    @property
    def words(self) -> str:
        """Return the condition as text after "needs", for example ``data_parallel.size to be above 1``."""
        if self.values:
            return f"{self.setting} to be {' or '.join(map(str, self.values))}"
        if self.off == ABOVE_ONE:
            return f"{self.setting} to be above 1"
        if self.off == A_PORT:
            return f"{self.setting} to be a port number (not -1)"
        return self.setting


ABOVE_ONE = (1,)
"""Values for ``When.off`` if a setting is a number of parts, such as ranks. One part means that nothing is split."""
A_PORT = (-1,)
"""Values for ``When.off`` if a setting is a port number."""


class Need(msgspec.Struct, frozen=True):
    """Settings that have an effect only if at least one condition is met.

    Args:
        settings: Dotted keys. A key that ends in ``.`` stands for all settings of that section.
        any_of: Conditions.
    """

    settings: tuple[str, ...]
    any_of: tuple[When, ...]

    def names(self, key: str) -> bool:
        """Return whether this need applies to ``key``. The setting that turns a section on is excluded, because the
        other settings of the section need that setting.
        """
        if any(when.setting == key for when in self.any_of):
            return False
        return any(key.startswith(name) if name.endswith(".") else key == name for name in self.settings)

    @property
    def words(self) -> str:
        """Return the conditions as text after "needs"."""
        return ", or ".join(condition.words for condition in self.any_of)


Needs = tuple[Need, ...]


def on(setting: str) -> When:
    """Return the condition that ``setting`` is not empty, not 0 and not false."""
    return When(setting=setting)


def needs_of(config_type: type[msgspec.Struct]) -> Mapping[str, tuple[Need, ...]]:
    """Return the needs of each setting of a service, by key.

    The class variable ``NEEDS`` of the service's struct defines the needs.
    """
    table: Needs = getattr(config_type, "NEEDS", ())
    return {
        setting.key: found
        for setting in settings_of(config_type)
        if (found := tuple(need for need in table if need.names(setting.key)))
    }


def check_needs(config: msgspec.Struct) -> None:
    """Raise ConfigError if a setting differs from its default but has no effect, given the other settings."""
    config_type = type(config)
    values = {setting.key: _value(config, setting.key) for setting in settings_of(config_type)}
    for refusal in unmet_needs(config_type, values):
        raise ConfigError(refusal)


def unmet_needs(config_type: type[msgspec.Struct], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each unmet need. ``values`` has all settings of a service by key."""
    needs = needs_of(config_type)
    for setting in settings_of(config_type):
        value = values[setting.key]
        if value == setting.default:
            continue
        for need in needs.get(setting.key, ()):
            if not any(when.holds(values[when.setting]) for when in need.any_of):
                yield (
                    f"{setting.key} is {_shown(setting, value)}, which has no effect: it needs {need.words}; set that as "
                    f"well, or leave {setting.key} out"
                )


def _shown(setting: Setting, value: Any) -> str:
    return msgspec.structs.replace(setting, default=value).default_text or '""'


def _value(config: msgspec.Struct, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


# Needs of settings that several services share.

OF_ALL: Needs = (
    Need(("metrics.host", "metrics.allowed_hosts", "metrics.tls."), (When(setting="metrics.port", off=A_PORT),)),
    Need(("tracing.sample_ratio", "tracing.service_name"), (on("tracing.endpoint"),)),
    Need(("log.prompts",), (on("log.requests"),)),
)
"""Needs that apply to every service."""
