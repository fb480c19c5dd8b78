"""What silence means."""

import pytest

from penstock_frontend.config import DetectionConfig
from penstock_frontend.engine.watchdog import Watchdog

CONFIG = DetectionConfig(silence=2.0, probe_timeout=5.0, wedged_after=30.0)


def test_an_engine_is_asked_only_when_it_has_work_and_is_silent_for_longer_than_steps_take() -> None:
    watchdog = Watchdog(CONFIG, now=100.0)
    assert watchdog.doubt(101.9, has_work=True, lease_lost=False) == ""
    assert watchdog.doubt(103.0, has_work=False, lease_lost=False) == ""
    assert watchdog.doubt(103.0, has_work=True, lease_lost=False) == "it has work and has said nothing for 3.0 s"
    watchdog.heard(103.0)
    assert watchdog.doubt(104.0, has_work=True, lease_lost=True) == ""


def test_an_idle_engine_whose_lease_has_expired_is_asked() -> None:
    watchdog = Watchdog(CONFIG, now=100.0)
    assert watchdog.doubt(102.0, has_work=False, lease_lost=True) == "its lease with the coordinator has expired"


@pytest.mark.parametrize(
    ("age", "said_to_be_wedged", "verdict"),
    [
        (None, False, "silent, and it does not answer within 5 s"),
        (0.0, False, ""),
        (29.9, False, ""),
        (30.0, False, "it is wedged: it has work and has not finished a step for 30.0 s"),
        (10.0, True, "it is wedged: it has work and has not finished a step for 10.0 s"),
        (0.0, True, ""),
    ],
)
def test_what_an_answer_means(age: float | None, said_to_be_wedged: bool, verdict: str) -> None:
    assert Watchdog(CONFIG, now=0.0).verdict("silent", age, said_to_be_wedged=said_to_be_wedged) == verdict
