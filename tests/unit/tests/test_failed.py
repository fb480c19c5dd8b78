"""The list of files with tests that failed last."""

import json
from pathlib import Path

from tests.failed import files

HERE = "tests/unit/tests/test_failed.py"


def test_each_file_that_is_still_there_is_named_once(tmp_path: Path) -> None:
    kept = tmp_path / "lastfailed"
    assert files(kept) == []
    kept.write_text(json.dumps({f"{HERE}::a[x]": True, f"{HERE}::b": True, "tests/unit/test_gone.py::c": True}))
    assert files(kept) == [HERE]
