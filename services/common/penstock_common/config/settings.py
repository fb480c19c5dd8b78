"""The settings of a service, section by section, as its configuration's structs declare them."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock_common.config.kinds import Kind, description_of, is_reread, kind_of, struct_in
from penstock_common.config.sizes import format_bytes

ENV_PREFIX = "PENSTOCK_"

_READ_ANEW = " Read anew while the service runs, when the file changes."


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a configuration. ``key`` is dotted: the names of its sections and its own. ``default`` None: unset."""

    key: str
    kind: Kind
    required: bool = False
    default: Any = None

    @property
    def flag(self) -> str:
        """``--scheduler.max-num-seqs``."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable: ``PENSTOCK_SCHEDULER__MAX_NUM_SEQS``."""
        return ENV_PREFIX + self.key.replace(".", "__").upper()

    @property
    def value(self) -> str:
        """What stands for the value in a command's help: its type, or the choices."""
        if self.kind.choices and self.kind.shape == "one":
            return "{" + ",".join(self.kind.choices) + "}"
        name = "SIZE" if self.kind.is_size else self.kind.type.__name__.upper()
        return {"one": name, "list": f"[{name}, ...]", "mapping": f"{{NAME: {name}, ...}}"}[self.kind.shape]

    @property
    def default_text(self) -> str:
        """The default as a file has it; ``required`` where there is none."""
        if self.required:
            return "required"
        if self.default is None:
            return "unset"
        if self.kind.is_size:
            return format_bytes(self.default)
        text = msgspec.json.encode(self.default).decode()
        return text if self.kind.shape != "one" or self.default == "" else text.strip('"')


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that belong together. ``key`` is empty for those at the top."""

    key: str
    description: str
    settings: tuple[Setting, ...]


def settings_of(config_type: type[msgspec.Struct]) -> Iterator[Setting]:
    """Every setting of a service, section by section."""
    for section in sections_of(config_type):
        yield from section.settings


def sections_of(config_type: type[msgspec.Struct]) -> Iterator[Section]:
    """The sections of a service that have settings: what is at the top, then each with those within it behind it."""
    found = _sections(config_type, key="", description=_summary(config_type), defaults=None)
    return (section for section in found if section.settings)


def with_defaults(
    config_type: type[msgspec.Struct], values: Mapping[str, Any], defaults: msgspec.Struct | None = None
) -> dict[str, Any]:
    """``values``, in which each section that is given in part has the rest as the struct around it has it by default.

    A frontend's ``admin`` is a ``ServerConfig`` on the loopback interface: it stays there when only its port is given.
    """
    filled = dict(values)
    for field in msgspec.structs.fields(config_type):
        default = _default(field) if defaults is None else getattr(defaults, field.name)
        nested, given = struct_in(field.type), values.get(field.name)
        if nested is not None and isinstance(given, dict):
            filled[field.name] = with_defaults(nested, given, default)
        elif defaults is not None and field.name not in values:
            filled[field.name] = msgspec.to_builtins(default)
    return filled


def removed(config_type: type[msgspec.Struct], prefix: str = "") -> dict[str, str]:
    """Dotted keys that there once were, each with what is there instead: those in the class variables ``REMOVED`` of structs."""
    found = {prefix + key: instead for key, instead in removed_here(config_type).items()}
    for field in msgspec.structs.fields(config_type):
        if (nested := struct_in(field.type)) is not None:
            found |= removed(nested, f"{prefix}{field.name}.")
    return found


def removed_here(config_type: type[msgspec.Struct]) -> Mapping[str, str]:
    """The same of one struct, without the sections in it."""
    found: Mapping[str, str] = getattr(config_type, "REMOVED", {})
    return found


def _sections(
    config_type: type[msgspec.Struct], *, key: str, description: str, defaults: msgspec.Struct | None
) -> Iterator[Section]:
    own: list[Setting] = []
    within: list[Section] = []
    for field in msgspec.structs.fields(config_type):
        name = f"{key}.{field.name}" if key else field.name
        default = _default(field) if defaults is None else getattr(defaults, field.name)
        if (nested := struct_in(field.type)) is not None:
            about = description_of(field.type) or _summary(nested)
            about += _READ_ANEW if is_reread(field.type) else ""
            within += _sections(nested, key=name, description=about, defaults=default)
        else:
            required = defaults is None and field.required
            own.append(Setting(key=name, kind=kind_of(field.type), required=required, default=default))
    yield Section(key=key, description=description, settings=tuple(own))
    yield from within


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return None
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _summary(config_type: type[msgspec.Struct]) -> str:
    """The first paragraph of the struct's docstring, on one line."""
    return " ".join((config_type.__doc__ or "").split("\n\n")[0].split())
