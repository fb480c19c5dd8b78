"""Typed configuration: one frozen struct per service, filled from a YAML file, the environment and flags.

Later sources win: file, then environment, then flags. Names derive from the struct: ``scheduler.max_num_seqs`` is the
key ``max_num_seqs`` under ``scheduler`` in the file, ``PENSTOCK_SCHEDULER__MAX_NUM_SEQS`` in the environment and
``--scheduler.max-num-seqs`` on the command line. Unknown keys are errors that name the nearest known one.
"""

import argparse
import os
import re
import socket
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

from penstock_common.errors import ConfigError, nearest

T = TypeVar("T", bound=msgspec.Struct)

ENV_PREFIX = "PENSTOCK_"

ByteSize = Annotated[int, msgspec.Meta(extra={"kind": "bytes"})]
"""A number of bytes. Files, flags and environment may say ``512MiB``, ``2GB`` or a plain integer."""

ENGINES_DECIDE = "set wedged_after of the engines, which alone decide and tell"
"""What is there instead of the settings ``wedged_after`` of coordinator and frontend."""

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


def parse_bytes(text: str | int, *, key: str = "size") -> int:
    """Bytes in ``text``. K, M, G, T and KiB.. count in 1024s, KB.. in 1000s. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{key}: {text!r} is not a size; write a number of bytes or e.g. 512MiB, 4GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def require(key: str, value: str) -> None:
    """Raise ConfigError when a value that must be given is empty."""
    if not value:
        raise ConfigError(f"{key} is required")


def check_range(key: str, value: float | None, *, low: float | None = None, high: float | None = None) -> None:
    """Raise ConfigError unless ``low <= value <= high``. None passes: it means unset."""
    if value is None:
        return
    below = low is not None and not value >= low
    above = high is not None and not value <= high
    if below or above:
        limit = f"at least {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
        raise ConfigError(f"{key} is {value}; it must be {limit}")


def check_choice(key: str, value: str, known: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``known``."""
    if value not in known:
        raise ConfigError(f"{key} is {value!r}; known: {', '.join(known)}{nearest(value, known)}")


def model_name(path: str, served_model_name: str) -> str:
    """The name clients use: the served name, or the last part of the path. Engines and frontends must agree on it."""
    return served_model_name or path.rstrip("/").rsplit("/", 1)[-1]


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of a listener; off while ``certificate`` is empty. Paths of PEM files, which are read anew when they change.

    ``certificate``: the listener's own, with the intermediate ones after it, and its ``key``. ``ca``: clients must show a
    certificate that one of these authorities issued; empty: clients need none.
    """

    certificate: str = ""
    key: str = ""
    ca: str = ""

    def __post_init__(self) -> None:
        _check_pair(self.certificate, self.key)
        if self.ca and not self.certificate:
            raise ConfigError(f"tls.ca is {self.ca!r}; it asks clients for certificates, which needs tls.certificate")

    @property
    def enabled(self) -> bool:
        """Whether the listener speaks TLS, and nothing else."""
        return bool(self.certificate)


class ClientTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of connections to another service; off while ``ca`` is empty. Paths of PEM files, which are read anew when they
    change.

    ``ca``: authorities that may have issued the server's certificate. ``certificate`` and ``key``: what this service shows of
    itself. ``server_name``: the name that the server's certificate must have; empty: the host that is connected to.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        _check_pair(self.certificate, self.key)
        if (self.certificate or self.server_name) and not self.ca:
            raise ConfigError("tls.ca is required: without it the server's certificate cannot be checked")

    @property
    def enabled(self) -> bool:
        """Whether to connect with TLS."""
        return bool(self.ca)


def _check_pair(certificate: str, key: str) -> None:
    if certificate and not key:
        raise ConfigError("tls.key is required: tls.certificate is set")
    if key and not certificate:
        raise ConfigError("tls.certificate is required: tls.key is set")


class PeersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is who, where listeners ask for certificates: the DNS names and URIs of subjects (SAN) that make a peer a frontend, an
    engine or an operator. Certificates' other names and their common names count for nothing.
    """

    frontends: tuple[str, ...] = ("penstock-frontend",)
    engines: tuple[str, ...] = ("penstock-enginecore",)
    operators: tuple[str, ...] = ("penstock-operator",)


def check_reuse_port(field: str, wanted: bool) -> None:
    """Raise ConfigError where ports are to be shared and the system cannot."""
    if wanted and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(f"{field} is true; this system has no SO_REUSEPORT, so a port is for one process alone")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gRPC listener. ``max_message_bytes`` bounds a message, ``max_concurrent_streams`` the calls of a connection.

    ``health_port``: another port of the same host with ``grpc.health.v1`` alone, without TLS, for probes that know none;
    -1 for none. ``reuse_port``: other processes that say so too may listen on ``port`` beside this one, and the system shares the
    connections out; otherwise a port that is taken is refused.
    """

    host: str = "0.0.0.0"
    port: int = 0
    max_message_bytes: ByteSize = 64 * 1024 * 1024
    max_concurrent_streams: int = 10_000
    health_port: int = -1
    reuse_port: bool = False
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        require("server.host", self.host)
        check_reuse_port("server.reuse_port", self.reuse_port)
        check_range("server.port", self.port, low=0, high=65_535)
        check_range("server.health_port", self.health_port, low=-1, high=65_535)
        check_range("server.max_message_bytes", self.max_message_bytes, low=64 * 1024, high=2**31 - 1)
        check_range("server.max_concurrent_streams", self.max_concurrent_streams, low=1)


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Prometheus endpoint ``/metrics``. Port -1 switches it off."""

    host: str = "0.0.0.0"
    port: int = -1
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        check_range("metrics.port", self.port, low=-1, high=65_535)


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``format`` text is for people at a terminal, json for collectors.

    ``requests``: a line for every request that ends, at level info; engines write one for those that fail. ``prompts``: that
    line also has what users wrote and what the model answered. Both mean nothing to the coordinator.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    requests: bool = False
    prompts: bool = False

    def __post_init__(self) -> None:
        if self.prompts and not self.requests:
            raise ConfigError("log.prompts is true; it adds to the lines of log.requests, which must be true as well")


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry traces. ``endpoint``: where an OTLP collector listens for gRPC, ``host:port`` or a URL; empty: no traces.

    ``sample_ratio``: fraction of the requests traced, of those that come without a trace context; the others follow their
    caller's decision. ``service_name``: name of the service in traces; empty: penstock-frontend, penstock-enginecore or
    penstock-coordinator.
    """

    endpoint: str = ""
    sample_ratio: float = 1.0
    service_name: str = ""

    def __post_init__(self) -> None:
        check_range("tracing.sample_ratio", self.sample_ratio, low=0.0, high=1.0)
        if self.endpoint and not re.fullmatch(r"(https?://)?(\[[0-9a-fA-F:.]+\]|[^\s/:@]+):\d{1,5}/?", self.endpoint):
            raise ConfigError(f"tracing.endpoint is {self.endpoint!r}; it must be host:port or http(s)://host:port")


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
