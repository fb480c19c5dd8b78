"""A service's command line: ``--config FILE`` and a flag for each setting, explained by what the structs say of them."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from penstock_common.config.loader import load
from penstock_common.config.settings import Section, Setting, removed, sections_of

T = TypeVar("T", bound=msgspec.Struct)


class ConfigSource(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Where a service's configuration comes from, beside the environment: a file, empty without one, and flags by dotted keys."""

    config_type: type[T]
    file: str
    flags: Mapping[str, str]

    def load(self) -> T:
        """Read it, as it is now. Raises ConfigError."""
        return load(self.config_type, file=self.file, overrides=self.flags)


def from_command_line(
    config_type: type[T], *, prog: str, description: str, argv: Sequence[str] | None = None
) -> ConfigSource[T]:
    """Parse ``--config FILE`` and one flag per setting. Exits on ``--help`` and malformed flags."""
    args = vars(parser_of(config_type, prog=prog, description=description).parse_args(argv))
    file = args.pop("config") or ""
    return ConfigSource(config_type=config_type, file=file, flags={k: v for k, v in args.items() if v is not None})


def parser_of(config_type: type[msgspec.Struct], *, prog: str, description: str) -> argparse.ArgumentParser:
    """The parser, whose help lists the settings by section with range, default and environment variable."""
    parser = argparse.ArgumentParser(
        prog=prog, usage=f"{prog} [--config FILE] [--SETTING VALUE ...]", description=description, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with the settings below as nested keys")
    for section in sections_of(config_type):
        _add_section(parser, section)
    for key in removed(config_type):  # so that it is refused as a key, with what is there instead
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
