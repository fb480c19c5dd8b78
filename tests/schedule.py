"""Distribution of test files to worker processes, also after a worker has died."""

import contextlib

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FileScheduling(LoadFileScheduling):
    """Distribution of whole test files, in which a dead worker costs one failed test.

    The class that it replaces queues finished files and the fatal test again. Then a worker waits forever for a test, or
    the next worker dies (pytest-xdist 1323, 1327, 1371 and 1378).
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Queue the remaining tests of a worker that has ended. Return the test that it was running, or None."""
        files = self.assigned_work.pop(node)
        fatal = next((test for tests in files.values() for test, done in tests.items() if not done), None)
        for file, tests in files.items():
            remaining = {test: done for test, done in tests.items() if not done and test != fatal}
            if remaining:
                self.workqueue[file] = remaining
        if fatal is not None:
            for other in self.assigned_work:
                self._reschedule(other)
        return fatal

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Send the next file to a worker. If the worker has just ended, ``remove_node`` queues the file again."""
        with contextlib.suppress(OSError):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections or node.shutting_down:
            return
        super()._reschedule(node)
        # A worker starts a test when it knows the following test, or knows that no test follows.
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


def make_scheduler(config: pytest.Config, log: object) -> FileScheduling | None:
    """Return the distribution for ``--dist loadfile``, or None for other values."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
