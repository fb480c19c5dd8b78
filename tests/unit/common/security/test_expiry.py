"""When a service warns of the ends of its certificates."""

import itertools
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock_common.config.sections import ClientTlsConfig
from penstock_common.rpc.credentials import ClientCredentials, is_of_tls
from penstock_common.security.tls import Certificates, ExpiryWarnings
from tests.fakes.network.certificates import Authority

DAY, HOUR = 86_400.0, 3600.0
END = 100 * DAY


def times(warnings: ExpiryWarnings, start: float, stop: float, step: float = 600.0) -> list[float]:
    """Seconds before the end at which a look every ``step`` seconds warned."""
    found, now = [], END - start
    while now <= END - stop:
        if warnings.due({"server.tls.certificate": END}, now):
            found.append(END - now)
        now += step
    return found


def test_a_certificate_is_warned_of_once_in_two_weeks_then_hourly_in_the_last_day() -> None:
    warnings = ExpiryWarnings()
    assert times(warnings, 30 * DAY, 1.01 * DAY) == [14 * DAY]
    last_day = times(warnings, DAY, 600.0)
    assert len(last_day) == 24
    assert {a - b for a, b in itertools.pairwise(last_day)} == {HOUR}


def test_it_is_warned_of_at_its_end_and_behind_it() -> None:
    warnings = ExpiryWarnings()
    assert times(warnings, 1200.0, 600.0) == [1200.0]
    assert times(warnings, 0.0, -2 * HOUR) == [0.0, -HOUR, -2 * HOUR]


def test_one_that_ends_soon_at_the_start_is_warned_of_at_once_and_a_renewed_one_anew() -> None:
    warnings = ExpiryWarnings()
    assert warnings.due({"a": END, "b": 2 * END}, END - 3 * DAY) == ["a"]
    assert warnings.due({"a": END + DAY, "b": 2 * END}, END - 3 * DAY) == ["a"]
    assert warnings.due({"a": END + 50 * DAY}, END - 3 * DAY) == []


def test_handshakes_with_an_ended_certificate_are_warned_of_once_a_minute() -> None:
    warnings = ExpiryWarnings()
    due = [second for second in range(-5, 180) if warnings.handshake_is_due("server.tls", END, END + second)]
    assert due == [0, 60, 120]


@pytest.mark.parametrize(("days", "events"), [(3, ["certificate ends soon"]), (30, [])])
def test_the_log_says_so_when_a_hop_is_made(days: int, events: list[str], tmp_path: Path) -> None:
    files = Authority(days=90).issue("server", days=days).write(tmp_path / "server")
    with capture_logs() as logs:
        ClientCredentials(files.client(), field="coordinator.tls", certificates=Certificates())
    assert [log["event"] for log in logs] == events
    assert all(log["field"] == "coordinator.tls.certificate" and 71 <= log["hours_left"] <= 72 for log in logs)


def test_the_log_says_so_at_handshakes() -> None:
    certificates = Certificates()
    with capture_logs() as logs:
        for _ in range(3):
            certificates.handshake("http.tls", {"certificate": 1000.0})
        certificates.handshake("server.tls", {"certificate": 1e12})
    assert [(log["event"], log["field"], log["ended"]) for log in logs] == [
        ("TLS handshake with an expired certificate", "http.tls.certificate", "1970-01-01 00:16 UTC")
    ]
    ClientCredentials(ClientTlsConfig(), field="x", certificates=certificates)


def test_failures_of_tls_are_known() -> None:
    assert is_of_tls("Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK")
    assert not is_of_tls("failed to connect to all addresses: connection refused")
