"""A small storm of hostile requests at whole systems of processes. `make fuzz` is the large one."""

import pytest

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
    assert not result.wrong, report(result)
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
    assert not result.wrong, report(result)
    assert result.findings.count >= 1000
