"""A folder's conftest.py affects only the folder's own tests."""

import importlib
from pathlib import Path
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).parents[2]
SKIPPING = sorted(
    path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("conftest.py") if "why_not" in path.read_text()
)


def test_some_folders_skip_their_tests() -> None:
    assert Path("tests/images") in SKIPPING


@pytest.mark.parametrize("folder", SKIPPING, ids=str)
def test_tests_of_other_folders_are_not_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conftest = importlib.import_module(".".join([*folder.parts, "conftest"]))
    monkeypatch.setattr(conftest, "why_not", lambda: "it cannot be had")
    own, foreign = Mock(path=ROOT / folder / "test_own.py"), Mock(path=ROOT / "tests" / "unit" / "test_foreign.py")
    conftest.pytest_collection_modifyitems([own, foreign])
    own.add_marker.assert_called_once()
    foreign.add_marker.assert_not_called()
