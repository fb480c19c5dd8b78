"""Speed of an engine without a model, read from the environment, because the config file has no key for it."""

from collections.abc import Mapping

import msgspec

from penstock_common.errors import ConfigError

PREFIX = "ORACLE_"


class Pace(msgspec.Struct, frozen=True):
    """Speed: ``step_seconds`` is the duration of every step, ``load_seconds`` that of loading the model."""

    step_seconds: float = 0.02
    load_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= (value := getattr(self, name)) <= 3600:
                raise ConfigError(f"{variable(name)} is {value}; it must be 0 to 3600 seconds")


def variable(field: str) -> str:
    """Return the environment variable of a field."""
    return PREFIX + field.upper()


def pace_from(environ: Mapping[str, str]) -> Pace:
    """Read ``ORACLE_STEP_SECONDS`` and ``ORACLE_LOAD_SECONDS``. Raises ConfigError for invalid numbers and unknown
    names.
    """
    fields = {variable(name): name for name in Pace.__struct_fields__}
    given = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    values = {}
    for name, value in given.items():
        if name not in fields:
            raise ConfigError(f"{name} is no variable of the oracle engine; there are {', '.join(fields)}")
        try:
            values[fields[name]] = float(value)
        except ValueError:
            raise ConfigError(f"{name} is {value!r}; it must be a number of seconds") from None
    return Pace(**values)
