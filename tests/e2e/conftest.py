"""Fixture: a cluster of real processes with the demo model, shared by the tests of a module."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.fakes.systems.cluster import Cluster

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "penstock-tiny"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    """Yield a cluster with a coordinator, two engines and one frontend."""
    async with Cluster(DEMO_MODEL, engines=2) as running:
        yield running
