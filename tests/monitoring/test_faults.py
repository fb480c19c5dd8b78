"""Alerts in a real Prometheus with real services: each alert fires on its fault, and none fires under normal load."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.models.small_tokenizers import save_model
from tests.monitoring import queries
from tests.monitoring.faults import CASES
from tests.monitoring.prometheus import program
from tests.monitoring.system import LORA, System

pytestmark = pytest.mark.asyncio(loop_scope="module")
PLAIN_SECONDS = 20
"""Seconds for which no alert may fire: two windows of the rules."""
ONLY_WITH_FAULTS = {"penstock:requests_failed_total", "penstock:requests_refused_total"}
"""Counters without series before their first event."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    program("prometheus")
    model = save_model(tmp_path_factory.mktemp("models") / "model")
    async with System(model, tmp_path_factory.mktemp("faults")) as running:
        yield running


async def test_nothing_fires_under_plain_load_and_every_query_has_series(system: System) -> None:
    fired: set[str] = set()
    async with system.asked(clients=4), system.asked(clients=1, model=LORA):
        for _ in range(PLAIN_SECONDS):
            fired |= await system.prometheus.firing()
            await asyncio.sleep(1)
        named = queries.of_dashboard() | queries.of_pages()
        empty = [name for name, query in named.items() if not await system.prometheus.query(query) and not rare(query)]
        recorded = [name for name in queries.of_rules() if ":" in name]
        empty += [name for name in recorded if not await system.prometheus.query(name)]
    assert fired == set()
    assert empty == []


def rare(query: str) -> bool:
    return any(use.metric in ONLY_WITH_FAULTS for use in queries.uses(query))


@pytest.mark.parametrize("fault", CASES)
async def test_alerts_fire_when_their_fault_is_made(system: System, fault: str) -> None:
    case = CASES[fault]
    await system.prometheus.until_quiet()
    async with case.fault(system):
        await system.prometheus.until_firing(case.alerts)
    await system.until_whole()


async def test_what_is_counted_when_it_fails_has_series_then(system: System) -> None:
    named = {name: query for name, query in queries.of_dashboard().items() if rare(query)}
    assert named
    assert [name for name, query in named.items() if not await system.prometheus.query(query)] == []


async def test_every_alert_has_a_fault() -> None:
    alerts = {name for name in queries.of_rules() if ":" not in name}
    assert set().union(*(case.alerts for case in CASES.values())) == alerts
