"""Files in shared memory, and whose they are."""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from penstock_common.tensors.shared_memory import ROOT
from tests.fakes.processes import Service

LOCK = re.compile(r"penstock-([0-9a-f]{32})\.lock")


def owners_of(service: Service) -> set[str]:
    """What names of shared memory say of a process: by the locks that it has open. Empty when it has ended."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for file in Path(f"/proc/{service.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if match := LOCK.fullmatch(file.readlink().name):
                    found.add(match[1])
    return found


def files_of(owners: Iterable[str]) -> list[Path]:
    """What these have there, locks too."""
    known = set(owners)
    return sorted(path for path in ROOT.iterdir() if any(owner in path.name for owner in known))
