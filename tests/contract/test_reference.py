"""The reference pages name every error reason, metric and flag, and no error reason that does not exist."""

import re
from pathlib import Path

from penstock_local.cli import build_parser
from tests.contract.words import current
from tests.documents import flags

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference"
SERVICES = Path(__file__).resolve().parents[2] / "services"
INCIDENT = "INCIDENT"
"""Reason that the code sets by a constant of another module."""


def test_every_error_reason_is_on_the_page() -> None:
    first_cells = [line.split("|")[1] for line in page("errors.md").splitlines() if line.startswith("| `")]
    named = {name for cell in first_cells for name in re.findall(r"`([A-Z_]+)`", cell)}
    assert named - {INCIDENT} == set(current()["reasons"]) - {INCIDENT}


def test_every_metric_is_on_the_page() -> None:
    named = set(re.findall(r"`((?:penstock|vllm):[a-z0-9_]+)", page("metrics.md")))
    missing = {
        name
        for path in SERVICES.rglob("*.py")
        for name in re.findall(r'"((?:penstock|vllm):[a-z0-9_]+)"', path.read_text(encoding="utf-8"))
        if not {name, f"{name}_total", f"{name}_info"} & named
    }
    assert missing == set()


def test_the_page_of_flags_is_up_to_date() -> None:
    assert page("flags.md") == flags.page(), "run make settings"


def test_every_command_and_flag_is_on_the_page() -> None:
    text = page("flags.md")
    for name, parser in flags.commands(build_parser()):
        section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert section, name
        missing = [
            flag for flag in parser._option_string_actions if flag not in {"-h", "--help"} and f"`{flag}" not in section
        ]
        assert missing == [], name


def page(name: str) -> str:
    """Return the text of a page of the reference."""
    return (REFERENCE / name).read_text(encoding="utf-8")
