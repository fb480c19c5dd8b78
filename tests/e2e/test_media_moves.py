"""Streams with images in their prompts survive killed engines, a killed coordinator, and cleared caches."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock.common.v1.media_pb2 import Media
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.rpc.channel import make_channel
from tests.fakes.multimodal_models import make_image, save_multimodal_model
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster import Answer, Cluster, read
from tests.fakes.systems.rank_group import metric

ENGINES, STREAMS, TOKENS, KILLS = 3, 32, 100, 5
IMAGES = 12

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class WithAdmin(Cluster):
    """Cluster with a known port for the operators' API of its frontend."""

    def __init__(self, model: Path, **flags: Any) -> None:
        self.admin_port = free_port()
        super().__init__(model, engines=ENGINES, frontend_flags={"admin__port": self.admin_port}, **flags)

    async def __aenter__(self) -> "WithAdmin":
        await super().__aenter__()
        return self


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WithAdmin]:
    folder = tmp_path_factory.mktemp("models") / "llava"
    save_multimodal_model("llava", folder)
    flags = {"scheduler__max_num_batched_tokens": 48}
    async with WithAdmin(folder, **flags) as running:
        yield running


def files() -> list[bytes]:
    found = []
    for number in range(IMAGES):
        file = io.BytesIO()
        make_image(60 + 20 * number, 300 - 15 * number, seed=number).save(file, "PNG")
        found.append(file.getvalue())
    return found


def make_requests() -> list[pb.GenerateRequest]:
    """Return requests with one or two images each. Several requests share an image."""
    images, found = files(), []
    for number in range(STREAMS):
        parts = [
            pb.PromptPart(text="What is in "),
            pb.PromptPart(media=Media(modality="image", data=images[number % IMAGES])),
            pb.PromptPart(text=f" and in picture {number}? "),
        ]
        if number % 3 == 0:
            parts.append(pb.PromptPart(media=Media(modality="image", data=images[number * 5 % IMAGES])))
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        found.append(pb.GenerateRequest(mixed=pb.MixedPrompt(parts=parts), sampling_params=params))
    return found


async def answers(cluster: WithAdmin, requests: list[pb.GenerateRequest]) -> list[list[int]]:
    calls = [cluster.stub.Generate(request) for request in requests]
    async with asyncio.timeout(10 * PATIENCE):
        read_all: list[Answer] = await asyncio.gather(*map(read, calls))
    return [answer.token_ids for answer in read_all]


async def reset(cluster: WithAdmin) -> None:
    """Reset the media and embedding caches of all engines."""
    async with make_channel(f"127.0.0.1:{cluster.admin_port}") as channel:
        admin = admin_rpc.AdminServiceStub(channel)
        assert (await admin.ResetMultimodalCache(admin_pb.ResetMultimodalCacheRequest())).num_engines_reset
        assert (await admin.ResetEncoderCache(admin_pb.ResetEncoderCacheRequest())).num_engines_reset


async def under_way(
    cluster: WithAdmin, requests: list[pb.GenerateRequest], engine: int
) -> asyncio.Task[list[list[int]]]:
    """Send the requests, and return the task that waits for their answers once an engine runs one of them. If all
    requests end before that, send them again.
    """
    running = asyncio.create_task(answers(cluster, requests))
    async with asyncio.timeout(10 * PATIENCE):
        while not (await cluster.stats())[engine].num_running_reqs:
            if running.done():
                running = asyncio.create_task(answers(cluster, requests))
            await asyncio.sleep(0.02)
    return running


async def test_nobody_notices_what_happens_to_engines(cluster: WithAdmin) -> None:
    requests = make_requests()
    expected = await answers(cluster, requests)
    assert {len(tokens) for tokens in expected} == {TOKENS}
    assert len(set(map(tuple, expected))) == STREAMS

    moved = metric(cluster.frontend, "penstock:requests_moved_total")
    for kill in range(KILLS):
        engine = cluster.engines[kill % ENGINES]
        running = await under_way(cluster, requests, kill % ENGINES)
        await reset(cluster)
        if kill == 1:
            await cluster.coordinator.kill()
            await cluster.coordinator.restart()
        await engine.kill()
        assert await running == expected
        await engine.restart()
        await cluster.until_engines_are_seen(ENGINES)
    moved = metric(cluster.frontend, "penstock:requests_moved_total") - moved
    queries, hits = (metric(cluster.frontend, f"vllm:mm_cache_{what}_total") for what in ("queries", "hits"))
    resent = metric(cluster.frontend, "penstock:media_resent_total")
    print(f"{moved:.0f} streams moved; {hits:.0f} of {queries:.0f} items left out; {resent:.0f} requests sent again")
    assert moved > 0
    assert hits > 0


async def test_repeated_media_are_sent_once_to_each_engine(cluster: WithAdmin) -> None:
    request = make_requests()[1]

    def counted() -> tuple[float, float]:
        queries, hits = (metric(cluster.frontend, f"vllm:mm_cache_{what}_total") for what in ("queries", "hits"))
        return queries, queries - hits

    queries, sent = counted()
    for _ in range(12):
        await answers(cluster, [request])
    queries_then, sent_then = counted()
    assert queries_then - queries == 12
    assert sent_then - sent <= ENGINES
