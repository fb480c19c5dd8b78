"""An image that many requests contain.

Each frontend processes the image once, each session sends the image once, and each engine encodes the image once.
"""

import asyncio
import io
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from penstock.common.v1.media_pb2 import Media
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.multimodal_models import make_image, save_multimodal_model
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster, read

REQUESTS = 50

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("models") / "llava"
    save_multimodal_model("llava", folder)
    async with Cluster(folder, engines=2, frontends=2) as running:
        yield running


def image(seed: int) -> bytes:
    file = io.BytesIO()
    make_image(900, 700, seed=seed).save(file, "PNG")
    return file.getvalue()


def request(data: bytes, *, rank: int, text: str = "What is it?", salt: str = "") -> pb.GenerateRequest:
    media, question = pb.PromptPart(media=Media(modality="image", data=data)), pb.PromptPart(text=text)
    return pb.GenerateRequest(
        mixed=pb.MixedPrompt(parts=[media, question]),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
        cache_salt=salt,
        routing=pb.RoutingHints(data_parallel_rank=rank),
    )


def total(services: list[Service], name: str) -> list[float]:
    """Return a counter's sum over all its series, for each service."""
    found = []
    for service in services:
        with urllib.request.urlopen(f"http://127.0.0.1:{service.metrics_port}/metrics") as response:
            lines = response.read().decode().splitlines()
        found.append(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")))
    return found


def counts(cluster: Cluster) -> dict[str, list[float]]:
    frontends, engines = cluster.frontends, cluster.engines
    queries, hits = (total(frontends, f"vllm:mm_cache_{what}_total") for what in ("queries", "hits"))
    stored, found = (total(frontends, f"penstock:media_store_{what}_total") for what in ("queries", "hits"))
    return {
        "processed": [q - h for q, h in zip(stored, found, strict=True)],
        "sent": [q - h for q, h in zip(queries, hits, strict=True)],
        "encoded": total(engines, "penstock:encoder_embeds_total"),
        "cached": total(engines, "vllm:prefix_cache_hits_total"),
    }


def more(after: dict[str, list[float]], before: dict[str, list[float]], what: str) -> list[float]:
    return [a - b for a, b in zip(after[what], before[what], strict=True)]


async def test_an_image_of_many_requests_is_worked_on_once(cluster: Cluster) -> None:
    data, other = image(1), image(2)
    async with make_channel(cluster.frontends[1].address) as channel:
        stubs: list[Any] = [cluster.stub, rpc.InferenceServiceStub(channel)]

        async def ask(number: int, **fields: Any) -> float:
            begun = time.perf_counter()
            call = stubs[number % 2].Generate(request(**{"data": data, "rank": number // 2 % 2, **fields}))
            await call.read()
            first = time.perf_counter() - begun
            await read(call)
            return first

        await ask(0, data=image(3))  # warm up, because the first request waits for more than its image
        start = counts(cluster)
        first = await ask(0)
        times = [await ask(4) for _ in range(9)]
        await asyncio.gather(*(ask(number) for number in range(REQUESTS - 10)))
        once = counts(cluster)
        rows = max(more(once, start, "encoded"))
        assert more(once, start, "processed") == [1, 1]
        assert more(once, start, "sent") == [2, 2]
        assert more(once, start, "encoded") == [rows, rows]
        print(f"first {first * 1e3:.0f} ms, again {statistics.median(times) * 1e3:.1f} ms; {rows:.0f} rows")

        await ask(0, salt="another's")
        salted = counts(cluster)
        assert more(salted, once, "processed") == [1, 0]
        assert more(salted, once, "sent") == [1, 0]
        assert sorted(more(salted, once, "encoded")) == [0, rows]
        assert sum(more(salted, once, "cached")) == 0

        await ask(0, data=other)
        another = counts(cluster)
        assert sorted(more(another, salted, "encoded")) == [0, rows]
        assert sum(more(another, salted, "cached")) == 0
