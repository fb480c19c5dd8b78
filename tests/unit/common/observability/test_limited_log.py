"""Warnings that a stranger can cause: each event once per interval, and how often it was left out."""

import logging

import pytest

from penstock_common.observability.limited_log import LimitedLog


def test_an_event_is_written_once_per_interval_with_the_number_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    log = LimitedLog(logging.getLogger("limited"), 10.0, lambda: now[0])
    for number in range(1000):
        log.warning("refused", peer=number)
    log.warning("another", peer="x")
    now[0] += 9.9
    log.warning("refused", peer="too early")
    now[0] += 0.2
    log.warning("refused", peer="later")
    found = [(each.message, each.__dict__["peer"], each.__dict__.get("left_out")) for each in caplog.records]
    assert found == [("refused", 0, None), ("another", "x", None), ("refused", "later", 1000)]
