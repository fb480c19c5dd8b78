"""Files in shared memory, and the processes that own them."""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from penstock_common.tensors.shared_memory import ROOT
from tests.fakes.processes import Service

LOCK = re.compile(r"penstock-([0-9a-f]{32})\.lock")


def owners_of(service: Service) -> set[str]:
    """Return the owner ids in the names of the locks that a process has open. Empty if the process has ended."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for file in Path(f"/proc/{service.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if match := LOCK.fullmatch(file.readlink().name):
                    found.add(match[1])
    return found


def files_of(owners: Iterable[str]) -> list[Path]:
    """Return the files of these owners in shared memory, including locks."""
    known = set(owners)
    return sorted(path for path in ROOT.iterdir() if any(owner in path.name for owner in known))
