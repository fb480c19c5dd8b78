"""Whose files in shared memory are."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_common.tensors.shared_memory import ROOT, SegmentWriter, owner_of
from tests.soak.memory import files_of, owners_of


@pytest.mark.skipif(not ROOT.is_dir(), reason="no shared memory")
def test_a_process_is_known_by_its_lock_in_shared_memory() -> None:
    name = "a soak's test"
    own: Any = SimpleNamespace(pid=os.getpid())
    writer = SegmentWriter(name)
    assert owner_of(name) not in owners_of(own)
    assert (ref := writer.write(b"x")) is not None
    try:
        assert owner_of(name) in owners_of(own)
        names = {path.name for path in files_of([owner_of(name)])}
        assert names == {ref.name, f"penstock-{owner_of(name)}.lock"}
    finally:
        writer.close()
    assert not files_of([owner_of(name)])


def test_a_process_that_has_ended_owns_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    ended: Any = SimpleNamespace(pid=child.pid)
    assert owners_of(ended) == set()
