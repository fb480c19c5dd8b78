"""Hostile requests to complete systems of processes. `make fuzz` runs many more requests."""

import pytest

from tests.fuzz import params
from tests.fuzz.run import Options, fuzz, report

pytestmark = pytest.mark.slow


async def test_hostile_media_are_their_senders_errors_and_leave_nothing_behind() -> None:
    options = Options(
        requests=300,
        seed=1,
        rate=80.0,
        at_once=8,
        quiet=0.0,
        schema_examples=0,
        variants=("images",),
        warm=100,
        special=False,
    )
    result = await fuzz(options)
    assert result.wrong == [], report(result)
    assert result.findings.count >= 300


async def test_hostile_requests_are_their_senders_errors_and_leave_nothing_behind() -> None:
    options = Options(
        requests=1000,
        seed=1,
        rate=150.0,
        at_once=16,
        quiet=0.0,
        schema_examples=4,
        variants=("plain", "bfloat16"),
    )
    result = await fuzz(options)
    assert result.wrong == [], report(result)
    assert result.findings.count >= 1000


async def test_hostile_kv_transfer_params_are_their_senders_errors_and_name_nobody_else() -> None:
    campaign, sources, leases = await params.fuzz(1000, seed=3)
    assert sum(campaign.statuses.values()) + sum(campaign.codes.values()) == 1000
    assert campaign.statuses.keys() == {200, 400}
    assert campaign.codes.keys() == {"OK", "INVALID_ARGUMENT"}
    assert sources > 0
    assert leases > 0
    assert campaign.neighbours > 0
