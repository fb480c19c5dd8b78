import logging
import re

import pytest

from penstock_common.observability.incidents import incident


def raised() -> Exception:
    try:
        raise RuntimeError("the token of somebody else")
    except RuntimeError as e:
        return e


def test_an_incident_has_a_number_that_the_log_and_the_client_share(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        told = incident(raised(), request="r1", doing="validating the request")
    (record,) = caplog.records
    number = record.__dict__["incident"]
    assert re.fullmatch(r"[0-9a-f]{8}", number)
    assert number in told.message
    assert record.__dict__["request"] == "r1"


def test_the_stack_is_in_the_log_and_the_errors_text_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        told = incident(raised(), request="r1", doing="validating the request")
    assert "in raised" in caplog.text
    assert "somebody" not in told.message
    assert (told.code, told.reason) == ("INTERNAL", "INCIDENT")


def test_two_incidents_have_different_numbers() -> None:
    first, second = (incident(raised(), request="r1", doing="x").message for _ in range(2))
    assert first != second
