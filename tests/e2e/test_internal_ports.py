"""Foreign connections to every internal port of two systems. `make fuzz-ports` opens a thousand to each port, also of an
engine on two nodes.
"""

import math

import pytest

from tests.fuzz.internal_ports.campaign import Limits, Plan, run
from tests.fuzz.internal_ports.foreign import KINDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("system", ["group", "kv transfer"])
async def test_foreign_connections_harm_no_stream_and_stop_no_system_from_forming(system: str) -> None:
    plan = Plan(connections=50, streams=8, tokens=30, seconds=0.2, systems=(system,))
    # The longest pause of a stream depends on the machine's load, so it has no limit here.
    result = await run(plan, Limits(gap=math.inf))
    assert not result.wrong
    assert {row.kind for row in result.rows} == set(KINDS)
    # Ranks and stages listen for each other only while they connect.
    closed_since = len(result.formed[system]) - len({row.port for row in result.rows})
    assert closed_since >= {"group": 1, "kv transfer": 0}[system]
