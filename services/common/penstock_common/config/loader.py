"""Typed configuration: one frozen struct per service, filled from a YAML file, the environment and flags.

Later sources win: file, then environment, then flags. Names derive from the struct: ``scheduler.max_num_seqs`` is the
key ``max_num_seqs`` under ``scheduler`` in the file, ``PENSTOCK_SCHEDULER__MAX_NUM_SEQS`` in the environment and
``--scheduler.max-num-seqs`` on the command line. Unknown keys are errors that name the nearest known one.
"""

import argparse
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import yaml

from penstock_common.config.checks import (
    ByteSize,
    parse_bytes,
)
from penstock_common.errors import ConfigError, nearest

T = TypeVar("T", bound=msgspec.Struct)

ENV_PREFIX = "PENSTOCK_"


def load(
    config_type: type[T],
    *,
    file: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Build ``config_type`` from ``file``, the environment, then ``overrides`` (dotted keys). Raises ConfigError."""
    values: dict[str, Any] = _read_yaml(Path(file)) if file else {}
    leaves, gone = dict(fields(config_type)), removed(config_type)
    env = os.environ if environ is None else environ
    for name, text in env.items():
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            if key in leaves:
                _set(values, key, text)
            elif "." in key:
                raise ConfigError(f"environment variable {name}: no such key {key!r}{hint(key, leaves, gone)}")
    for key, text in (overrides or {}).items():
        if key not in leaves:
            raise ConfigError(f"no such key {key!r}{hint(key, leaves, gone)}")
        _set(values, key, text)
    _refuse_unknown(config_type, values, "")
    _parse_sizes(config_type, values, "")
    try:
        return msgspec.convert(values, config_type, strict=False)
    except ConfigError:
        raise
    except msgspec.ValidationError as e:
        if isinstance(e.__cause__, ConfigError):
            raise e.__cause__ from None
        raise ConfigError(_with_field_first(str(e), values)) from None


def from_command_line(config_type: type[T], *, prog: str, description: str, argv: Sequence[str] | None = None) -> T:
    """Parse ``--config FILE`` and one flag per field. Raises ConfigError; exits on ``--help`` and malformed flags."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file with the values below as nested keys")
    for key, leaf in fields(config_type):
        parser.add_argument(
            f"--{key.replace('_', '-')}", dest=key, metavar=_metavar(leaf.type), default=None, help=_default_text(leaf)
        )
    for key in removed(config_type):  # so that it is refused as a key, with what is there instead
        parser.add_argument(f"--{key.replace('_', '-')}", dest=key, default=None, help=argparse.SUPPRESS)
    args = vars(parser.parse_args(argv))
    file = args.pop("config")
    return load(config_type, file=file, overrides={k: v for k, v in args.items() if v is not None})


def fields(config_type: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """Every leaf of a config struct with its dotted key."""
    for field in msgspec.structs.fields(config_type):
        if (nested := _struct_in(field.type)) is not None:
            yield from fields(nested, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def removed(config_type: type[msgspec.Struct], prefix: str = "") -> dict[str, str]:
    """Dotted keys that there once were, each with what is there instead: those in the class variables ``REMOVED`` of structs."""
    found = {prefix + key: instead for key, instead in _removed_here(config_type).items()}
    for field in msgspec.structs.fields(config_type):
        if (nested := _struct_in(field.type)) is not None:
            found |= removed(nested, f"{prefix}{field.name}.")
    return found


def hint(key: str, known: Iterable[str], gone: Mapping[str, str]) -> str:
    """What to say behind a key that there is not: what it was ``removed`` for, else the nearest that is ``known``."""
    return f": it was removed; {gone[key]}" if key in gone else nearest(key, known)


def _removed_here(config_type: type[msgspec.Struct]) -> Mapping[str, str]:
    found: Mapping[str, str] = getattr(config_type, "REMOVED", {})
    return found


def dump(config: msgspec.Struct) -> str:
    """The YAML that ``load`` reads back to an equal config."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"config file {path}: {e.strerror or e}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"config file {path} is not valid YAML: {e}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path} must hold a mapping, not a {type(data).__name__}")
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
    """Flags and environment variables are text: read lists and null as YAML would, leave the rest to msgspec."""
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
            raise ConfigError(f"unknown key '{prefix}{key}'{hint(str(key), known, _removed_here(config_type))}")
        nested = _struct_in(known[key].type)
        if nested is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"'{prefix}{key}' must be a mapping, not {value!r}")
            _refuse_unknown(nested, value, f"{prefix}{key}.")


def _parse_sizes(config_type: type[msgspec.Struct], values: dict[str, Any], prefix: str) -> None:
    for field in msgspec.structs.fields(config_type):
        if field.name not in values or values[field.name] is None:
            continue
        nested = _struct_in(field.type)
        if nested is not None:
            _parse_sizes(nested, values[field.name], f"{prefix}{field.name}.")
        elif _is_bytes(field.type):
            values[field.name] = parse_bytes(values[field.name], key=prefix + field.name)


def _with_field_first(message: str, values: Mapping[str, Any]) -> str:
    """Turn msgspec's "Expected `int`, got `str` - at `$.a.b`" into "a.b is 'x': expected `int`, got `str`"."""
    match = re.fullmatch(r"(.*) - at `\$\.(.*)`", message, flags=re.DOTALL)
    if match is None:
        missing = re.fullmatch(r"Object missing required field `(.*)`", message)
        return f"{missing[1]} is required" if missing else message
    missing = re.fullmatch(r"Object missing required field `(.*)`", match[1])
    if missing:
        return f"{match[2]}.{missing[1]} is required"
    value: Any = values
    for part in match[2].split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return f"{match[2]} is {value!r}: {match[1][0].lower()}{match[1][1:]}"


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return option
    return None


def _is_union(annotation: Any) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union


def _is_bytes(annotation: Any) -> bool:
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    return any(ByteSize == option for option in options)


def _metavar(annotation: Any) -> str:
    if _is_bytes(annotation):
        return "SIZE"
    if typing.get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, typing.get_args(annotation))) + "}"
    if typing.get_origin(annotation) is dict:
        return "{NAME: VALUE, ...}"
    names = [a.__name__ for a in typing.get_args(annotation) or (annotation,) if isinstance(a, type)]
    return "|".join(n.upper() for n in names if n != "NoneType") or "VALUE"


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"default: {value!r}".replace("%", "%%")
