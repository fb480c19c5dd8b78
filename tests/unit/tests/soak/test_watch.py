"""Whether what a process holds has grown."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.soak import watch as watch_module
from tests.soak.plot import plot
from tests.soak.watch import IDLE, Held, Watch, gauge, per_minute, total


def watch_of(*fds: int, pid: int = 7) -> Watch:
    """Idle, three times busy, idle: that many files open."""
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


def test_what_is_given_back_is_no_growth() -> None:
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


def test_samples_are_added_up_that_have_the_labels() -> None:
    text = '# TYPE a_total counter\na_total{x="1",y="1"} 2.0\na_total{x="1",y="2"} 3.5\na_total{x="2",y="1"} 7.0\n'
    assert total(text, "a_total", x="1") == 5.5
    assert total(text, "a_total", x="3") == total(text, "a") == 0.0


def test_a_slope_needs_two_points() -> None:
    assert per_minute([(1.0, 3.0)]) == 0.0


@pytest.mark.parametrize("leased", [0.0, 3.0])
def test_the_plot_is_written(leased: float, tmp_path: Path) -> None:
    samples = [msgspec.structs.replace(held, leased_blocks=leased) for held in watch_of(1, 2, 3, 4, 5).samples]
    plot(tmp_path / "soak.png", samples)
    picture = (tmp_path / "soak.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[20:24], "big") == (880 if not leased else 1760), "as high as it has rows"


def test_a_process_that_has_ended_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def text(*_: Any) -> str:
        return "# TYPE penstock:asyncio_tasks gauge\npenstock:asyncio_tasks 3.0\n"

    monkeypatch.setattr(watch_module, "metrics", text)
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        service: Any = SimpleNamespace(pid=child.pid)
        watch = Watch({"gone": service, "here": cast(Any, SimpleNamespace(pid=os.getpid()))})
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        asyncio.run(watch.sample())
    assert [held.service for held in watch.samples] == ["here"]
