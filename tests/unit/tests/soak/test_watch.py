"""Detection of growing memory in a process."""

import pytest

from tests.soak.watch import IDLE, Held, Watch, gauge


def watch_of(*fds: int, pid: int = 7) -> Watch:
    """Return a watch of a process with ``fds`` open files: when idle, three times when busy, and when idle again."""
    phases = (IDLE, "soak", "soak", "soak", IDLE)
    watch = Watch({})
    watch.samples = [
        Held(60.0 * at, "frontend", pid, 100.0, count, 8, 12, phase)
        for at, (count, phase) in enumerate(zip(fds, phases, strict=True))
    ]
    return watch


def test_files_that_stay_open_are_growth_with_the_slope_of_the_busy_time() -> None:
    found = {g.what: g for g in watch_of(20, 40, 50, 60, 45).growth(busy="soak")}
    assert (found["fds"].start, found["fds"].end, found["fds"].allowed) == (20, 45, False)
    assert found["fds"].per_minute == pytest.approx(10)
    assert found["rss_mib"].allowed


def test_freed_memory_is_no_growth() -> None:
    assert all(g.allowed for g in watch_of(20, 90, 95, 90, 22).growth(busy="soak"))


def test_a_process_that_did_not_live_throughout_is_not_judged() -> None:
    watch = watch_of(20, 40, 50, 60, 20)
    watch.samples = watch.samples[2:]
    with pytest.raises(RuntimeError, match="no process lived throughout"):
        watch.growth(busy="soak")


def test_gauges_are_summed_over_their_labels_and_unknown_ones_are_an_error() -> None:
    text = '# TYPE a gauge\na{x="1"} 2.0\na{x="2"} 3.5\n'
    assert gauge(text, "a") == 5.5
    with pytest.raises(KeyError):
        gauge(text, "b")
