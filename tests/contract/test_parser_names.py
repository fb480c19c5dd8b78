"""docs/reference/chat.md and the description of the setting name exactly the registered parsers."""

import re
from collections.abc import Set
from pathlib import Path

import pytest

from penstock_common.config.settings import settings_of
from penstock_frontend.config import FrontendConfig
from penstock_frontend.processing.parsers import registry

API = (Path(__file__).resolve().parents[2] / "docs/reference/chat.md").read_text()
HEADER = "| parser | format that it reads |\n|---|---|\n"
NAMES = {"tool_parser": registry.tool_parser_names, "reasoning_parser": registry.reasoning_parser_names}


def documented() -> Set[str]:
    """Return the names in the first column of the page's table."""
    table = API.partition(HEADER)[2].partition("\n\n")[0]
    return {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}


def described(setting: str) -> Set[str]:
    """Return the names that the setting's description lists before ``none``."""
    [found] = [each for each in settings_of(FrontendConfig) if each.key == f"model.{setting}"]
    listed = found.kind.description.partition(": ")[2].partition(", none")[0]
    return set(listed.split(", "))


def test_the_page_lists_every_parser() -> None:
    assert documented() == {name for names in NAMES.values() for name in names()}


@pytest.mark.parametrize("setting", NAMES)
def test_the_setting_lists_every_parser(setting: str) -> None:
    assert described(setting) == set(NAMES[setting]())
