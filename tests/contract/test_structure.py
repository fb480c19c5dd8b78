"""docs/structure.md names every room, the folders of unit tests are those of the code, and no file of production is long."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {path.parent.name: path for path in sorted((ROOT / "services").glob("*/penstock_*"))}
UNNAMED = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
LONGEST = 600
"""Lines of a file of production."""


def rooms(package: Path) -> set[str]:
    """Folders and modules directly below a package, folders with a slash."""
    found = (path.name + "/" * path.is_dir() for path in package.iterdir())
    return {name for name in found if name.rstrip("/") not in UNNAMED and not name.startswith(".")}


def lines_of(page: str) -> Iterator[tuple[str, str]]:
    """The service and the name of each of the page's lines about a room."""
    service = ""
    for line in page.splitlines():
        if found := re.match(r"(\S+)", line):
            service = found[1].removeprefix("services/")
        elif found := re.match(r"  (\S+)  ", line):
            yield service, found[1]


def unlike(package: Path, tests: Path) -> list[str]:
    """Folders of tests without a folder of the package, from the repository's root."""
    folders = sorted(
        path.relative_to(tests) for path in tests.rglob("*") if path.is_dir() and path.name != "__pycache__"
    )
    return [str(folder) for folder in folders if not (package / folder).is_dir()]


@pytest.mark.parametrize("service", PACKAGES)
def test_the_page_has_one_line_for_every_room(service: str) -> None:
    told = [name for of, name in lines_of((ROOT / "docs" / "structure.md").read_text()) if of == service]
    there = rooms(PACKAGES[service])
    assert there - set(told) == set(), "docs/structure.md has no line for these"
    assert set(told) - there == set(), "docs/structure.md has a line for what is not there"
    assert len(told) == len(there)


@pytest.mark.parametrize("service", PACKAGES)
def test_the_unit_tests_folders_are_the_services(service: str) -> None:
    assert unlike(PACKAGES[service], ROOT / "tests" / "unit" / service) == []


@pytest.mark.parametrize("folder", ["examples", "tests"])
def test_the_unit_tests_folders_are_those_of_what_they_test(folder: str) -> None:
    assert unlike(ROOT / folder, ROOT / "tests" / "unit" / folder) == []


def test_no_file_of_production_is_long() -> None:
    sources = (path for package in PACKAGES.values() for path in package.rglob("*.py"))
    long = {str(path.relative_to(ROOT)) for path in sources if len(path.read_text().splitlines()) > LONGEST}
    assert long == set(), "split them by their nouns"
