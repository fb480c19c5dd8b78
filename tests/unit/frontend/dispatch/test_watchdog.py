"""Detection of silent engines."""

import pytest

from penstock_common.types.outputs import SchedulerStats
from penstock_frontend.config import DetectionConfig
from penstock_frontend.dispatch.watchdog import Watchdog

CONFIG = DetectionConfig(silence=2.0, probe_timeout=5.0)


def test_an_engine_is_probed_only_if_busy_and_silent_for_longer_than_a_step() -> None:
    watchdog = Watchdog(CONFIG, now=100.0)
    assert watchdog.doubt(101.9, has_work=True, lease_lost=False) == ""
    assert watchdog.doubt(103.0, has_work=False, lease_lost=False) == ""
    assert (
        watchdog.doubt(103.0, has_work=True, lease_lost=False) == "the engine had requests but sent nothing for 3.0 s"
    )
    watchdog.heard(103.0)
    assert watchdog.doubt(104.0, has_work=True, lease_lost=True) == ""


def test_an_idle_engine_whose_lease_has_expired_is_asked() -> None:
    watchdog = Watchdog(CONFIG, now=100.0)
    assert watchdog.doubt(102.0, has_work=False, lease_lost=True) == "the coordinator did not list the engine"


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (None, "silent, and the engine did not answer a probe within 5 s"),
        (SchedulerStats(), ""),
        (SchedulerStats(seconds_since_last_step=9000.0), ""),
        (
            SchedulerStats(seconds_since_last_step=10.0, wedged=True),
            "wedged: the engine had work but finished no step for 10.0 s",
        ),
    ],
)
def test_what_an_answer_means(answer: SchedulerStats | None, verdict: str) -> None:
    assert Watchdog(CONFIG, now=0.0).verdict("silent", answer) == verdict
