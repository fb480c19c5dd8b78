"""What is looked at of processes with media."""

import os
import subprocess
import sys

from tests.fakes.clients.command import eventually
from tests.soak.media import name_of
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
