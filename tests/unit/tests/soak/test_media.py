"""What is looked at of processes with media."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_common.tensors.shared_memory import ROOT, SegmentWriter, owner_of
from tests.fakes.clients.command import eventually
from tests.soak.media import name_of, owners_of
from tests.soak.watch import children_of


def test_children_are_found_by_the_words_they_were_started_with() -> None:
    before = set(children_of(os.getpid()))
    words = [sys.executable, "-c", "input()", "media.worker"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as child:
        assert set(children_of(os.getpid())) - before == {child.pid}
        assert eventually(lambda: "media.worker" in name_of(child.pid))
        child.communicate(b"\n")
    assert name_of(child.pid) == ""
    assert child.pid not in children_of(os.getpid())


@pytest.mark.skipif(not ROOT.is_dir(), reason="no shared memory")
def test_a_process_is_known_by_its_lock_in_shared_memory() -> None:
    own: Any = SimpleNamespace(pid=os.getpid())
    writer = SegmentWriter("a soak's test")
    assert owner_of("a soak's test") not in owners_of(own)
    assert (ref := writer.write(b"x")) is not None
    try:
        assert owner_of("a soak's test") in owners_of(own)
        assert owner_of("a soak's test") in ref.name
    finally:
        writer.close()
    assert not [path for path in ROOT.iterdir() if owner_of("a soak's test") in path.name]
