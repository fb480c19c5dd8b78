"""Configuration loader. Fills one frozen struct per service from a YAML file, the environment and command-line flags."""

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import yaml

from penstock_common.config.setting_dependencies import check_needs
from penstock_common.config.settings import (
    ENV_PREFIX,
    Section,
    Setting,
    kind_of,
    parse_bytes,
    removed,
    removed_here,
    sections_of,
    settings_of,
    struct_in,
    struct_in_list,
    with_defaults,
)
from penstock_common.errors import ConfigError, nearest, wrong_type

T = TypeVar("T", bound=msgspec.Struct)


def load(
    config_type: type[T],
    *,
    file: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Build ``config_type`` from ``file``, the environment and ``overrides``, where later sources win. Raises
    ConfigError.

    The keys of ``overrides`` are dotted.
    """
    values: dict[str, Any] = _read_yaml(Path(file)) if file else {}
    leaves, gone = {setting.key for setting in settings_of(config_type)}, removed(config_type)
    env = os.environ if environ is None else environ
    for name, text in env.items():
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            if key in leaves:
                _set(values, key, text)
            elif "." in key:
                raise ConfigError(f"environment variable {name}: there is no setting {key!r}{hint(key, leaves, gone)}")
    for key, text in (overrides or {}).items():
        if key not in leaves:
            raise ConfigError(f"there is no setting {key!r}{hint(key, leaves, gone)}")
        _set(values, key, text)
    return build(config_type, values, strict=False)


def build(config_type: type[T], values: dict[str, Any], *, strict: bool = True) -> T:
    """Build ``config_type`` from nested ``values``. Raises ConfigError if a value is not valid or a setting is unknown.

    If ``strict`` is false, numbers and booleans may be given as text.
    """
    _refuse_unknown(config_type, values, "")
    _parse_sizes(config_type, values, "")
    try:
        config = msgspec.convert(with_defaults(config_type, values), config_type, strict=strict)
    except msgspec.ValidationError as e:
        if isinstance(e.__cause__, ConfigError):
            raise e.__cause__ from None
        raise ConfigError(_outside(config_type, values) or _with_field_first(str(e), values)) from None
    check_needs(config)
    return config


def hint(key: str, known: Iterable[str], gone: Mapping[str, str]) -> str:
    """Return the hint that errors append to an unknown key.

    The hint is the text in ``gone`` if the setting was removed, else the most similar known key.
    """
    return f": it was removed; {gone[key]}" if key in gone else nearest(key, known)


def dump(config: msgspec.Struct) -> str:
    """Return YAML from which ``load`` builds an equal config."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"config file {path} cannot be read: {e.strerror or e}") from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as e:  # ValueError: invalid UTF-8, or a date that does not exist.
        raise ConfigError(f"config file {path} is not valid YAML: {e}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path} must contain a mapping, not a {type(data).__name__}")
    return data


def _set(values: dict[str, Any], key: str, text: str) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        below = values.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{parent} must be a mapping, not {below!r}")
        values = below
    values[last] = _parse_text(text)


def _parse_text(text: str) -> Any:
    """Convert the text of a flag or environment variable. Lists and null are parsed as YAML. Other values stay text,
    which msgspec converts.
    """
    stripped = text.strip()
    if stripped.startswith(("[", "{")) or stripped in ("null", "~"):
        try:
            return yaml.safe_load(stripped)
        except yaml.YAMLError:
            return text
    return text


def _refuse_unknown(config_type: type[msgspec.Struct], values: Mapping[str, Any], prefix: str) -> None:
    known = {field.name: field for field in msgspec.structs.fields(config_type)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"there is no setting '{prefix}{key}'{hint(str(key), known, removed_here(config_type))}")
        nested = struct_in(known[key].type)
        if nested is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"'{prefix}{key}' must be a mapping, not {value!r}")
            _refuse_unknown(nested, value, f"{prefix}{key}.")
        elif (listed := struct_in_list(known[key].type)) is not None and isinstance(value, list):
            for place, entry in enumerate(value):
                if not isinstance(entry, dict):
                    raise ConfigError(f"'{prefix}{key}[{place}]' must be a mapping, not {entry!r}")
                _refuse_unknown(listed, entry, f"{prefix}{key}[{place}].")


def _parse_sizes(config_type: type[msgspec.Struct], values: dict[str, Any], prefix: str) -> None:
    for field in msgspec.structs.fields(config_type):
        if field.name not in values or values[field.name] is None:
            continue
        nested = struct_in(field.type)
        if nested is not None:
            _parse_sizes(nested, values[field.name], f"{prefix}{field.name}.")
        elif (listed := struct_in_list(field.type)) is not None and isinstance(values[field.name], list):
            for place, entry in enumerate(values[field.name]):
                _parse_sizes(listed, entry, f"{prefix}{field.name}[{place}].")
        elif kind_of(field.type).is_size:
            values[field.name] = parse_bytes(values[field.name], key=prefix + field.name)


def _outside(config_type: type[msgspec.Struct], values: Mapping[str, Any]) -> str:
    """Return the error for the first value outside its setting's range or choices, or an empty string."""
    for setting in settings_of(config_type):
        value = _value_at(values, setting.key)
        if refusal := setting.kind.refusal(setting.key, value):
            return refusal
    return ""


def _value_at(values: Mapping[str, Any], key: str) -> Any:
    value: Any = values
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _with_field_first(message: str, values: Mapping[str, Any]) -> str:
    """Turn msgspec's "Expected `int`, got `str` - at `$.a.b`" into "a.b is 'x'; it must be an integer"."""
    match = re.fullmatch(r"(.*) - at `\$\.(.*)`", message, flags=re.DOTALL)
    if match is None:
        missing = re.fullmatch(r"Object missing required field `(.*)`", message)
        return f"{missing[1]} is required" if missing else message
    missing = re.fullmatch(r"Object missing required field `(.*)`", match[1])
    if missing:
        return f"{match[2]}.{missing[1]} is required"
    value = f"{match[2]} is {_value_at(values, match[2])!r}"
    if (wrong := wrong_type(match[1])) is not None:
        return f"{value}; it must be {wrong.wanted}"
    return f"{value}: {match[1][0].lower()}{match[1][1:]}"


# Command line of a service: ``--config FILE`` and a flag for each setting. The help texts come from the structs.


class ConfigSource(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Sources of a service's configuration in addition to the environment: an optional file, and flags by dotted key."""

    config_type: type[T]
    file: str
    flags: Mapping[str, str]

    def load(self) -> T:
        """Read the file and the environment now, and return the configuration. Raises ConfigError if the file cannot be
        read or a setting is not valid.
        """
        return load(self.config_type, file=self.file, overrides=self.flags)


def from_command_line(
    config_type: type[T], *, prog: str, description: str, argv: Sequence[str] | None = None
) -> ConfigSource[T]:
    """Parse ``--config FILE`` and one flag per setting. Exits on ``--help`` and malformed flags."""
    args = vars(parser_of(config_type, prog=prog, description=description).parse_args(argv))
    file = args.pop("config") or ""
    return ConfigSource(config_type=config_type, file=file, flags={k: v for k, v in args.items() if v is not None})


def parser_of(config_type: type[msgspec.Struct], *, prog: str, description: str) -> argparse.ArgumentParser:
    """Return the parser. Its help lists the settings by section with range, default and environment variable."""
    parser = argparse.ArgumentParser(
        prog=prog, usage=f"{prog} [--config FILE] [--SETTING VALUE ...]", description=description, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with the settings below as nested keys")
    for section in sections_of(config_type):
        _add_section(parser, section)
    # Accept the flag of a removed setting here, so that a later check refuses the setting and names its replacement.
    for key in removed(config_type):
        parser.add_argument(f"--{key.replace('_', '-')}", dest=key, default=None, help=argparse.SUPPRESS)
    return parser


def _add_section(parser: argparse.ArgumentParser, section: Section) -> None:
    group = parser.add_argument_group(section.key or "settings", section.description.replace("``", ""))
    for setting in section.settings:
        group.add_argument(
            setting.flag, dest=setting.key, metavar=setting.value, default=None, help=_help(setting).replace("%", "%%")
        )


def _help(setting: Setting) -> str:
    default = setting.default_text if setting.required else f"default: {setting.default_text}"
    facts = (setting.kind.range, default, setting.variable)
    return f"{setting.kind.description} ({'; '.join(filter(None, facts))})"
