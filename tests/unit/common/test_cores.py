import os
from pathlib import Path

import pytest

from penstock_common.process import usable_cores

CORES = 8


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)), raising=False)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", CORES),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("5000 100000", 1),
        ("9000000 100000", CORES),
        ("nonsense", CORES),
    ],
)
def test_a_containers_cpu_limit_bounds_the_cores(limit: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores(tmp_path / "cpu.max") == cores


def test_without_control_groups_nothing_limits(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none") == CORES
