"""Services are killed and restarted during requests of all kinds. Every answer equals that of an undisturbed run."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos import outages
from tests.chaos.outages import Known
from tests.chaos.summary import Summary
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.systems.cluster import Cluster

STREAMS, TOKENS = 16, 120
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("warm_processes"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Cluster]:
    """Yield two engines, two frontends and a coordinator.

    A stopping engine gives up its requests after 0.2 s. Connections last at most one second, so clients leave a
    stopping frontend soon.
    """
    moved = {"server__max_connection_age": 1, "http__max_connection_age": 1}
    async with Cluster(DEMO_MODEL, engines=2, frontends=2, drain_timeout=0.2, frontend_flags=moved) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def known(pair: Cluster) -> Known:
    return await outages.prepare(pair, streams=STREAMS, tokens=TOKENS)


def assert_unharmed(summary: Summary) -> None:
    assert summary.harmed == 0, summary
    assert summary.requests > summary.streams


async def test_engines_killed_one_after_the_other_harm_no_stream(pair: Cluster, known: Known) -> None:
    assert_unharmed(await outages.engines_killed(pair, known, streams=STREAMS, kills=2, log=print))
    await pair.until_idle()
    assert [stats.kv_cache_usage for stats in await pair.stats()] == [0.0, 0.0]


async def test_no_request_fails_while_the_coordinator_is_away(pair: Cluster, known: Known) -> None:
    summary, during = await outages.coordinator_away(pair, known, streams=8, seconds=5.0, log=print)
    assert_unharmed(summary)
    assert during > 0


async def test_a_killed_frontend_disturbs_no_other_stream_and_its_requests_are_aborted(
    pair: Cluster, known: Known
) -> None:
    result = await outages.frontend_killed(pair, known, streams=STREAMS, log=print)
    assert_unharmed(result.others)
    assert all(error.startswith("UNAVAILABLE") for error in result.broken), result.broken
    assert result.broken


async def test_all_services_restarted_in_turn_harm_no_stream(pair: Cluster, known: Known) -> None:
    summary, steps = await outages.rolling_restart(pair, known, streams=8, log=print)
    assert_unharmed(summary)
    assert [step.service for step in steps] == ["coordinator", "engine-0", "engine-1", "frontend-0", "frontend-1"]
