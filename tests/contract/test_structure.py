"""docs/development/code-map.md is current, unit tests mirror the folders of the code, and no production file is too
long.
"""

from pathlib import Path

import pytest

from tests.documents.code_map import PAGE, first_sentence, page

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {path.parent.name: path for path in sorted((ROOT / "services").glob("*/penstock_*"))}
LONGEST = 600
"""Maximum number of lines of a production file."""


def unlike(package: Path, tests: Path) -> list[str]:
    """Return test folders without a corresponding package folder, relative to the repository's root."""
    folders = sorted(
        path.relative_to(tests) for path in tests.rglob("*") if path.is_dir() and path.name != "__pycache__"
    )
    return [str(folder) for folder in folders if not (package / folder).is_dir()]


def test_the_code_map_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "it is stale; run: make settings"


def test_every_module_says_what_it_is_for() -> None:
    sources = (path for package in PACKAGES.values() for path in package.rglob("*.py"))
    silent = [str(path.relative_to(ROOT)) for path in sources if not first_sentence(path.read_text(encoding="utf-8"))]
    assert silent == []


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ('"""Counts. More."""', "Counts"),
        ('"""Reads ``a.b`` of\nthe file.\n\nMore.\n"""', "Reads `a.b` of the file"),
        ("x = 1", ""),
    ],
)
def test_a_first_sentence_ends_at_its_full_stop(source: str, sentence: str) -> None:
    assert first_sentence(source) == sentence


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
