"""Generator of docs/reference/flags.md from the command line's parsers: ``python -m tests.documents.flags``."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock_local.cli import build_parser

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/flags.md"

_HEAD = """\
# Command-line flags

<!-- `make settings` writes this page from the parsers in services/local/penstock_local; change those. -->

This page lists every command of `penstock` with its arguments and flags. [The `penstock` command](cli.md) explains how
to use them.
"""


def commands(parser: argparse.ArgumentParser, name: str = "penstock") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command with arguments, and its parser. Actions such as ``lora load`` are commands too."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for action in nested:
        for word, inner in action.choices.items():
            yield from commands(inner, f"{name} {word}")


def page() -> str:
    """Return the page for the current parsers."""
    sections = [_section(name, parser) for name, parser in commands(build_parser())]
    return "\n".join([_HEAD, *sections])


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    rows = [_row(parser, action) for action in parser._actions if action.dest != "help"]
    about = (parser.description or "").strip().split("\n\n")[0]
    text = f"## {name}\n\n{' '.join(about.split())}\n"
    return text + ("\n| Argument | Effect |\n|---|---|\n" + "".join(rows) if rows else "")


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    words = list(action.option_strings) or [str(action.metavar or action.dest)]
    if action.option_strings and action.nargs != 0:
        choices = "|".join(str(choice) for choice in action.choices) if action.choices else ""
        value = action.metavar if isinstance(action.metavar, str) else choices or action.dest.upper()
        words = [f"{word} {value}" for word in words]
    names = ", ".join(f"`{word}`" for word in words).replace("|", "\\|")
    # The formatter fills in defaults, as --help does.
    effect = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"| {names} | {' '.join(effect.split()).replace('|', chr(92) + '|')} |\n"


def main() -> None:
    """Write the page if it has changed."""
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        PAGE.write_text(page(), encoding="utf-8")
        print("wrote docs/reference/flags.md", file=sys.stderr)


if __name__ == "__main__":
    main()
