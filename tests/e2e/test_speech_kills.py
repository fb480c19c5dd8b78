"""Transcriptions and embeddings of one frontend with two models survive killed engines, and end when clients disconnect."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from tests.chaos.two_models import (
    SPEECH,
    TEXT,
    Connection,
    TwoModels,
    TwoModelsRequest,
    embeddings,
    run,
    transcription,
    transcriptions,
    unfinished,
)
from tests.fakes.patience import PATIENCE

IN_FLIGHT = "penstock:requests_in_flight"

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TwoModels]:
    async with TwoModels(tmp_path_factory.mktemp("models"), positions=48) as running:
        yield running


async def test_no_request_fails_or_differs_when_an_engine_of_each_model_is_killed(cluster: TwoModels) -> None:
    load: dict[str, Sequence[TwoModelsRequest]] = {SPEECH: transcriptions(7, 5.0, 40.0), TEXT: embeddings(4, 32)}
    calm = await run(cluster, load, clients=4)
    assert calm.errors() == []
    assert len({str(answer.exact) for _, answer in calm.found[SPEECH]}) == 7
    killed = await run(cluster, load, clients=4, kills=1)
    assert [kill.model for kill in killed.kills] == [SPEECH, TEXT]
    assert killed.errors() == []
    assert killed.differing(calm) == []
    assert min(killed.moved.values()) > 0


async def test_engines_abort_the_requests_of_clients_that_disconnect(cluster: TwoModels) -> None:
    ended, windows = "vllm:request_success_total", 8
    before = await cluster.metric(ended, SPEECH)
    engines = cluster.engines_of(SPEECH)
    ways = [transcription(number, 30.0 * windows) for number in (0, 3, 5)]
    assert [way.kind.split(",")[0] for way in ways] == ["gRPC", "HTTP stream", "HTTP"]
    async with Connection(cluster.frontend) as connection:
        calls = [asyncio.ensure_future(way.send(connection)) for way in ways]
        async with asyncio.timeout(PATIENCE):
            while await cluster.metric(IN_FLIGHT, SPEECH) < 2 * len(calls):
                await asyncio.sleep(0.01)
            while not min([await unfinished(engine) for engine in engines]):
                await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        async with asyncio.timeout(PATIENCE):
            while await cluster.metric(IN_FLIGHT, SPEECH):
                await asyncio.sleep(0.01)
        await cluster.until_idle()
    assert await cluster.metric(ended, SPEECH) - before < windows * len(calls)
