"""Requests with separate prefill and decode engines, and requests on draining engines, with real processes.

The tokens equal those of one engine, and no request has to be recomputed on another engine.
"""

import asyncio
import signal
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.systems.cluster import Answer, Cluster, read
from tests.fakes.systems.rank_group import metric
from tests.fakes.systems.transferring_cluster import transferring

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
STREAMS, TOKENS = 12, 500
TEXT = "once upon a time there was a little girl who had a red ball and a big dog and went to the park"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("warm_processes"),
]


def prompts() -> list[str]:
    """Return prompts with different beginnings, so that they share no blocks."""
    return [f"{TEXT[number:]} " + f"{TEXT} " * 4 + str(number) for number in range(STREAMS)]


async def answers(cluster: Cluster) -> list[list[int]]:
    calls = [
        cluster.generate(text, temperature=1.0, seed=number, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for number, text in enumerate(prompts())
    ]
    read_all: list[Answer] = await asyncio.gather(*map(read, calls))
    return [answer.token_ids for answer in read_all]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected() -> list[list[int]]:
    async with Cluster(DEMO_MODEL, engines=1) as alone:
        tokens = await answers(alone)
    assert {len(each) for each in tokens} == {TOKENS}
    return tokens


@pytest.fixture(params=["grpc", "shared_memory"])
def transport(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


async def test_two_legs_give_the_tokens_of_one_engine(transport: str, expected: list[list[int]]) -> None:
    async with transferring(DEMO_MODEL, 3, transport, "prefill", "decode", "decode") as cluster:
        assert await answers(cluster) == expected
        # All requests are in one series of the metric. Each request has two legs, because the prompts are long.
        assert metric(cluster.frontend, "penstock:legs_total") == STREAMS
        assert metric(cluster.frontend, "penstock:requests_moved_total") == 0
        assert metric(cluster.frontend, "penstock:handover_gap_seconds_count") == STREAMS
        for stats in (await cluster.stats())[1:]:
            assert stats.num_running_reqs == 0


async def test_clients_do_not_notice_rolling_drains(transport: str, expected: list[list[int]]) -> None:
    async with transferring(DEMO_MODEL, 2, transport, drain_timeout=60) as cluster:
        handed = 0.0
        for drain in range(2):
            engine = cluster.engines[drain % 2]
            running = asyncio.create_task(answers(cluster))
            # A draining engine would refuse new requests, which would then move.
            while sum(stats.num_running_reqs for stats in await cluster.stats()) < STREAMS:
                assert not running.done(), "the streams have ended before all ran at once"
            engine.send_signal(signal.SIGTERM)
            assert await running == expected
            await engine.ended()
            await engine.restart()
            await cluster.until_engines_are_seen(2)
            handed = metric(cluster.frontend, "penstock:handover_gap_seconds_count")
        assert handed > 0
        assert metric(cluster.frontend, "penstock:requests_moved_total") == 0
