"""Fixtures and hooks for all tests."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import skipped

if TYPE_CHECKING:
    from tests.fakes.warm_python import WarmPython
    from tests.schedule import FileScheduling

_QUICK = "QUICK_TESTS"
"""Environment variable that leaves out slow tests if it is set."""

_UNTIL = "SLOW_TESTS_UNTIL"
"""Environment variable with the time, in seconds since the Unix epoch, after which no slow test begins."""

_MAY_BE_SLOW = re.compile("slow|each_value|quick", re.IGNORECASE)
"""Pattern that occurs in the source of every test file with slow tests or slow cases."""

# The duration of a property test's example depends on the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Triton reads at import whether to interpret or compile. transformers imports Triton, so set the variable before any
# test is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without slow tests if only slow tests run: importing takes longer than many tests."""
    if config.option.markexpr != "slow" or not collection_path.name.startswith("test_"):
        return None
    return None if _MAY_BE_SLOW.search(collection_path.read_text(encoding="utf-8")) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that ``quick`` and ``each_value`` leave out of the quick suite."""
    tests: dict[str, list[tuple[pytest.Item, set[tuple[str, int]]]]] = {}
    for item in items:
        if (quick := item.get_closest_marker("quick")) and item.nodeid.partition("[")[2][:-1] not in quick.args:
            item.add_marker("slow")
        if item.get_closest_marker("each_value"):
            params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
            values = {(name, id(value)) for name, value in params.items()}
            tests.setdefault(item.nodeid.partition("[")[0], []).append((item, values))
    for cases in tests.values():
        lacking = set[tuple[str, int]]().union(*(values for _, values in cases))
        for _ in range(len(cases)):
            item, values = max(cases, key=lambda case: len(case[1] & lacking))
            if not values & lacking:
                break
            lacking -= values
            cases.remove((item, values))
        for item, _ in cases:
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests in quick runs and after CI's time, before their fixtures are created."""
    if not item.get_closest_marker("slow"):
        return
    if os.environ.get(_QUICK):
        pytest.skip("slow (make test-slow)")
    if time.time() > float(os.environ.get(_UNTIL, "inf")):
        pytest.skip("CI has no time left for more slow tests (make test-slow)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> "FileScheduling | None":
    """Distribute test files in such a way that a dead worker costs one test."""
    from tests.schedule import make_scheduler  # imported here, because only the controlling process distributes tests

    return make_scheduler(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a summary of the skipped tests and of how to run them."""
    if told := skipped.tell(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(told)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Restore the default handler of SIGINT.

    Background jobs of a shell ignore SIGINT, and processes of a test would inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def warm() -> "Iterator[WarmPython]":
    """Yield a server that starts Python processes with finished imports."""
    from tests.fakes.warm_python import warm_python  # imported here, because few tests start processes

    with warm_python() as warm:
        yield warm


@pytest.fixture(scope="module")
def warm_processes(warm: "WarmPython") -> Iterator[None]:
    """Start engines and services with ``warm``, for test modules that do not test the start."""
    from tests.fakes.processes import Service
    from tests.fakes.warm_python import use

    with pytest.MonkeyPatch.context() as patch:
        use(warm, patch.setattr)
        patch.setattr(Service, "warm", warm)
        yield
