"""A small storm of hostile requests at a whole system of processes. `make fuzz` is the large one."""

import pytest

from tests.fuzz.run import Options, fuzz, report

pytestmark = pytest.mark.slow


async def test_hostile_requests_are_their_senders_errors_and_leave_nothing_behind() -> None:
    options = Options(requests=1500, seed=1, rate=150.0, at_once=16, quiet=0.5, schema_examples=4)
    result = await fuzz(options)
    assert not result.wrong, report(result)
    assert result.tally.count >= 1500
