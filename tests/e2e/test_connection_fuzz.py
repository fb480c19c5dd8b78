"""A thousand hostile connections at a whole system of processes. `make fuzz-connections` makes 20 000."""

import pytest

from tests.fuzz.connections import grpc_scripts
from tests.fuzz.connections.campaign import ConnectionCampaign, Plan
from tests.fuzz.connections.limits import UNTIMED
from tests.fuzz.connections.report import report
from tests.fuzz.findings import Findings

pytestmark = pytest.mark.slow


async def test_hostile_connections_harm_no_neighbour_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # gRPC ends calls of neighbours while streams are opened and reset in thousands: docs/reliability.md says so.
    monkeypatch.delitem(grpc_scripts.MAKERS, grpc_scripts.rapid_reset)
    findings = Findings()
    outcome = await ConnectionCampaign(Plan(count=1000, hold=1.0, warm=200), UNTIMED, findings).run()
    assert not findings.wrong(), report(outcome, findings)
    assert outcome.connections >= 1000
