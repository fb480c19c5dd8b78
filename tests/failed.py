"""``python -m tests.failed``: prints the files with failed tests of the last run, from pytest's cache."""

import json
from pathlib import Path

KEPT = Path(__file__).resolve().parents[1] / ".pytest_cache/v/cache/lastfailed"


def files(kept: Path) -> list[str]:
    """Return the files with failed tests, relative to the repository's root. Deleted files are left out."""
    if not kept.exists():
        return []
    names = {test.partition("::")[0] for test in json.loads(kept.read_text(encoding="utf-8"))}
    return sorted(name for name in names if (KEPT.parents[3] / name).exists())


if __name__ == "__main__":
    print(*files(KEPT))
